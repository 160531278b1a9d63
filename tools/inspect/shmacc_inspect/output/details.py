"""The answer of `show`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import SCHEMA_VERSION, answer_of
from shmacc_inspect.output.contents import Member, Region, Rows, Values
from shmacc_inspect.output.segments import Segment, Stall

if TYPE_CHECKING:
    from shmacc import inspection


@dataclass(frozen=True, slots=True)
class Counters:
    """A segment's counters since it was made.

    Attributes:
        applied: Gradients that were accepted.
        applied_bytes: Bytes of their values.
        dropped: Gradients that were refused as stale, or because of a seal.
        discarded: Gradients that `advance_step` dropped.
        taken: Gradients that were taken.
        takes: Takes that handed them out.
        recoveries: Operations that a death interrupted, and that were undone.
        commits: Operations that took effect.
    """

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
    """An attached process, living or dead.

    Attributes:
        pid: Its pid in this pid namespace, if it has one here; else in its own.
        pid_is_here: Whether it is the pid in this pid namespace.
        alive: Whether it lives, as the kernel proves.
        condition: The kernel's: running, sleeping, stopped, ...; null if it cannot be seen.
        command: Its command line; null if it cannot be seen.
        activity: What it does: applies, takes, waits for the lock, waits in the queue, waits for
            the head of the queue, waits for the end of the round, waits for room, waits for the
            step, updates, idle.
        started: When it was started.
        attached_at: When it attached.
        last_seen: When it last attached or began an operation.
        last_applied: When a gradient of it was last accepted; null: never.
        last_applied_step: The global step of that; null: never.
        applied_this_round: Whether a gradient of it is in this round.
        applied: Its gradients that were accepted.
        dropped: Its gradients that were refused.
        taken: Gradients that it took.
    """

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
    """A take that waits in the queue.

    Attributes:
        position: Its position in the queue; 1 is the head.
        pid: Its process; null if the pid is not known.
        pid_is_here: Whether that is a pid of this pid namespace.
        num_required: How many gradients it requires.
        waiting_seconds: How long it has waited.
        alive: Whether its process lives.
        overdue: Whether its gradients had arrived and it did not take them, so that applies no
            longer wait for it.
    """

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
    """The lock, and the name lock.

    Attributes:
        held: Whether a process holds the lock that applies and takes hold.
        holder_pid: Which one; null if none, or not known.
        holder_pid_is_here: Whether that is a pid of this pid namespace.
        held_seconds: Since its holder began its operation; null if the holder is unknown.
        holder_condition: The kernel's; null if it cannot be seen.
        semaphore_value: Of the semaphore in front of the lock; proves nothing.
        in_operation: Whether an operation runs, or was interrupted and is not undone yet.
        name_holder_pid: The process that is opening or removing the name; null: none.
    """

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
class Lane:
    """The lock of a lane; a pid is null if there is none here.

    Attributes:
        number: From 0.
        held: Whether a process holds its lock.
        holder_pid: Which one; null: none, or no pid here.
    """

    number: int
    held: bool
    holder_pid: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened lately.

    Attributes:
        kind: `died`: a process was found dead, and its entry freed; `failed`: an exception ended
            its block; `cancelled`; `sealed`; `recovered`: it undid what another process had left
            half done when it died.
        at: When.
        pid: The process that did, or to which it happened, as its own pid namespace knows it.
        pid_is_here: Whether that is a pid of this pid namespace.
        step: The global step at that time.
        contributor: The contributor of its last gradient, or null.
        reason: Of a failure: the exception.
    """

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
    """A process that had applied or taken, and has died or failed.

    Attributes:
        pid: The process, as its own pid namespace knows it.
        pid_is_here: Whether that is a pid of this pid namespace.
        died: Whether it has died; else it has failed.
        reason: The exception; null if it is not known.
        is_attached: Whether it has failed and goes on.
        applied: Its gradients that were accepted.
        took: Whether it had taken.
        at: When it was found to be gone; null: not yet.
    """

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
    """A round whose update has begun.

    Attributes:
        is_in: Whether the update is in the parameters.
        pid: The process that began it, or found it in, as its own pid namespace knows it.
        since: When.
        held: Whether a living process has the round open.
    """

    is_in: bool
    pid: int
    since: float
    held: bool


@dataclass(frozen=True, slots=True)
class ArraysUpdate:
    """An update of parameters that runs, or waits to be put back.

    Attributes:
        is_interrupted: Whether its process has died in it.
        pid: Its process.
        pid_is_here: Whether that is a pid of this pid namespace.
        since: When it began.
    """

    is_interrupted: bool
    pid: int | None
    pid_is_here: bool
    since: float | None


@dataclass(frozen=True, slots=True)
class Details:
    """The answer of `show`. For a segment that cannot be read, `segment` and `error` only.

    Attributes:
        segment: As in `list`.
        error: Why the segment cannot be read; null if it can.
        token: Identifies this segment among those that had the name; its semaphore's name ends with
            it.
        sealed: Whether applies at the step are refused: since a round is open, or its update has
            begun, or by a take that sealed it; of parameters, whether a load into them has not
            ended, so that they take no update.
        round_holder_pid: The process that has a round open (`with acc.round(n)`), or that loads
            parameters; null: none.
        round_holder_pid_is_here: Whether that is a pid of this pid namespace.
        round_open_seconds: For how long.
        round_shape: Of this round's values (sparse: of one row); null between rounds, and of
            several members.
        counters: Since the segment was made.
        processes: All that are attached: the living first.
        line: The waiting takes, in order.
        lock: The lock and its holder.
        members: One of each tensor or array.
        lanes: One of each lane.
        contributors: How many named contributors are in the round.
        events: The last 64, oldest first.
        regions: The file's regions.
        departed: Processes that had applied or taken and have died or failed, as long as a wait may
            still be told of it.
        final_round: Of a round whose update has begun; else null.
        update: Of parameters: the update that runs, or waits to be put back; else null.
        suspected: A standstill that is not proved: the process that could take is alive, in no
            call, and others have waited for 30 s; else null.
        index_load: Filled part of the index, 0 to 1; null without one.
        most_touched: With `--rows`.
        values: With `--values`.
    """

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
