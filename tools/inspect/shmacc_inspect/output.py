"""The answers of verbs as JSON, made of the records of `shmacc.inspection`.

Within a version of the schema, fields are only added: whoever removes a field or changes its
meaning raises the version. `make reference` generates the schema from the types here and in the
library, and from their docstrings (a test checks that each field has a description).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shmacc.inspection import Description, SegmentName
from shmacc_inspect.naming import typed_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc.inspection import (
        AttachedProcess,
        Event,
        Finding,
        Leftover,
        LockState,
        RowCount,
        Space,
        Stall,
        Stats,
        Summary,
        ValueSummary,
        WaitingTake,
    )

SCHEMA_VERSION: Final = 4
NAME_FIELDS: Final = {
    "name": "The NAME that verbs take.",
    "system_name": "Its file's name in /dev/shm.",
    "shared_name": "The name as it was given; of a damaged segment, perhaps cut.",
    "namespace": "The value of SHMACC_NAMESPACE that it was made under; null: none.",
}
TOKEN: Final = "token"  # noqa: S105  no password. JSON's numbers have fewer than its 64 bits: hexadecimal digits


@dataclass(frozen=True, slots=True)
class SegmentList:
    """The answer of `list`.

    Attributes:
        segments: A summary of each segment.
        shared_memory: How much shared memory there is.
        removed_but_used_bytes: Memory of removed segments that processes still have open.
    """

    segments: list[Summary]
    shared_memory: Space
    removed_but_used_bytes: int


@dataclass(frozen=True, slots=True)
class Shown(Description):
    """The answer of `show`: the segment's description, and what was asked for besides.

    Attributes:
        damage: What is wrong between its tables' rows and the index that leads to them, as in
            `check`; a note: they could not be compared.
        most_touched: With `--rows`: the rows that most gradients of the round touched.
        most_touched_still: With `--rows`: false if gradients kept arriving while they were read.
        values: With `--values`: the round's sums.
    """

    damage: tuple[Finding, ...]
    most_touched: tuple[RowCount, ...] | None
    most_touched_still: bool | None
    values: ValueSummary | None


@dataclass(frozen=True, slots=True)
class NotShown:
    """The answer of `show` for a segment that cannot be read.

    Attributes:
        summary: What is known of the segment.
        error: Why it cannot be read.
    """

    summary: Summary
    error: str


@dataclass(frozen=True, slots=True)
class Interval:
    """The answer of `watch` for a segment, once per interval. Rates are null at first.

    Attributes:
        time: When the interval ended, in seconds since the epoch.
        name: The segment's name.
        state: As in `list`, or "gone".
        summary: As in `list`; null: it could not be read.
        stats: The counters; null: it could not be read.
        queue: Waiting takes in order.
        lock: The lock; null: it could not be read.
        steps_per_second: Steps per second.
        gradients_per_second: Accepted gradients per second.
        bytes_per_second: Bytes per second of accepted gradients' values.
        drops_per_second: Refused gradients per second.
        stragglers: Living processes that have not applied in this round, the longest idle first.
        events: What happened in the interval.
    """

    time: float
    name: SegmentName
    state: str
    summary: Summary | None = None
    stats: Stats | None = None
    queue: tuple[WaitingTake, ...] = ()
    lock: LockState | None = None
    steps_per_second: float | None = None
    gradients_per_second: float | None = None
    bytes_per_second: float | None = None
    drops_per_second: float | None = None
    stragglers: tuple[AttachedProcess, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """Why the segment stands still."""
        return self.summary.stalls if self.summary else ()

    @property
    def suspected(self) -> Stall | None:
        """What perhaps makes the segment stand still."""
        return self.summary.suspected if self.summary else None

    @property
    def head(self) -> WaitingTake | None:
        """The waiting take that is served next."""
        return next((take for take in self.queue if take.alive), None)

    @property
    def waited(self) -> float:
        """How many seconds the first take has waited; 0: no take waits."""
        return max(0.0, self.time - self.head.since) if self.head else 0.0

    @property
    def lock_holder(self) -> str:
        """The pid of the process that has the lock, as it is shown; empty: none, or not known."""
        return self.lock.pid_label if self.lock and self.lock.held and self.lock.pid else ""

    @property
    def lock_held(self) -> float:
        """For how many seconds the lock's holder has been in its operation; 0: not known."""
        since = self.lock.since if self.lock else None
        return 0.0 if since is None else max(0.0, self.time - since)


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer of `check`.

    Attributes:
        checked: Segments that were checked.
        not_read: Further segments, which this user may not read.
        not_compared: Checked segments whose rows changed too fast to be compared with the index.
        wrong: Findings that are wrong.
        notes: Findings that are notes.
        findings: All findings, of both kinds.
    """

    checked: int
    not_read: int
    not_compared: int
    wrong: int
    notes: int
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The answer of `clean`.

    Attributes:
        dry_run: Whether this only says what would be removed.
        removed: File names, semaphores included.
        would_remove: What `--yes` would remove.
        left: What could not be judged, or what this user may not remove.
        failed: What could not be removed; the exit status is then 1.
        bytes_freed: Memory that was freed.
    """

    dry_run: bool
    removed: list[str]
    would_remove: list[Leftover]
    left: list[Leftover]
    failed: list[str]
    bytes_freed: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The answer of `remove` for a segment.

    Attributes:
        dry_run: Whether this only says what would be removed.
        name: The segment's file name in /dev/shm.
        state: As in `list`.
        attached: Living processes that have it attached.
        obstacle: Why it needs `--force`, or cannot be removed; null: neither.
        refused: Whether it needs `--force`, which is missing, or is another user's; the exit status
            is then 1.
        would_remove: File names that `--yes` would remove.
        removed: File names, semaphores included.
    """

    dry_run: bool
    name: str
    state: str
    attached: list[AttachedProcess]
    obstacle: str | None
    refused: bool
    would_remove: list[str]
    removed: list[str]


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer of `cancel` for a segment.

    Attributes:
        dry_run: Whether this only says what would be cancelled.
        name: The segment's file name in /dev/shm.
        queue: The waiting takes, as in `show`.
        lock_waiters: Processes that wait for the lock, perhaps in a take.
        cancelled: How many takes in the queue were cancelled.
    """

    dry_run: bool
    name: str
    queue: tuple[WaitingTake, ...]
    lock_waiters: list[AttachedProcess]
    cancelled: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer of `wait`.

    Attributes:
        reached: Whether the condition has come about; false: the wait timed out.
        waited_seconds: How long the wait took.
    """

    reached: bool
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of a metric.

    Attributes:
        name: The metric's name, with its suffix.
        labels: The labels' values, by name.
        value: The number.
    """

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples.

    Attributes:
        name: Its name, without suffix.
        type: As Prometheus names it.
        help: What the metric means.
        samples: One for each set of labels.
    """

    name: str
    type: str
    help: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The answer of `metrics`.

    Attributes:
        metrics: All metrics.
    """

    metrics: list[Metric]


