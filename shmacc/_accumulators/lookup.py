"""Finds what a name leads to: an accumulator of whatever kind, or shared arrays."""

from typing import Any

from shmacc._accumulators.dense import ConditionalAccumulator
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc._accumulators.sparse import SparseConditionalAccumulator
from shmacc._gradients import arguments
from shmacc._layout import layout, names
from shmacc._layout.names import SegmentName
from shmacc._opening import segment
from shmacc._opening.segment import Owners

Found = SparseConditionalAccumulator | ConditionalAccumulator | AccumulatorGroup | Any
"""What a name leads to; Any: shared arrays, which have nothing in common with the others, so that
what accumulators have in common can be used without a check. ``SharedArrays.attach`` is typed."""


def attach(shared_name: str, *, owners: Owners = "mine", timeout: float | None = None) -> Found:
    """Return the accumulator of that name, or the shared arrays, which are read-only then.

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
    found = open_by_name(
        names.segment_name(shared_name),
        segment.check_owners(owners),
        arguments.attach_timeout(timeout),
    )
    found.opened_by_user()
    return found


def open_by_name(segment_name: SegmentName, owners: Owners, timeout: float | None = None) -> Found:
    """Attach by the segment's whole name; errors as for `attach`."""
    handle = segment.attach(segment_name, owners, timeout)
    kind = layout.KIND_NAMES[handle.config()["kind"]]
    if kind == "group":
        return AccumulatorGroup.of_handle(handle, segment_name, owners)
    if kind == "arrays":
        return SharedArrays.of_handle(handle, segment_name, owners, writable=False)
    if kind == "sparse":
        return SparseConditionalAccumulator.of_handle(handle, segment_name, owners)
    return ConditionalAccumulator.of_handle(handle, segment_name, owners)
