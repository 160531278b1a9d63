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

from shmacc import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    set(),
    {
        "shmacc.inspection._checking": ("check", "check_all"),
        "shmacc.inspection._cleanup": ("cancel", "clean", "leftovers", "remove"),
        "shmacc.inspection._examination": ("most_touched", "summarise_values"),
        "shmacc.inspection._unlinked": ("UnlinkedUse", "unlinked_uses"),
        "shmacc.inspection._records": (
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
        "shmacc.inspection._segments": (
            "describe",
            "list_segments",
            "resolve",
            "shared_memory_space",
            "summarise",
        ),
        "shmacc._names": ("SegmentName",),
        "shmacc._stats": ("Stats",),
    },
)
