"""The answer of `list`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.naming import typed_name
from shmacc_inspect.output import SCHEMA_VERSION

if TYPE_CHECKING:
    from shmacc import inspection


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a segment stands still."""

    kind: str
    problem: str
    remedy: str
    command: str | None

    @classmethod
    def of(cls, found: inspection.Stall) -> Self:
        """Convert the library's record."""
        return cls(found.kind.value, found.problem, found.remedy, found.command)


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
        return cls(
            name=typed_name(summary.name),
            system_name=summary.name.system_name,
            namespace=summary.name.namespace,
            state=summary.state.value,
            detail=summary.detail,
            kind=summary.kind,
            dtype=summary.dtype,
            shape=None if summary.shape is None else list(summary.shape),
            reduction_type=summary.reduction_type,
            members=summary.members,
            lanes=summary.lanes,
            capacity=summary.capacity,
            private=summary.private,
            step=summary.global_step,
            gradients=summary.num_accumulated,
            rows=summary.rows,
            bytes_used=summary.bytes_used,
            bytes_reserved=summary.bytes_reserved,
            attached_alive=summary.attached_alive,
            attached_dead=summary.attached_dead,
            waiting_for=None if summary.waiting_for is None else list(summary.waiting_for),
            owner=summary.owner,
            owner_uid=summary.owner_uid,
            mode=f"{summary.mode:04o}",
            created=summary.created,
            age_seconds=now - summary.created,
            idle_seconds=None if summary.last_used is None else max(0.0, now - summary.last_used),
            stalls=[Stall.of(stall) for stall in summary.stalls],
        )


@dataclass(frozen=True, slots=True)
class SegmentList:
    """The answer of `list`."""

    segments: list[Segment]
    shared_memory_total: int
    shared_memory_free: int
    removed_but_used_bytes: int
    schema_version: int = SCHEMA_VERSION
