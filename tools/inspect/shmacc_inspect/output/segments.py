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
    """Why a segment stands still.

    Attributes:
        kind: The cause, in one word.
        problem: What stands still, and why.
        remedy: What to do, in words.
        command: The whole command, quoted for a shell; null where none helps.
    """

    kind: str
    problem: str
    remedy: str
    command: str | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, summarised.

    Attributes:
        name: The NAME that verbs take.
        system_name: Its file's name in /dev/shm.
        namespace: Null: none.
        state: One of the states.
        detail: Why it has that state; what a file that was renamed was made as.
        kind: `sparse`, `dense`, `group`, `arrays` (shared arrays: no steps, no gradients, no waits,
            so these fields are null) or `parameters` (the same, but with a step).
        dtype: Null if it has several members.
        shape: Null if it has several members, or an unknown rank; a dimension that is unknown is
            null.
        reduction_type: As it was made.
        members: Tensors that it accumulates, or arrays that it has.
        lanes: How many applies go on at a time.
        capacity: How many gradients may be pending; null: any number.
        kept_free: Bytes of /dev/shm that it leaves to others when it grows: of a group over hosts
            what Ray's object store may still need. An apply that would need them waits for room.
        private: Whether it was made without a shared_name.
        finished: Whether the run is over.
        step: The global step.
        gradients: Accumulated and not yet taken.
        rows: Distinct rows that they touch; of parameters those in their tables, if any.
        bytes_used: What the round's content needs, or the arrays with their optimizers' slots.
        bytes_reserved: What the segment occupies.
        attached_alive: Living processes.
        attached_dead: Dead ones that have not been swept yet.
        waiting_for: The numbers that the waiting takes require, in order.
        owner: Of the file.
        owner_uid: Of the file.
        mode: Of the file, in octal.
        created: When it was made.
        age_seconds: Since it was made.
        idle_seconds: Since a process last attached or began an operation.
        stalls: Why it stands still; empty if it is not known to.
    """

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
    kept_free: int | None
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
    """The answer of `list`.

    Attributes:
        segments: One of each.
        shared_memory_total: Bytes of /dev/shm.
        shared_memory_free: Bytes of them that are free.
        removed_but_used_bytes: Memory of removed segments that processes still have open.
    """

    segments: list[Segment]
    shared_memory_total: int
    shared_memory_free: int
    removed_but_used_bytes: int
    schema_version: int = SCHEMA_VERSION
