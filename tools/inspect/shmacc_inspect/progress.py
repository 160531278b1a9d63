"""A segment's rates and stragglers, which `watch` and `metrics` add to the facts of `show`."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import NotFoundError, ShmaccError
from shmacc_inspect import naming
from shmacc_inspect.naming import typed_name
from shmacc_inspect.output import answer_of
from shmacc_inspect.output.details import Event, applied_this_round
from shmacc_inspect.output.intervals import Interval, Straggler
from shmacc_inspect.output.segments import Stall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc.inspection import AttachedProcess, Description, SegmentName, Stats

REMEMBERED: Final = 240  # intervals: what the widest sparkline shows
GONE: Final = "gone"


def stragglers(seen: Description, now: float) -> list[Straggler]:
    """List living processes that have not applied in this round, the longest idle first.

    Processes that have never applied follow: perhaps they never will, such as a parent that only
    keeps the accumulator open. Processes that only take are left out. Between rounds, when no take
    waits, there are none.
    """
    if not seen.stats.num_accumulated and not any(take.alive for take in seen.line):
        return []
    found = [
        answer_of(
            process,
            Straggler,
            seconds=max(0.0, now - (process.last_applied or process.attached_at)),
            condition=process.condition or None,
            command=process.command or None,
        )
        for process in seen.processes
        if process.alive
        and not applied_this_round(process, seen)
        and not _only_takes(process, seen)
    ]
    return sorted(found, key=lambda straggler: (straggler.applied == 0, -straggler.seconds))


def _only_takes(process: AttachedProcess, seen: Description) -> bool:
    waits = any(take.entry == process.entry for take in seen.line)
    return process.applied == 0 and (process.taken > 0 or waits or process.activity == "takes")


@dataclass(slots=True)
class Course:
    """A watched segment: its last description, and the intervals between earlier ones.

    Attributes:
        name: Its name.
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
        except NotFoundError:
            interval = Interval(now, typed_name(self.name), GONE)
        except ShmaccError:
            interval = Interval(now, typed_name(self.name), self._state())
        self.intervals.append(interval)
        return interval

    @property
    def latest(self) -> Interval:
        """The latest interval."""
        return self.intervals[-1]

    def history(self, of: str) -> list[float | None]:
        """Return a field of all remembered intervals."""
        return [getattr(interval, of) for interval in self.intervals]

    def _state(self) -> str:
        try:
            return inspection.summarise(self.name).state.value
        except NotFoundError:
            return GONE

    def _interval(
        self, seen: Description, before: Description | None, now: float, passed: float
    ) -> Interval:
        stats = seen.stats
        # A new segment under the name counts from 0 again.
        old = before.stats if before is not None and before.token == seen.token else None
        rated = old if seen.summary.kind not in {"arrays", "parameters"} else None
        head = next((take for take in seen.line if take.alive), None)
        known = before.events if before is not None and old is not None else seen.events
        last = max((event.serial for event in known), default=0)
        return Interval(
            time=now,
            name=typed_name(self.name),
            state=seen.summary.state.value,
            step=seen.summary.global_step,
            gradients=seen.summary.num_accumulated,
            num_required=head.num_required if head else None,
            rows=stats.rows if seen.summary.kind == "sparse" else None,
            waiting=stats.waiting,
            attached_alive=seen.summary.attached_alive,
            dropped=stats.dropped,
            lock_holder_pid=seen.lock.pid if seen.lock.held else None,
            lock_holder_pid_is_here=seen.lock.pid_is_here if seen.lock.held else None,
            stalls=[answer_of(stall, Stall) for stall in seen.summary.stalls],
            lock_held_seconds=_since(seen.lock.since, now) if seen.lock.held else None,
            waited_seconds=_since(head.since, now) if head else None,
            shared_memory_free=inspection.shared_memory_space().free,
            stragglers=stragglers(seen, now),
            events=[Event.of(event) for event in seen.events if event.serial > last],
            steps_per_second=_rate(rated, stats, "global_step", passed),
            gradients_per_second=_rate(rated, stats, "applied", passed),
            bytes_per_second=_rate(rated, stats, "applied_bytes", passed),
            drops_per_second=_rate(rated, stats, "dropped", passed),
        )


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else max(0.0, now - moment)


def _rate(old: Stats | None, new: Stats, counter: str, passed: float) -> float | None:
    if old is None or passed <= 0:
        return None
    difference: int = getattr(new, counter) - getattr(old, counter)
    return max(0.0, difference / passed)  # the step may be set back


class Watch:
    """The watched segments, by name.

    Those that were asked for by name stay when they are gone; those that a glob found, or that are
    watched because all are, come and go.
    """

    def __init__(self, given: Sequence[str], *, everywhere: bool) -> None:
        """Watch the segments of these names and globs, or all in the scope.

        Raises:
            NotFoundError, InvalidArgumentError: As `naming.select`.
        """
        self._given = given
        self._everywhere = everywhere
        exact = [text for text in given if not naming.is_glob(text)]
        self._kept = {name.system_name: name for name in map(inspection.resolve, exact)}
        naming.select(given, everywhere=everywhere)
        self.courses: list[Course] = []

    def look(self) -> list[Interval]:
        """Look at each; return the intervals since the last look."""
        found = naming.select_present(self._given, everywhere=self._everywhere)
        present = self._kept | {name.system_name: name for name in found}
        known = {course.name.system_name: course for course in self.courses}
        self.courses = [
            known.get(system_name) or Course(name) for system_name, name in sorted(present.items())
        ]
        look = inspection.Look()
        return [course.look(look) for course in self.courses]
