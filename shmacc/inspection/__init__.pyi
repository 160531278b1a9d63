from shmacc._base.layout import LAYOUT_VERSION
from shmacc._base.names import SegmentName
from shmacc._segment.stats import Stats
from shmacc.inspection._checking import check, check_all
from shmacc.inspection._cleanup import cancel, clean, remove
from shmacc.inspection._contents import RowCount, ValueSummary, most_touched, summarise_values
from shmacc.inspection._description import Description, LaneLock, describe
from shmacc.inspection._findings import Finding, Leftover, Severity
from shmacc.inspection._index_check import damage
from shmacc.inspection._leftovers import leftovers
from shmacc.inspection._listing import list_names, list_segments, summarise
from shmacc.inspection._memory import Space, others_memory, shared_memory_space
from shmacc.inspection._process_records import AttachedProcess, DepartedProcess, Event, WaitingTake
from shmacc.inspection._processes import Look
from shmacc.inspection._records import (
    ArraysUpdate,
    FinalRound,
    LateContributor,
    LockState,
    MemberDescription,
    Pace,
    Region,
    SegmentState,
    SlotDescription,
    Stall,
    StallKind,
    Summary,
)
from shmacc.inspection._runs import Run, list_runs
from shmacc.inspection._scopes import in_run, resolve
from shmacc.inspection._unlinked import UnlinkedUse, unlinked_memory, unlinked_uses

__all__ = [
    "LAYOUT_VERSION", "ArraysUpdate", "AttachedProcess", "DepartedProcess", "Description", "Event",
    "FinalRound", "Finding", "LaneLock", "LateContributor", "Leftover", "LockState", "Look",
    "MemberDescription", "Pace", "Region", "RowCount", "Run", "SegmentName", "SegmentState",
    "Severity", "SlotDescription", "Space", "Stall", "StallKind", "Stats", "Summary", "UnlinkedUse",
    "ValueSummary", "WaitingTake", "cancel", "check", "check_all", "clean", "damage", "describe",
    "in_run", "leftovers", "list_names", "list_runs", "list_segments", "most_touched",
    "others_memory", "remove", "resolve", "shared_memory_space", "summarise", "summarise_values",
    "unlinked_memory", "unlinked_uses",
]  # fmt: skip
