"""Finds the accumulator of a name, of whatever kind."""

from shmacc import _arguments as arguments
from shmacc import _layout as layout
from shmacc import _names as names
from shmacc import _segment as segment
from shmacc._dense import ConditionalAccumulator
from shmacc._group import AccumulatorGroup
from shmacc._names import SegmentName
from shmacc._segment import Owners
from shmacc._sparse import SparseConditionalAccumulator


def attach(
    shared_name: str, *, owners: Owners = "mine", timeout: float | None = None
) -> SparseConditionalAccumulator | ConditionalAccumulator | AccumulatorGroup:
    """Return the accumulator of that name.

    Args:
        shared_name: The name.
        owners: Whose segments may be attached: "mine" (this process's effective user's and root's),
            "any", or an iterable of uids.
        timeout: For how many seconds to wait until it exists; None: not at all (NotFoundError).

    Raises:
        NotFoundError: There is none, and no timeout.
        DeadlineExceededError: There was none until the end of the timeout.
        InvalidArgumentError: No possible name, or a bad timeout.
        PermissionDeniedError: It is another user's.
        DataLossError: The file under the name is no valid segment of this version.
    """
    return open_by_name(
        names.segment_name(shared_name),
        segment.check_owners(owners),
        arguments.attach_timeout(timeout),
    )


def open_by_name(
    segment_name: SegmentName, owners: Owners, timeout: float | None = None
) -> SparseConditionalAccumulator | ConditionalAccumulator | AccumulatorGroup:
    """Attach by the segment's whole name; errors as for `attach`."""
    handle = segment.attach(segment_name, owners, timeout)
    kind = layout.KIND_NAMES[handle.config()["kind"]]
    if kind == "group":
        return AccumulatorGroup.of_handle(handle, segment_name, owners)
    if kind == "sparse":
        return SparseConditionalAccumulator.of_handle(handle, segment_name, owners)
    return ConditionalAccumulator.of_handle(handle, segment_name, owners)
