"""Attaches to the object of a name: an accumulator of any kind, parameters, or shared arrays."""

from typing import Any

import shmacc
from shmacc._accumulators.dense import ConditionalAccumulator
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.sparse import SparseConditionalAccumulator
from shmacc._base import layout, names
from shmacc._segment import opened, opening
from shmacc._segment.options import Owners, checked_owners
from shmacc._values import arguments

Found = SparseConditionalAccumulator | ConditionalAccumulator | AccumulatorGroup | Any
"""The type of the object under a name. Any stands for shared arrays, and lets type checkers accept
an accumulator's methods without a check. ``SharedArrays.attach`` is typed."""

# By the public names: only the class that is found is imported.
_CLASSES = {
    "sparse": "SparseConditionalAccumulator", "dense": "ConditionalAccumulator",
    "group": "AccumulatorGroup", "arrays": "SharedArrays", "parameters": "Parameters",
}  # fmt: skip


def attach(shared_name: str, *, owners: Owners = "mine", timeout: float | None = None) -> Found:
    """Return the object of that name: an accumulator, parameters, or read-only shared arrays.

    Args:
        shared_name: The name.
        owners: Whose segments may be attached: "mine" (this process's effective user's and root's),
            "any", or an iterable of uids.
        timeout: How many seconds to wait until it exists; None: do not wait (NotFoundError). In all
            calls that wait for something else, None means for ever.

    Raises:
        NotFoundError: There is no object of that name, and no timeout.
        DeadlineExceededError: There was none until the end of the timeout.
        InvalidArgumentError: An impossible name, or a bad timeout.
        PermissionDeniedError: The object is another user's.
        DataLossError: The file under the name is no valid segment of this version.
    """
    segment_name, whose = names.segment_name(shared_name), checked_owners(owners)
    handle = opening.attach(segment_name, whose, arguments.attach_timeout(timeout))
    kind = getattr(shmacc, _CLASSES[layout.KIND_NAMES[handle.config()["kind"]]])
    return opened.of_handle(kind, handle, segment_name, whose)
