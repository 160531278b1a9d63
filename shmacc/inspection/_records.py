"""Records of a segment and its parts. `_description` combines them into a full description."""

import enum
from dataclasses import dataclass

from shmacc._base.names import SegmentName
from shmacc.inspection._process_records import HasPid


class SegmentState(enum.StrEnum):
    """The state of a segment, seen from outside.

    Attributes:
        SOUND: A living process has it attached, and it can be read.
        FINISHED: As sound, but the run is over: nothing is accepted or taken any more.
        STARTING: An unfinished file that a living process holds.
        ORPHANED: No living process has it attached.
        DAMAGED: It is no valid segment.
        OTHER_VERSION: Its layout has another version than this library's.
        UNREADABLE: This user may not read it.
    """

    SOUND = "sound"
    FINISHED = "finished"
    STARTING = "starting"
    ORPHANED = "orphaned"
    DAMAGED = "damaged"
    OTHER_VERSION = "other version"
    UNREADABLE = "not ours to read"


class StallKind(enum.StrEnum):
    """Why a segment stands still.

    Attributes:
        LOCK_HOLDER_STOPPED: The process that has the lock is stopped.
        LOCK_HELD_LONG: A process, whose condition cannot be seen, has held the lock for long.
        NAME_HOLDER_STOPPED: The process that is opening or removing the name is stopped.
        ROUND_HOLDER_STOPPED: The process that has a round open is stopped.
        TAKER_STOPPED: The first waiting take has enough gradients, and its process is stopped.
        TAKER_OVERDUE: The first waiting take has enough gradients, but does not take them.
        APPLIERS_STOPPED: All processes that could send what a take waits for are stopped.
        QUORUM_OUT_OF_REACH: No process can send what a take waits for.
        NOBODY_TAKES: Everybody waits for a take, and no process can take.
        TAKER_IDLE: A living process could take, but does not; it still may.
        APPLIER_IDLE: A take waits for a living process that does not apply; it still may.
        WAITS_ELSEWHERE: All processes that could end the waits wait in another stalled segment.
        DEADLOCK: All processes that could end the waits wait elsewhere for processes waiting here.
    """

    LOCK_HOLDER_STOPPED = "lock_holder_stopped"
    LOCK_HELD_LONG = "lock_held_long"
    NAME_HOLDER_STOPPED = "name_holder_stopped"
    ROUND_HOLDER_STOPPED = "round_holder_stopped"
    TAKER_STOPPED = "taker_stopped"
    TAKER_OVERDUE = "taker_overdue"
    APPLIERS_STOPPED = "appliers_stopped"
    QUORUM_OUT_OF_REACH = "quorum_out_of_reach"
    NOBODY_TAKES = "nobody_takes"
    TAKER_IDLE = "taker_idle"
    APPLIER_IDLE = "applier_idle"
    WAITS_ELSEWHERE = "waits_elsewhere"
    DEADLOCK = "deadlock"


@dataclass(frozen=True, slots=True)
class Stall:
    """A reason why a segment stands still until somebody acts.

    Attributes:
        kind: Which cause it is.
        problem: The cause in words.
        remedy: What to do, in words.
        command: The whole shell command that does it; None: there is none.
    """

    kind: StallKind
    problem: str
    remedy: str
    command: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of a segment. None: it could not be read, or its kind has no such value.

    Attributes:
        name: The parts of its name.
        state: Its state.
        detail: The reason, where the state alone does not explain it; else empty.
        kind: "sparse", "dense", "group"; "arrays" (which have no gradients and no steps), or
            "parameters" (which have a step).
        dtype: TensorFlow's name of the dtype; None: it has several members.
        shape: The declared shape; None: unknown rank, or it has several members.
        reduction_type: The reduction; for a group: that of members without their own.
        members: How many members it has: tensors, shared arrays or tables.
        lanes: How many applies may run at the same time.
        capacity: How many gradients may be pending; None: any number.
        kept_free: Bytes of /dev/shm that it leaves to others when it grows.
        private: Whether it is removed with its creator.
        finished: Whether the run is over: nothing is accepted or taken any more.
        global_step: The accumulator's step.
        num_accumulated: Gradients waiting to be taken.
        rows: Distinct rows that waiting gradients touch; for parameters: rows in their tables.
        bytes_used: Bytes in use, in all regions of the file.
        bytes_reserved: Bytes of memory that the segment occupies.
        attached_alive: Living processes attached.
        attached_dead: Dead processes whose entries have not been swept yet.
        waiting_for: For each waiting take, in order, the number it requires.
        owner: The owner's user name, or uid.
        owner_uid: The owner's uid.
        mode: Permission bits.
        created: Seconds since the epoch.
        last_used: When a process last attached or began an operation (epoch seconds); None:
            unknown.
        stalls: Why it stands still; empty: no cause is known.
        suspected: A standstill that is not proved: who could end it is alive, or may come. None:
            none is suspected, or one is proved.
    """

    name: SegmentName
    state: SegmentState
    detail: str
    owner: str
    owner_uid: int
    mode: int
    created: float
    bytes_reserved: int
    kind: str | None = None
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None
    reduction_type: str | None = None
    members: int | None = None
    lanes: int | None = None
    capacity: int | None = None
    kept_free: int | None = None
    private: bool | None = None
    finished: bool | None = None
    global_step: int | None = None
    num_accumulated: int | None = None
    rows: int | None = None
    bytes_used: int | None = None
    attached_alive: int | None = None
    attached_dead: int | None = None
    waiting_for: tuple[int, ...] | None = None
    last_used: float | None = None
    stalls: tuple[Stall, ...] = ()
    suspected: Stall | None = None

    @property
    def is_arrays(self) -> bool:
        """Whether the segment has shared arrays or parameters, and so accumulates nothing."""
        return self.kind in {"arrays", "parameters"}


@dataclass(frozen=True, slots=True)
class FinalRound:
    """A round that is final because its update has begun.

    Attributes:
        is_in: Whether the update is in the parameters; else it has only begun.
        pid: The process that began the update or found it made, by its pid in its own namespace.
        since: When it did so, in seconds since the epoch.
        held: Whether a living process has the round open.
    """

    is_in: bool
    pid: int
    since: float
    held: bool


@dataclass(frozen=True, slots=True)
class ArraysUpdate(HasPid):
    """An update (or restore) of parameters that is not committed.

    Attributes:
        is_interrupted: Whether its process is dead; else the update runs.
        pid: Its process, as in AttachedProcess; None if unknown.
        pid_is_here: Whether `pid` is of this pid namespace.
        since: When its process began it; None if unknown.
    """

    is_interrupted: bool
    pid: int | None
    pid_is_here: bool
    since: float | None

    @property
    def whose(self) -> str:
        """The holder's process, as messages name it: "pid 7", or "its process"."""
        return "its process" if self.pid is None else f"pid {self.pid_label}"


