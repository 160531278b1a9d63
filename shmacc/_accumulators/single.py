"""The common base of both conditional accumulators: one tensor's gradients."""

from typing import Any

import numpy as np

from shmacc._accumulators.accumulator import Accumulator
from shmacc._gradients import arguments, dtypes
from shmacc._gradients.spec import MemberSpec
from shmacc._opening.segment import Owners


class SingleAccumulator(Accumulator):
    """The common base of the sparse and the dense accumulator."""

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str | None = None,
        reduction_type: str | None = "MEAN",
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: arguments.IfExists = "attach",
        unlink_on_close: bool = False,
        lanes: int | None = None,
        capacity: int | None = None,
    ) -> None:
        """Create the accumulator, or attach to the one that has this shared_name.

        Args:
            dtype: One of TensorFlow's 19 accumulator dtypes, in any spelling.
            shape: The declared shape of gradients; None: of unknown rank; None as a dimension:
                unknown.
            shared_name: 1 to 200 letters, digits, '.', '_', '-': processes that use the same one
                share the accumulator, and it lives until `unlink`. None or empty: private; it is
                removed when this process closes it or ends.
            name: A label.
            reduction_type: "MEAN" (sparse: of each row over the gradients that touched it), "SUM",
                or "CMEAN" (sparse: of each row over all gradients of the round).
            mode: Permission bits of the files in /dev/shm; exact, whatever the umask. None: 0600
                for a new accumulator, and any mode of an existing one. A user with the right to
                write can do anything to the accumulator. A user with the right to read alone sees
                all gradients, and can keep others waiting, by read locks on the file: give no
                rights to users you do not trust.
            owners: Whose accumulator of this name may be attached to: "mine" (this process's
                effective user's and root's), "any", or an iterable of uids. Handles pickle with it.
            if_exists: What to do with an accumulator of this shared_name that exists: "attach" to
                it; "error": raise AlreadyExistsError; "replace": remove it, if no living process
                has it attached, and create a new one. Without effect on private ones.
            unlink_on_close: Whether the name is removed when the process that created the
                accumulator closes this object or ends in order. A process that is killed leaves
                the name, and the flag of a process that attaches has no effect.
            lanes: Up to so many applies go on at the same time (1 to 32); None: 1, or as many as
                an existing accumulator has. A take adds the lanes up in order of lane. With more
                than one, the order of additions is not that of arrival, and a quorum may be
                exceeded by lanes - 1.
            capacity: How many gradients may be pending: an apply that would be one more waits for
                a take. None: any number, or as an existing accumulator has it. With several lanes
                it may be exceeded by lanes - 1.

        Raises:
            AlreadyExistsError: It exists, and `if_exists` is "error".
            FailedPreconditionError: A living process has it attached (``pids``), possibly this one,
                and `if_exists` is "replace".
            InvalidArgumentError: A bad argument, or the existing accumulator of this name disagrees
                in kind, dtype, shape, reduction, lanes, capacity or mode (the message gives both).
            ResourceExhaustedError: Shared memory is full.
            PermissionDeniedError: The accumulator is another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        member = MemberSpec(
            "",
            self._KIND,
            dtypes.resolve(dtype),
            arguments.declared_shape(shape, self._KIND),
            arguments.reduction(reduction_type),
        )
        self._open(
            (member,),
            shared_name,
            name,
            reduction_type,
            mode=mode,
            owners=owners,
            if_exists=if_exists,
            unlink_on_close=unlink_on_close,
            lanes=lanes,
            capacity=capacity,
        )

    def _adopted(self) -> None:
        self._member = self._spec.members[0]
        self._dtype = self._member.dtype
        self._plain_type = self._dtype.plain_type
        self._shape = self._member.shape

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._shared_name!r} {self._dtype.name} "
            f"{arguments.describe_shape(self._shape)} {self._spec.reduction}"
            f"{' closed' if self._handle.closed else ''}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of gradients and results."""
        return self._dtype.numpy

    @property
    def shape(self) -> arguments.Shape:
        """The declared shape; None: unknown rank; None as a dimension: unknown."""
        return self._shape
