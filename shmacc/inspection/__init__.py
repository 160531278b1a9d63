"""What stands in shared memory: who holds it, who waits, is it sound, and what may go.

Everything here looks without attaching and without the segment's lock, so it works on segments
whose processes are stopped or dead in the middle of a commit, and holds nobody up. What is read is
the committed state of one instant. Whether a process lives is the kernel's word (presence.hpp), not
a guess from its pid. Only `cancel` attaches, since it changes something.
Segments are named by their ``shared_name`` in the current namespace, or by their whole system name
(``shmacc....``), which `list_segments` reports.

Each part is imported when first asked for, and NumPy only by what looks at rows and values: an
operator's tool is to start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmacc.inspection.checking import check, check_all
    from shmacc.inspection.cleanup import cancel, clean, leftovers, remove
    from shmacc.inspection.examination import most_touched, summarise_values
    from shmacc.inspection.nameless import NamelessUse, nameless_uses
    from shmacc.inspection.records import (
        AttachedProcess,
        Description,
        Finding,
        Leftover,
        LockState,
        Region,
        RowCount,
        SegmentState,
        Severity,
        Space,
        Summary,
        ValueSummary,
        WaitingTake,
    )
    from shmacc.inspection.segments import (
        describe,
        list_segments,
        resolve,
        shared_memory_space,
        summarise,
    )
    from shmacc.names import SegmentName
    from shmacc.stats import Stats

_HOMES = {
    "inspection.checking": ("check", "check_all"),
    "inspection.cleanup": ("cancel", "clean", "leftovers", "remove"),
    "inspection.examination": ("most_touched", "summarise_values"),
    "inspection.nameless": ("NamelessUse", "nameless_uses"),
    "inspection.records": (
        "AttachedProcess",
        "Description",
        "Finding",
        "Leftover",
        "LockState",
        "Region",
        "RowCount",
        "SegmentState",
        "Severity",
        "Space",
        "Summary",
        "ValueSummary",
        "WaitingTake",
    ),
    "inspection.segments": (
        "describe",
        "list_segments",
        "resolve",
        "shared_memory_space",
        "summarise",
    ),
    "names": ("SegmentName",),
    "stats": ("Stats",),
}

__all__ = [
    "AttachedProcess",
    "Description",
    "Finding",
    "Leftover",
    "LockState",
    "NamelessUse",
    "Region",
    "RowCount",
    "SegmentName",
    "SegmentState",
    "Severity",
    "Space",
    "Stats",
    "Summary",
    "ValueSummary",
    "WaitingTake",
    "cancel",
    "check",
    "check_all",
    "clean",
    "describe",
    "leftovers",
    "list_segments",
    "most_touched",
    "nameless_uses",
    "remove",
    "resolve",
    "shared_memory_space",
    "summarise",
    "summarise_values",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"shmacc.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'shmacc.inspection' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