@dataclass(frozen=True, slots=True)
class LockState(HasPid):
    """The segment's lock, and the lock of its name, at one instant.

    Attributes:
        held: Whether another process owns the lock.
        pid: The owner's pid, as in AttachedProcess; None if unknown.
        pid_is_here: Whether `pid` is of this pid namespace.
        condition: The owner's condition, as in AttachedProcess.
        since: When the owner began its operation, perhaps by waiting for the lock; None: unknown.
        tokens: The semaphore's value; None if it does not exist or this user may not read it.
        in_operation: Whether an operation runs, or was interrupted and is not yet undone.
        name_pid: The process that is opening or removing the name, if it has a pid in this pid
            namespace.
    """

    held: bool
    pid: int | None
    pid_is_here: bool
    condition: str
    since: float | None
    tokens: int | None
    in_operation: bool
    name_pid: int | None


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the segment's file.

    Attributes:
        name: What is in it.
        offset: Where it begins in the file, in bytes.
        reserved: Bytes of memory that it occupies.
        used: Bytes in use.
    """

    name: str
    offset: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class SlotDescription:
    """A slot of an array's optimizer.

    Attributes:
        name: TensorFlow's name of the slot.
        bytes_used: Its bytes.
    """

    name: str
    bytes_used: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member, and what the open round has accumulated for it.

    Attributes:
        name: Its name; empty: the segment is no group.
        kind: "sparse", "dense", or "table" (parameters whose rows have ids).
        dtype: TensorFlow's name of the dtype.
        shape: The declared shape (for a table: a row's); None: unknown rank.
        reduction_type: Its reduction.
        count: Gradients that had this member.
        weight: Total weight of those gradients.
        rows: Rows that those gradients touch, in all lanes (dense: 0); for a table: its rows.
        bytes_used: Bytes of the sums, in all lanes; for a shared array or table: of its contents.
        value: The value of a shared array of a single integer (a counter); None: other members.
        optimizer: The optimizer of an array of parameters, with its hyperparameters; None: none.
        slots: The optimizer's slots.
        max_rows: How many rows a table may have; None: any number, or it is no table.
        rows_added: How many rows were ever added to a table; None: it is no table.
        rows_removed: How many rows were ever removed from it; None: it is no table.
        initial: How a table's new rows are initialised; None: it is no table.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | None, ...] | None
    reduction_type: str
    count: int
    weight: int
    rows: int
    bytes_used: int
    value: int | None = None
    optimizer: str | None = None
    slots: tuple[SlotDescription, ...] = ()
    max_rows: int | None = None
    rows_added: int | None = None
    rows_removed: int | None = None
    initial: str | None = None


@dataclass(frozen=True, slots=True)
class LateContributor:
    """A contributor for whose gradients rounds have waited.

    Attributes:
        contributor: The contributor; None: its process named none.
        pid: The process that named none, by its pid in its own pid namespace; else None.
        rounds: How many rounds waited for its gradient, the last one to come.
        seconds: How much later than the mean of the others these gradients came, in all.
    """

    contributor: int | None
    pid: int | None
    rounds: int
    seconds: float

    @property
    def label(self) -> str:
        """The contributor as it is shown."""
        return f"pid {self.pid}" if self.contributor is None else str(self.contributor)


@dataclass(frozen=True, slots=True)
class Pace:
    """How the time of rounds was spent since the segment's first take.

    Attributes:
        waiting: Seconds in which takes waited for gradients (or for the lock).
        block: Seconds in blocks of rounds that ended in order.
        between: Seconds from the end of a round to the next take's call, and in blocks that did
            not end in order.
        late: The contributors for whom rounds waited longest, at most 16, the latest first. One
            that is seldom late makes room for others, and then counts anew.
        unchecked: Gradients accepted with NEVER_STALE, except each process's first.
        unchecked_steps: How many steps passed since their processes' gradients before, in all: each
            gradient lacks at most so many updates. (Other gradients that are accepted lack none.)
        most_unchecked_steps: The largest such number of one gradient.
    """

    waiting: float
    block: float
    between: float
    late: tuple[LateContributor, ...]
    unchecked: int
    unchecked_steps: int
    most_unchecked_steps: int
