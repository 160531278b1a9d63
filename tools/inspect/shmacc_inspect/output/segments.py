"""The answer of `list`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.naming import typed_name
from shmacc_inspect.output import SCHEMA_VERSION, answer_of

if TYPE_CHECKING:
    from shmacc import inspection


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a segment stands still."""

    kind: str
    problem: str
    remedy: str
    command: str | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, summarised."""

    name: str
    system_name: str
    namespace: str | None
    state: str
    detail: str
    kind: str | None
    dtype: str | None
    shape: list[int | None] | None
    reduction_type: str | None
    members: int | None
    lanes: int | None
    capacity: int | None
    private: bool | None
    finished: bool | None
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
    idle_seconds: float | None
    stalls: list[Stall]

    @classmethod
    def of(cls, summary: inspection.Summary, now: float) -> Self:
        """Convert the library's record."""
        return answer_of(
            summary,
            cls,
            name=typed_name(summary.name),
            system_name=summary.name.system_name,
            namespace=summary.name.namespace,
            step=summary.global_step,
            gradients=summary.num_accumulated,
            mode=f"{summary.mode:04o}",
            age_seconds=now - summary.created,
            idle_seconds=None if summary.last_used is None else max(0.0, now - summary.last_used),
            stalls=[answer_of(stall, Stall) for stall in summary.stalls],
        )


@dataclass(frozen=True, slots=True)
class SegmentList:
    """The answer of `list`."""

    segments: list[Segment]
    shared_memory_total: int
    shared_memory_free: int
    removed_but_used_bytes: int
    schema_version: int = SCHEMA_VERSION
