"""The data that Python and the extension exchange: keys and types of dicts (description.hpp).

A handle belongs to a process that has the segment attached; a view looks at a segment from outside.
A lane has a part of each member. The contributors count as one more member, the last. Times are
nanoseconds since the epoch. Kinds, dtypes, reductions, activities and types of sums are given as
numbers.
"""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:  # inspection needs no NumPy
    from shmacc._base.array_types import IndexArray

Terms = tuple[int, int, "int | IndexArray | None", float | None]
"""What every apply passes to the extension: count, weight, contributors (a number, a partial's
array, or None), timeout in seconds. No NamedTuple: making one takes a tenth of a small apply."""


class MemberConfig(TypedDict):
    """A member's configuration."""

    name: str
    kind: int
    dtype: int
    sum: int
    components: int
    reduction: int
    declared: list[int] | None  # -1: an unknown dimension; None: an unknown rank
    optimizer: tuple[int, list[float]]  # kind, numbers
    # A table's initial contents (kind, numbers, seed) and its max_rows (None: without a limit).
    table: tuple[int, list[float], int, int | None] | None


class Config(TypedDict):
    """A segment's configuration, which never changes."""

    name: str
    kind: int
    reduction: int
    lanes: int
    directory_bytes: int
    states_bytes: int
    capacity: int | None
    is_private: bool
    token: int
    hash_key: list[int]
    created_ns: int
    mode: int
    members: list[MemberConfig]


class LaneMemberConfig(Config):
    """A view's report: the configuration of the segment, and of the viewed member."""

    member: str
    member_kind: int
    dtype: int
    sum: int
    components: int
    declared: list[int] | None


class RoundHolder(TypedDict):
    """The process that has a round open. `participant` is its entry in the list of processes."""

    participant: int
    token: int
    since_ns: int


class Update(TypedDict):
    """The update of parameters that has made a round final."""

    is_in: bool  # whether the update is complete; else it has only begun
    pid: int
    since_ns: int


class Totals(TypedDict):
    """A segment's committed state, with the counts of all lanes."""

    generation: int
    step: int
    sealed: bool
    finished: bool
    kept_free: int  # bytes of /dev/shm that the segment leaves to others when it grows
    count: int
    weight: int
    all_rows: int
    counters: dict[str, int]  # by their names in Stats
    round: RoundHolder | None
    belongs_to: int  # the token of the parameters that rounds update; 0: not known yet
    update: Update | None


class State(Totals):
    """The totals, and facts about the living processes."""

    round_pid: int  # 0: no living process has a round open
    waiting: int
    attached: int


class TableById(TypedDict):
    """The state of a table of parameters, which has rows by id."""

    slots: int  # the places that ids have ever had
    rows: int
    removed: int  # rows removed since the table was made
    generation: int  # the generation of its lane


class LaneMember(TypedDict):
    """The committed state of a lane's part of a member. Counts and rows are of the open round."""

    lane: int
    member: int
    member_count: int
    member_weight: int
    rows: int
    row_elements: int
    buffer: int
    index: int
    index_buckets: int
    index_stamp: int
    index_filled: int
    reserved: list[int]  # bytes, by region
    by_id: TableById | None


class Compared(TypedDict):
    """The result of comparing the rows of a table with its index."""

    rows: int  # the number of rows in the table
    compared: int  # rows that were still in the table when they were copied
    changed: int  # places that an update may have freed or filled during the comparison
    committed: bool  # whether there was a commit during the comparison
    in_operation: bool  # whether an operation was running, or interrupted, afterwards
    lost: int  # rows that a search of the index does not find
    twice: bool  # whether a row stands in two places
    lowest: int
    highest: int
    least_count: int  # fewest gradients of a row; not for tables of parameters
    most_count: int
    possible: int  # weight of all gradients


class LaneMemberState(Totals, LaneMember):
    """The state that a view reports: of the segment, and of the viewed part."""

    leftovers: int
    in_operation: bool
    undo_records: int
    round_shape: list[int] | None
    all_reserved: int


class ObservedState(LaneMemberState, State):
    """A view's state, with facts about the living processes as the inspecting process sees them."""


class Participant(TypedDict):
    """An entry of the list of processes."""

    entry: int
    token: int
    alive: bool
    pid: int  # in its own pid namespace
    pid_here: int  # in the observer's pid namespace; 0: the process has none there
    pid_namespace: int
    start_ticks: int
    attached_ns: int
    seen_ns: int
    applied_ns: int
    applied_step: int
    contributor: int
    activity: int
    applied: int
    dropped: int
    taken: int
    roles: int
    took_ns: int  # when it last took, or opened a round; 0: never


class Pace(TypedDict):
    """How rounds spent their time, and for whom they waited (pace.hpp)."""

    waiting_ns: int
    block_ns: int
    between_ns: int
    late: list[tuple[int, int, int]]  # contributor, or -pid; rounds; nanoseconds
    unchecked: tuple[int, int, int]  # NEVER_STALE gradients: number; ages in steps, sum and maximum


class Departed(TypedDict):
    """A worker or taker that is gone, or that is attached and has failed."""

    token: int
    pid: int  # in its own pid namespace
    pid_namespace: int
    attached: bool
    died: bool  # False: it has failed
    reason: str  # why it has failed; "": not known
    news: bool  # whether the next wait with on_death="raise" will report it
    applied: int
    roles: int
    took_ns: int
    attached_ns: int
    at_ns: int | None  # when another process found it gone


class Waiter(TypedDict):
    """A take that waits in the queue."""

    ticket: int
    participant: int
    num_required: int
    since_ns: int
    overdue: bool
    alive: bool


class Event(TypedDict):
    """An entry of the record of events."""

    serial: int
    kind: int
    token: int
    pid: int
    pid_namespace: int
    at_ns: int
    step: int
    contributor: int
    roles: int  # of the process, up to the event
    reason: str  # why a process failed; else ""
