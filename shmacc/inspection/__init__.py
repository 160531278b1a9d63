"""Reports what is in shared memory, which processes use it, and what can be removed.

Everything here reads without attaching and without the segment's lock, so it works on segments
whose processes are stopped or dead in the middle of a commit, and delays no process. It reads
only committed data. Whether a process lives is proved by the kernel (presence.hpp), not guessed
from the pid. Only `cancel` attaches, since it changes something. A segment is named by its
``shared_name`` if it is in the current namespace; by ``RUN/NAME`` if it is in a run (`shmacc.run`)
that was started there; or by its whole system name (``shmacc....``), from `list_segments`.

Each part is imported when it is first used, and NumPy only by the parts that read rows and values,
since an operator's tool must start at once.
"""

from shmacc import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    set(),
    {
        "shmacc.inspection._checking": ("check", "check_all"),
        "shmacc.inspection._cleanup": ("cancel", "clean", "remove"),
        "shmacc.inspection._leftovers": ("leftovers",),
        "shmacc.inspection._description": ("Description", "LaneLock", "describe"),
        "shmacc.inspection._contents": ("RowCount", "ValueSummary", "most_touched",
            "summarise_values"),
        "shmacc.inspection._findings": ("Finding", "Leftover", "Severity"),
        "shmacc.inspection._memory": ("Space", "others_memory", "shared_memory_space"),
        "shmacc.inspection._processes": ("Look",),
        "shmacc.inspection._index_check": ("damage",),
        "shmacc.inspection._unlinked": ("UnlinkedUse", "unlinked_memory", "unlinked_uses"),
        "shmacc.inspection._process_records": ("AttachedProcess", "DepartedProcess", "Event",
            "WaitingTake"),
        "shmacc.inspection._records": ("ArraysUpdate", "FinalRound", "LateContributor", "LockState",
            "MemberDescription", "Pace", "Region", "SegmentState", "SlotDescription", "Stall",
            "StallKind", "Summary"),
        "shmacc.inspection._listing": ("list_names", "list_segments", "summarise"),
        "shmacc.inspection._runs": ("Run", "list_runs"),
        "shmacc.inspection._scopes": ("in_run", "resolve"),
        "shmacc._base.layout": ("LAYOUT_VERSION",),
        "shmacc._base.names": ("SegmentName",),
        "shmacc._segment.stats": ("Stats",),
    },
)  # fmt: skip
