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
"""What `attach` returns. Any stands for parameters and shared arrays: type checkers accept every
method of such a result. ``SharedArrays.attach`` returns a precise type."""

# Public names, not classes: so `attach` imports only the class that it needs.
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
        timeout: How many seconds to wait until the object exists; None: do not wait
            (NotFoundError). In every other call of this library, None means to wait for ever.

    Raises:
        NotFoundError: There is no object of that name, and no timeout.
        DeadlineExceededError: The timeout passed, and there was still no such object.
        InvalidArgumentError: An impossible name, or a bad timeout.
        PermissionDeniedError: The object is another user's.
        DataLossError: The file under the name is no valid segment of this version.
    """
    segment_name, whose = names.segment_name(shared_name), checked_owners(owners)
    handle = opening.attach(segment_name, whose, arguments.attach_timeout(timeout))
    kind = getattr(shmacc, _CLASSES[layout.KIND_NAMES[handle.config()["kind"]]])
    return opened.of_handle(kind, handle, segment_name, whose)
