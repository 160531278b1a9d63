"""A segment's rates and stragglers, which `watch` and `metrics` show besides its description."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import NotFoundError, ShmaccError
from shmacc_inspect import naming
from shmacc_inspect.output import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc.inspection import AttachedProcess, Description, SegmentName, Stats

REMEMBERED: Final = 240  # intervals: what the widest sparkline shows
GONE: Final = "gone"


def applied_this_round(process: AttachedProcess, seen: Description) -> bool:
    """Whether a gradient of this process is in the current round."""
    return seen.stats.num_accumulated > 0 and process.last_applied_step == seen.stats.global_step


def idle_since(process: AttachedProcess) -> float:
    """Return when a process last applied, or attached."""
    return process.last_applied or process.attached_at


def stragglers(seen: Description) -> tuple[AttachedProcess, ...]:
    """List living processes that have not applied in this round, the longest idle first.

    Processes that have never applied come last: perhaps they never will, like a parent that only
    keeps the accumulator open. Processes that only take are left out. While the round is empty and
    no take waits, there are no stragglers.
    """
    if not seen.stats.num_accumulated and not any(take.alive for take in seen.queue):
        return ()
    found = (
        process
        for process in seen.processes
        if process.alive
        and not applied_this_round(process, seen)
        and not _only_takes(process, seen)
    )
    return tuple(sorted(found, key=lambda process: (process.applied == 0, idle_since(process))))


def _only_takes(process: AttachedProcess, seen: Description) -> bool:
    waits = any(take.entry == process.entry for take in seen.queue)
    return process.applied == 0 and (process.taken > 0 or waits or process.activity == "takes")


@dataclass(slots=True)
class Course:
    """A watched segment: its last description, and the intervals between earlier ones.

    Attributes:
        name: The segment's name.
        seen: The last description; None if it could not be read.
        intervals: The remembered intervals, the latest last.
    """

    name: SegmentName
    seen: Description | None = None
    intervals: collections.deque[Interval] = field(
        default_factory=lambda: collections.deque(maxlen=REMEMBERED)
    )
    _moment: float = 0.0

    def look(self, look: inspection.Look) -> Interval:
        """Look again; return the interval since the last look."""
        now, moment = time.time(), time.monotonic()
        before, passed = self.seen, moment - self._moment
        self.seen, self._moment = None, moment
        try:
            self.seen = inspection.describe(self.name.system_name, look)
            interval = self._interval(self.seen, before, now, passed)
        except ShmaccError as error:
            state = GONE if isinstance(error, NotFoundError) else self._state()
            interval = Interval(now, self.name, state)
        self.intervals.append(interval)
        return interval

    @property
    def latest(self) -> Interval:
        """The latest interval."""
        return self.intervals[-1]

    def _state(self) -> str:
        try:
            return inspection.summarise(self.name).state.value
        except NotFoundError:
            return GONE

    def _interval(
        self, seen: Description, before: Description | None, now: float, passed: float
    ) -> Interval:
        if before is not None and before.token != seen.token:
            before = None  # a new segment under the name counts from 0 again
        has_rates = before is not None and not seen.summary.is_arrays
        old = before.stats if before is not None and has_rates else None
        last = max((event.serial for event in (before or seen).events), default=0)
        return Interval(
            time=now,
            name=self.name,
            state=seen.summary.state.value,
            summary=seen.summary,
            stats=seen.stats,
            queue=seen.queue,
            lock=seen.lock,
            steps_per_second=_rate(old, seen.stats, "global_step", passed),
            gradients_per_second=_rate(old, seen.stats, "applied", passed),
            bytes_per_second=_rate(old, seen.stats, "applied_bytes", passed),
            drops_per_second=_rate(old, seen.stats, "dropped", passed),
            stragglers=stragglers(seen),
            events=tuple(event for event in seen.events if event.serial > last),
        )


def _rate(old: Stats | None, new: Stats, counter: str, passed: float) -> float | None:
    if old is None or passed <= 0:
        return None
    difference: int = getattr(new, counter) - getattr(old, counter)
    return max(0.0, difference / passed)  # the step may be set back


class Watch:
    """The watched segments, by name.

    A segment that was given by its name stays listed when it is gone. Segments that were found by a
    glob, or because all are watched, are listed only while they exist.
    """

    def __init__(self, given: Sequence[str], *, everywhere: bool) -> None:
        """Watch the segments of these names and globs, or all in the scope.

        Raises:
            NotFoundError, InvalidArgumentError: See `naming.select`.
        """
        self._given = given
        self._everywhere = everywhere
        exact = map(naming.one, given)
        self._kept = {name.system_name: name for name in exact if name is not None}
        naming.select(given, everywhere=everywhere)
        self.courses: list[Course] = []

    def look(self) -> list[Interval]:
        """Look at each segment; return the intervals since the last look."""
        found = naming.select(self._given, everywhere=self._everywhere, missing_ok=True)
        present = self._kept | {name.system_name: name for name in found}
        known = {course.name.system_name: course for course in self.courses}
        self.courses = [
            known.get(system_name) or Course(name) for system_name, name in sorted(present.items())
        ]
        look = inspection.Look()
        return [course.look(look) for course in self.courses]
