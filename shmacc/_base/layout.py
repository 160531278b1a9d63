"""The layout of segments, as far as Python needs it: numbers, their names, and sizes.

All values come from the extension, which defines them in native/base. The tests'
``segment_layout.py`` repeats the records on purpose, as an independent check.
"""

import enum

from shmacc import _core

LAYOUT_VERSION = _core.VERSION
"""The layout version of segments: processes can share a segment if their versions are equal."""
MAX_RANK = _core.MAX_RANK
MAX_MEMBERS = _core.MAX_MEMBERS
MAX_LANES = _core.MAX_LANES

KINDS = _core.KINDS
KIND_NAMES = {number: name for name, number in KINDS.items()}
ARRAYS = {KINDS["arrays"], KINDS["parameters"]}
"""The kinds of segments in which nothing is accumulated."""
REDUCTIONS = _core.REDUCTIONS
REDUCTION_NAMES = {number: name for name, number in REDUCTIONS.items()}
OPTIMIZERS = _core.OPTIMIZERS
DECOUPLED = _core.DECOUPLED
"""The optimizers whose weight decay multiplies elements, instead of being added to gradients."""
OPTIMIZER_OPTIONS = _core.OPTIMIZER_OPTIONS
CONSTRAINTS = _core.CONSTRAINTS
INITIALS = _core.INITIALS
"""The kinds of a table's initial rows, by the names of the classes in init.py."""
MAX_ROWS = _core.MAX_ROWS
ACTIVITY_NAMES = {number: name for name, number in _core.ACTIVITIES.items()}


class Activity(enum.StrEnum):
    """What a process does in a segment."""

    IDLE = "idle"
    WAITS_FOR_LOCK = "waits for the lock"
    APPLIES = "applies"
    TAKES = "takes"
    WAITS_IN_QUEUE = "waits in the queue"
    WAITS_FOR_HEAD = "waits for the head of the queue"
    WAITS_FOR_ROUND = "waits for the end of the round"
    WAITS_FOR_ROOM = "waits for room"
    WAITS_FOR_STEP = "waits for the step"
    UPDATES = "updates"


class Role(enum.StrEnum):
    """What a process has ever begun to do in a segment."""

    APPLIES = "applies"
    TAKES = "takes"
    UPDATES = "updates"
    LOOKS_ON = "looks on"
    SAVES = "saves"


def roles_of(bits: int) -> tuple[Role, ...]:
    """Return the roles whose bits a process's entry has."""
    return tuple(Role(name) for name, bit in _core.ROLES.items() if bits & bit)


UNDER_THE_LOCK = frozenset({Activity.APPLIES, Activity.TAKES})
UNTIL_A_TAKE = frozenset(
    {Activity.WAITS_FOR_STEP, Activity.WAITS_FOR_ROOM, Activity.WAITS_FOR_ROUND}
)
"""The activities in which a process waits until another process has taken."""

SUMS = _core.SUMS
"""The types of sums, by NumPy's names."""
SUM_BYTES = {SUMS[name]: size for name, size in _core.SUM_BYTES.items()}
"""The size of a sum, by the number of its type."""

REGIONS = _core.REGIONS
"""The numbers of regions in a view of one table. A view first counts the regions that all tables
share, then the regions of the table's lane, then the regions of its member. For the first table
these are also the first regions of the file."""
EVENT_NAMES = {number: name for name, number in _core.EVENTS.items()}
REGION_SPAN = _core.REGION_SPAN
"""Region ``number`` begins at byte ``number * REGION_SPAN`` of the file."""
HEADER_BYTES = _core.HEADER_BYTES
ENTRY_BYTES = {
    "participants": _core.PARTICIPANT_BYTES,
    "waiters": _core.WAITER_BYTES,
    "departed": _core.DEPARTED_BYTES,
}
"""The size of an entry, by the name of its region. Regions are reserved in whole pages."""
PAGE_BYTES = _core.PAGE_BYTES
BUCKET_BYTES = _core.BUCKET_BYTES
BUCKET_ENTRIES = _core.BUCKET_ENTRIES
ROW_PLACE_BYTES = _core.ROW_PLACE_BYTES
STEP_BYTES = 8
"""The size of a row's last step, in a table of parameters."""
SEMAPHORE_BYTES = _core.SEMAPHORE_BYTES
"""The size of a semaphore's file. A process that opens a shorter file dies of a bus error."""