ANSWERS: Final = {
    "list": (SegmentList,), "show": (Shown, NotShown), "watch": (Interval,), "check": (Findings,),
    "clean": (Cleaning,), "remove": (Removal,), "cancel": (Cancelling,), "wait": (Waiting,),
    "metrics": (Metrics,),
}  # fmt: skip


def descriptions(record: type) -> dict[str, str]:
    """Return the descriptions of a type's attributes, from its docstring, by name."""
    import inspect  # late: only `metrics` needs it
    import re

    _, _, listed = inspect.cleandoc(record.__doc__ or "").partition("\nAttributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def to_json(answer: Any, *, in_one_line: bool = False) -> str:
    """Return an answer as JSON, with the schema's version first."""
    import json  # late: a page does not need it

    versioned = {"schema_version": SCHEMA_VERSION, **_plain(answer)}
    return json.dumps(versioned, indent=None if in_one_line else 2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return a value that JSON can express: NaN and infinity become null."""
    if dataclasses.is_dataclass(value):
        return {
            key: plain
            for field in dataclasses.fields(value)
            for key, plain in _field(field.name, getattr(value, field.name))
        }
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _field(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, SegmentName):
        yield from zip(
            NAME_FIELDS,
            (typed_name(value), value.system_name, value.shared_name, value.namespace),
            strict=True,
        )
    else:
        yield name, f"{value:016x}" if name == TOKEN else _plain(value)
