"""From a name to the accumulator that has it, of whichever kind it is."""

from shmacc import layout, names, segment
from shmacc.dense import ConditionalAccumulator
from shmacc.names import SegmentName
from shmacc.sparse import SparseConditionalAccumulator


def attach(shared_name: str) -> SparseConditionalAccumulator | ConditionalAccumulator:
    """The accumulator of that name.

    Raises:
        NotFoundError: There is none.
        InvalidArgumentError: No possible name.
        PermissionDeniedError: It is another user's.
        DataLossError: What stands under the name is no valid segment of this version.
    """
    return open_by_name(names.segment_name(shared_name))


def open_by_name(
    segment_name: SegmentName,
) -> SparseConditionalAccumulator | ConditionalAccumulator:
    """`attach` by the segment's whole name; same errors."""
    handle = segment.view(segment_name)
    sparse = handle.config()["kind"] == layout.KINDS["sparse"]
    segment.close(handle)
    if sparse:
        return SparseConditionalAccumulator.of_name(segment_name)
    return ConditionalAccumulator.of_name(segment_name)
