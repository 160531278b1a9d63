"""The answer of `show`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import SCHEMA_VERSION, answer_of, finite
from shmacc_inspect.output.segments import Segment, Stall

if TYPE_CHECKING:
    from shmacc import inspection


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

    @classmethod
    def of(cls, seen: inspection.Description) -> Self:
        """Convert the library's record."""
        return answer_of(seen.stats, cls, commits=seen.generation)


@dataclass(frozen=True, slots=True)
class Process:
    """An attached process, living or dead."""

    pid: int
    pid_is_here: bool
    alive: bool
    condition: str | None
    command: str | None
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

    @classmethod
    def of(cls, entry: inspection.AttachedProcess, seen: inspection.Description) -> Self:
        """Convert the library's record."""
        return answer_of(
            entry,
            cls,
            condition=entry.condition or None,
            command=entry.command or None,
            applied_this_round=applied_this_round(entry, seen),
        )


@dataclass(frozen=True, slots=True)
class Taker:
    """A take that waits in the queue."""

    position: int
    pid: int | None
    pid_is_here: bool
    num_required: int
    waiting_seconds: float
    alive: bool
    overdue: bool

    @classmethod
    def of(cls, take: inspection.WaitingTake, now: float) -> Self:
        """Convert the library's record."""
        return answer_of(take, cls, waiting_seconds=max(0.0, now - take.since))


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock, and the name lock."""

    held: bool
    holder_pid: int | None
    holder_pid_is_here: bool
    held_seconds: float | None
    holder_condition: str | None
    semaphore_value: int | None
    in_operation: bool
    name_holder_pid: int | None

    @classmethod
    def of(cls, seen: inspection.Description, now: float) -> Self:
        """Convert the library's record."""
        lock = seen.lock
        return answer_of(
            lock,
            cls,
            holder_pid=lock.pid,
            holder_pid_is_here=lock.pid_is_here,
            held_seconds=None if lock.since is None else max(0.0, now - lock.since),
            holder_condition=lock.condition or None,
            semaphore_value=lock.queue,
            name_holder_pid=lock.name_pid,
        )


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the segment's file."""

    name: str
    offset: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What an optimizer keeps of an array."""

    name: str
    bytes_used: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group, a shared array, or all that a single accumulator has."""

    name: str
    kind: str
    dtype: str
    shape: list[int | None] | None
    reduction_type: str
    gradients: int
    weight: int
    rows: int
    bytes_used: int
    value: int | None
    optimizer: str | None
    slots: list[Slot]

    @classmethod
    def of(cls, member: inspection.MemberDescription) -> Self:
        """Convert the library's record."""
        slots = [answer_of(slot, Slot) for slot in member.slots]
        return answer_of(member, cls, gradients=member.count, slots=slots)


@dataclass(frozen=True, slots=True)
class Lane:
    """The lock of a lane; a pid is null if there is none here."""

    number: int
    held: bool
    holder_pid: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened lately."""

    kind: str
    at: float
    pid: int
    pid_is_here: bool
    step: int
    contributor: int | None
    reason: str | None

    @classmethod
    def of(cls, event: inspection.Event) -> Self:
        """Convert the library's record."""
        return answer_of(event, cls, reason=event.reason or None)


@dataclass(frozen=True, slots=True)
class Departed:
    """A process that had applied or taken, and has died or failed."""

    pid: int
    pid_is_here: bool
    died: bool
    reason: str | None
    is_attached: bool
    applied: int
    took: bool
    at: float | None

    @classmethod
    def of(cls, departed: inspection.DepartedProcess) -> Self:
        """Convert the library's record."""
        return answer_of(departed, cls, reason=departed.reason or None)


@dataclass(frozen=True, slots=True)
class FinalRound:
    """A round whose update has begun."""

    is_in: bool
    pid: int
    since: float
    held: bool


@dataclass(frozen=True, slots=True)
class ArraysUpdate:
    """An update of parameters that runs, or waits to be put back."""

    is_interrupted: bool
    pid: int | None
    pid_is_here: bool
    since: float | None


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

    @classmethod
    def of(cls, found: tuple[tuple[inspection.RowCount, ...], bool]) -> Self:
        """Convert the library's result."""
        touched, still = found
        return cls([answer_of(row, Row) for row in touched], still)


@dataclass(frozen=True, slots=True)
class Values:
    """The round's sums, summarised."""

    numbers: int
    norm: float | None
    largest: float
    nan: int
    infinite: int
    still: bool

    @classmethod
    def of(cls, found: inspection.ValueSummary) -> Self:
        """Convert the library's record."""
        return answer_of(found, cls, norm=finite(found.norm))


@dataclass(frozen=True, slots=True)
class Details:
    """The answer of `show`. For a segment that cannot be read, `segment` and `error` only."""

    segment: Segment
    error: str | None = None
    token: str | None = None
    sealed: bool | None = None
    round_holder_pid: int | None = None
    round_holder_pid_is_here: bool | None = None
    round_open_seconds: float | None = None
    round_shape: list[int] | None = None
    counters: Counters | None = None
    processes: list[Process] = field(default_factory=list)
    line: list[Taker] = field(default_factory=list)
    lock: Lock | None = None
    members: list[Member] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    contributors: int | None = None
    events: list[Event] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    departed: list[Departed] = field(default_factory=list)
    final_round: FinalRound | None = None
    update: ArraysUpdate | None = None
    suspected: Stall | None = None
    index_load: float | None = None
    most_touched: Rows | None = None
    values: Values | None = None
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(
        cls, seen: inspection.Description, now: float, *, rows: Rows | None, values: Values | None
    ) -> Self:
        """Convert the library's records."""
        return cls(
            segment=Segment.of(seen.summary, now),
            token=f"{seen.token:016x}",
            sealed=seen.stats.sealed,
            round_holder_pid=seen.round_holder.pid if seen.round_holder else None,
            round_holder_pid_is_here=seen.round_holder.pid_is_here if seen.round_holder else None,
            round_open_seconds=(
                None if seen.stats.round_since is None else max(0.0, now - seen.stats.round_since)
            ),
            round_shape=None if seen.round_shape is None else list(seen.round_shape),
            counters=Counters.of(seen),
            processes=[
                Process.of(entry, seen)
                for entry in sorted(seen.processes, key=lambda entry: (not entry.alive, entry.pid))
            ],
            line=[Taker.of(take, now) for take in seen.line],
            lock=Lock.of(seen, now),
            members=[Member.of(member) for member in seen.members],
            lanes=[Lane(lane.number, lane.held, lane.pid or None) for lane in seen.lanes],
            contributors=seen.contributors,
            events=[Event.of(event) for event in seen.events],
            regions=[answer_of(region, Region) for region in seen.regions],
            departed=[Departed.of(each) for each in seen.departed],
            final_round=answer_of(seen.final_round, FinalRound) if seen.final_round else None,
            update=answer_of(seen.update, ArraysUpdate) if seen.update else None,
            suspected=answer_of(seen.suspected, Stall) if seen.suspected else None,
            index_load=seen.index_load,
            most_touched=rows,
            values=values,
        )


def applied_this_round(entry: inspection.AttachedProcess, seen: inspection.Description) -> bool:
    """Whether a gradient of this process is in the current round."""
    return seen.stats.num_accumulated > 0 and entry.last_applied_step == seen.stats.global_step
