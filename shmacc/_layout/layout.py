"""What stands in a segment, as far as Python knows it: numbers, their names, and sizes.

All of it comes from the extension, which has it from layout.hpp. The tests' ``segment_layout.py``
repeats it, on purpose, as a second opinion.
"""

from shmacc import _core

LAYOUT_VERSION = _core.VERSION
"""The version of the layout of segments: processes can share a segment if theirs are equal."""
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
OPTIMIZER_OPTIONS = _core.OPTIMIZER_OPTIONS
INITIALS = _core.INITIALS
"""What rows of tables have at first: the classes of init.py."""
MAX_ROWS = _core.MAX_ROWS
ACTIVITY_NAMES = {number: name for name, number in _core.ACTIVITIES.items()}
SUMS = _core.SUMS
"""The types that sums are kept in, by NumPy's name."""
SUM_BYTES = {SUMS[name]: size for name, size in _core.SUM_BYTES.items()}
"""The size of a sum, by the type's number."""

REGIONS = _core.REGIONS
"""Regions as a view of one table counts them: those that all tables have in common, those of its
lane, those of its member. They are the first of the file if it is the first table."""
EVENT_NAMES = {number: name for name, number in _core.EVENTS.items()}
REGION_SPAN = _core.REGION_SPAN
"""Region ``number`` begins at byte ``number * REGION_SPAN`` of the file."""
HEADER_BYTES = _core.HEADER_BYTES
ENTRY_BYTES = {
    "participants": _core.PARTICIPANT_BYTES,
    "waiters": _core.WAITER_BYTES,
    "departed": _core.DEPARTED_BYTES,
}
"""The size of a table's entry, by region; the tables are reserved in whole pages."""
PAGE_BYTES = _core.PAGE_BYTES
BUCKET_BYTES = _core.BUCKET_BYTES
BUCKET_ENTRIES = _core.BUCKET_ENTRIES
SLOT_BYTES = _core.SLOT_BYTES
STEP_BYTES = 8
"""Of a row's last step, in a table of parameters."""
SEMAPHORE_BYTES = _core.SEMAPHORE_BYTES
"""The size of the semaphore's file; to open a shorter one is to die of a bus error."""
