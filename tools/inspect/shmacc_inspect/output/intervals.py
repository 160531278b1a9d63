"""The answer of `watch`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmacc_inspect.output import SCHEMA_VERSION

if TYPE_CHECKING:
    from shmacc_inspect.output.details import Event
    from shmacc_inspect.output.segments import Stall


@dataclass(frozen=True, slots=True)
class Straggler:
    """A living attached process that has not applied in this round.

    Attributes:
        pid: Its pid.
        pid_is_here: Whether that is a pid of this pid namespace.
        seconds: Since it last applied, or attached.
        applied: Its gradients that were accepted; 0: it never has applied.
        activity: What it does, as in `show`.
        condition: The kernel's; null if it cannot be seen.
        command: Its command line; null if it cannot be seen.
    """

    pid: int
    pid_is_here: bool
    seconds: float
    applied: int
    activity: str
    condition: str | None
    command: str | None


@dataclass(frozen=True, slots=True)
class Interval:
    """The answer of `watch` for a segment, once per interval.

    Attributes:
        time: When it ended.
        name: Of the segment.
        state: As in `list`, or `gone`.
        step: The global step.
        gradients: Accumulated and not yet taken.
        num_required: How many the head of the queue requires; null: no take waits.
        rows: Distinct rows that they touch.
        waiting: Takes that wait.
        attached_alive: Living processes.
        steps_per_second: Of the interval, as all rates.
        gradients_per_second: Accepted ones.
        bytes_per_second: Of the values of accepted gradients.
        drops_per_second: Refused gradients.
        dropped: Refused gradients since the segment was made.
        lock_holder_pid: The process that holds the lock; null: none, or not known.
        lock_holder_pid_is_here: Whether that is a pid of this pid namespace.
        stalls: Why it stands still; empty if it is not known to.
        lock_held_seconds: Since the holder began its operation.
        waited_seconds: How long the head of the queue has waited.
        shared_memory_free: Bytes of /dev/shm.
        stragglers: Living processes that have not applied in this round.
        events: Those of the interval, as in `show`.
    """

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
    lock_holder_pid_is_here: bool | None = None
    stalls: list[Stall] = field(default_factory=list)
    lock_held_seconds: float | None = None
    waited_seconds: float | None = None
    shared_memory_free: int | None = None
    stragglers: list[Straggler] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION
