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
    """A living attached process that has not applied in this round."""

    pid: int
    pid_is_here: bool
    seconds: float
    applied: int
    activity: str
    condition: str | None
    command: str | None


@dataclass(frozen=True, slots=True)
class Interval:
    """The answer of `watch` for a segment, once per interval."""

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
