"""The dense accumulator."""

from typing import Any

from shmacc import _arguments as arguments
from shmacc import _arrays as arrays
from shmacc import _gradients as gradients
from shmacc import _taking as taking
from shmacc._accumulator import Accumulator
from shmacc._core import TakenRound
from shmacc._records import DensePartial, DenseTaken, ValueArray
from shmacc._segment import Owners
from shmacc._taking import Round
from shmacc.errors import InvalidArgumentError

__all__ = ["ConditionalAccumulator"]


class ConditionalAccumulator(Accumulator):
    """Accumulates dense gradients, like ``tf.compat.v1.ConditionalAccumulator``."""

    _KIND = "dense"
    _DEFAULT_NAME = "conditional_accumulator"

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str | None = "conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: arguments.IfExists = "attach",
        unlink_on_close: bool = False,
    ) -> None:
        """Create or attach; arguments and errors as in `Accumulator`."""
        super().__init__(
            dtype,
            shape,
            shared_name,
            name,
            reduction_type,
            mode=mode,
            owners=owners,
            if_exists=if_exists,
            unlink_on_close=unlink_on_close,
        )

    def apply_grad(
        self,
        grad: Any,
        local_step: int = 0,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
    ) -> bool:
        """Add a gradient, unless it is stale (TF: AccumulatorApplyGradient).

        Args:
            grad: An array of the declared shape; all gradients of a round have the same shape.
            local_step: The step that the gradient was computed at.
            name: Ignored.

        Returns:
            True if it was added; False if it was dropped, because ``local_step`` is less than the
            accumulator's step, or because of a seal.

        Raises:
            InvalidArgumentError: The gradient is malformed, or does not fit the declared shape or
                the round's. Nothing was added.
            OutOfRangeError: A 64-bit sum would overflow. Nothing was added.
            ResourceExhaustedError: Shared memory is full. Nothing was added.
        """
        step = arguments.int64(local_step, "local_step")
        value = arrays.values_array(grad, self._dtype, "grad")
        gradients.check_dense(value.shape, self._shape)
        return self._handle.apply_dense(value, value.shape, step, 1)

    def apply_partial(self, partial: DensePartial, local_step: int = 0) -> bool:
        """Add a partial from another accumulator's `take_partial`.

        It counts as ``partial.count`` gradients.

        Returns:
            As for `apply_grad`.

        Raises:
            As for `apply_grad`.
        """
        gradients.check_not_divided(partial)
        if not (hasattr(partial, "value") and hasattr(partial, "count")):
            raise InvalidArgumentError(
                f"A partial of a dense accumulator was expected, but got {type(partial).__name__}"
            )
        step = arguments.int64(local_step, "local_step")
        count = arguments.partial_count(partial.count)
        value = arrays.sums_array(partial.value, self._dtype, "The value")
        if count == 0:
            return not self._handle.drop_if_stale(step, 0)
        gradients.check_dense(value.shape, self._shape)
        return self._handle.apply_dense(value, value.shape, step, count)

    def take_grad(
        self,
        num_required: int,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        timeout: float | None = None,
    ) -> ValueArray:
        """Wait for gradients and take their reduction (TF: AccumulatorTakeGradient).

        Arguments and errors as for `SparseConditionalAccumulator.take_grad`.

        Returns:
            An array of the round's shape.
        """
        return taking.take(
            self._handle, self._spec, self._gradient, num_required, timeout, partial=False
        )

    def take(self, num_required: int, *, timeout: float | None = None) -> DenseTaken:
        """Take like `take_grad`, with numbers that TensorFlow does not report."""
        return taking.take(
            self._handle, self._spec, self._taken, num_required, timeout, partial=False
        )

    def round(self, num_required: int, *, timeout: float | None = None) -> Round[DenseTaken]:
        """Take gradients for the length of a ``with`` block, and consume them at its end.

        Everything else as `SparseConditionalAccumulator.round`.
        """
        return Round(self._handle, self._spec, self._taken, num_required, timeout)

    def take_partial(
        self, num_required: int = 1, *, timeout: float | None = None, seal: bool = False
    ) -> DensePartial:
        """Take the sums, not divided; the step stays.

        Arguments and errors as for `SparseConditionalAccumulator.take_partial`. A partial of no
        gradients is zeros of the declared shape, where an undeclared dimension has size 0.
        """
        return taking.take(
            self._handle,
            self._spec,
            self._partial,
            num_required,
            timeout,
            partial=True,
            seal=bool(seal),
        )

    def _gradient(self, taken: TakenRound) -> ValueArray:
        return taking.to_dtype(self._dtype, taken.values)

    def _taken(self, taken: TakenRound) -> DenseTaken:
        return DenseTaken(taking.to_dtype(self._dtype, taken.values), taken.count, taken.step)

    def _partial(self, taken: TakenRound) -> DensePartial:
        value = taken.values
        if value is None:
            shape = (0,) if self._shape is None else [dim or 0 for dim in self._shape]
            value = arrays.zeros(shape, self._dtype.partial)
        return DensePartial(value, taken.count, taken.step)
