"""What `--json` says: the schema, apart from the library's own records.

Fields are only ever added within a schema version; what goes or changes its meaning raises it.
docs/inspect.md describes every field (a test sees to that). Times are seconds since the epoch,
sizes are bytes, what is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment in a line."""

    name: str
    system_name: str
    namespace: str | None
    state: str
    detail: str
    kind: str | None
    dtype: str | None
    shape: list[int | None] | None
    reduction_type: str | None
    private: bool | None
    step: int | None
    gradients: int | None
    rows: int | None
    bytes_used: int | None
    bytes_reserved: int
    attached_alive: int | None
    attached_dead: int | None
    waiting_for: list[int] | None
    owner: str
    owner_uid: int
    mode: str
    created: float
    age_seconds: float


@dataclass(frozen=True, slots=True)
class SegmentList:
    """What `list` says."""

    segments: list[Segment]
    shared_memory_total: int
    shared_memory_free: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Counters:
    """A segment's counters since it was made."""

    applied: int
    applied_bytes: int
    dropped: int
    discarded: int
    taken: int
    takes: int
    recoveries: int
    commits: int


@dataclass(frozen=True, slots=True)
class Process:
    """An attached process, living or dead."""

    pid: int
    same_pid_namespace: bool
    alive: bool
    condition: str
    command: str
    activity: str
    started: float | None
    attached_at: float
    last_seen: float
    last_applied: float | None
    last_applied_step: int | None
    applied_this_round: bool
    applied: int
    dropped: int
    taken: int


@dataclass(frozen=True, slots=True)
class Taker:
    """A take that waits in line."""

    position: int
    pid: int | None
    num_required: int
    waiting_seconds: float
    alive: bool
    overdue: bool


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock, and the name lock."""

    held: bool
    holder_pid: int | None
    held_seconds: float | None
    holder_condition: str | None
    semaphore_value: int | None
    in_operation: bool
    name_holder_pid: int | None


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the segment's file."""

    name: str
    offset: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class Row:
    """A row and how many gradients of this round touched it."""

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The most touched rows."""

    rows: list[Row]
    still: bool


@dataclass(frozen=True, slots=True)
class Values:
    """The round's sums, summarised."""

    numbers: int
    norm: float | None
    largest: float
    nan: int
    infinite: int
    still: bool


@dataclass(frozen=True, slots=True)
class Details:
    """What `show` says. Of a segment that cannot be read, `segment` and `error` only."""

    segment: Segment
    error: str | None = None
    token: str | None = None
    sealed: bool | None = None
    round_shape: list[int] | None = None
    counters: Counters | None = None
    processes: list[Process] = dataclasses.field(default_factory=list)
    line: list[Taker] = dataclasses.field(default_factory=list)
    lock: Lock | None = None
    regions: list[Region] = dataclasses.field(default_factory=list)
    index_load: float | None = None
    most_touched: Rows | None = None
    values: Values | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Straggler:
    """A living attached process that has not applied in this round."""

    pid: int
    seconds: float
    applied: int
    activity: str
    condition: str
    command: str


@dataclass(frozen=True, slots=True)
class Interval:
    """What `watch` says of a segment, once an interval."""

    time: float
    name: str
    state: str
    step: int | None = None
    gradients: int | None = None
    num_required: int | None = None
    rows: int | None = None
    waiting: int | None = None
    attached_alive: int | None = None
    steps_per_second: float | None = None
    gradients_per_second: float | None = None
    bytes_per_second: float | None = None
    drops_per_second: float | None = None
    dropped: int | None = None
    lock_holder_pid: int | None = None
    stragglers: list[Straggler] = dataclasses.field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` found."""

    subject: str
    severity: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What `check` says."""

    checked: int
    wrong: int
    notes: int
    findings: list[Finding]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that nobody uses, or that could not be judged."""

    file_name: str
    why: str
    age_seconds: float
    bytes_reserved: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What `clean` says."""

    dry_run: bool
    removed: list[str]
    would_remove: list[Leftover]
    left: list[Leftover]
    failed: list[str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Removal:
    """What `remove` says."""

    dry_run: bool
    name: str
    state: str
    attached_pids: list[int]
    removed: list[str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Cancelling:
    """What `cancel` says."""

    dry_run: bool
    name: str
    line: list[Taker]
    cancelled: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of a metric."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples."""

    name: str
    type: str
    help: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Metrics:
    """What `metrics` says."""

    metrics: list[Metric]
    schema_version: int = SCHEMA_VERSION


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def to_json(answer: Any, *, in_one_line: bool = False) -> str:
    """One of these types as JSON, with the schema's version in front."""
    fields = dataclasses.asdict(answer)
    ordered = {"schema_version": fields.pop("schema_version"), **fields}
    return json.dumps(ordered, indent=None if in_one_line else 2, allow_nan=False)
