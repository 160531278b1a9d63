from shmacc._names import SegmentName
from shmacc._stats import Stats
from shmacc.inspection._checking import check, check_all
from shmacc.inspection._cleanup import cancel, clean, leftovers, remove
from shmacc.inspection._examination import most_touched, summarise_values
from shmacc.inspection._records import (
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
from shmacc.inspection._segments import (
    describe,
    list_names,
    list_segments,
    resolve,
    shared_memory_space,
    summarise,
)
from shmacc.inspection._unlinked import UnlinkedUse, unlinked_uses

__all__ = [
    "AttachedProcess",
    "Description",
    "Finding",
    "Leftover",
    "LockState",
    "Region",
    "RowCount",
    "SegmentName",
    "SegmentState",
    "Severity",
    "Space",
    "Stats",
    "Summary",
    "UnlinkedUse",
    "ValueSummary",
    "WaitingTake",
    "cancel",
    "check",
    "check_all",
    "clean",
    "describe",
    "leftovers",
    "list_names",
    "list_segments",
    "most_touched",
    "remove",
    "resolve",
    "shared_memory_space",
    "summarise",
    "summarise_values",
    "unlinked_uses",
]
