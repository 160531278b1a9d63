"""The dense accumulator."""

from typing import Any

from shmacc._accumulators import gradient_checks, results, rounds
from shmacc._accumulators.single import ConditionalAccumulatorBase
from shmacc._accumulators.taken import DensePartial, DenseTaken
from shmacc._base.array_types import ValueArray
from shmacc._core import RoundResult
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values import arguments

__all__ = ["ConditionalAccumulator"]


class ConditionalAccumulator(ConditionalAccumulatorBase[DenseTaken, DensePartial]):
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
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
        lanes: int | None = None,
        capacity: int | None = None,
    ) -> None:
        """Create the accumulator, or attach to the existing accumulator of this shared_name.

        Args:
            dtype: One of TensorFlow's 19 accumulator dtypes, in any spelling.
            shape: The declared shape of gradients; None: the rank is unknown; None as a dimension:
                the dimension is unknown.
            shared_name: The same as for `SparseConditionalAccumulator`, like all arguments below.
            name: A label.
            reduction_type: The reduction; "CMEAN" is the same as "MEAN" here.
            mode: Permission bits.
            owners: Whose accumulator may be attached.
            if_exists: What to do with an existing accumulator.
            unlink_on_close: Whether its creator removes the name.
            lanes: How many applies can go on at the same time.
            capacity: How many gradients may be pending.

        Raises:
            ShmaccError: The errors of `SparseConditionalAccumulator`.
        """
        options = Options(mode, owners, if_exists, unlink_on_close, lanes, capacity)
        self._make(dtype, shape, shared_name, name, reduction_type, options)

    def apply_grad(
        self,
        grad: Any,
        local_step: int = arguments.NO_STEP,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        contributor: int | None = None,
        weight: int = 1,
        timeout: float | None = None,
    ) -> bool:
        """Add a gradient, unless it is stale (TF: AccumulatorApplyGradient).

        Args:
            grad: An array of the declared shape; all gradients of a round have the same shape.
            local_step: The step that the gradient was computed at.
            name: Ignored.
            contributor: The same as for `SparseConditionalAccumulator.apply_grad`.
            weight: How often the values count.
            timeout: Seconds to wait: for a stopped process that holds the lock, for the end of an
                open round, for room (``capacity``); None: for ever.

        Returns:
            True if the gradient, or another gradient of its contributor, is in the round. False if
            it was dropped, because ``local_step`` is less than the accumulator's step, or because
            of a seal.

        Raises:
            InvalidArgumentError: The gradient is malformed, or does not fit the declared shape or
                the round's. Nothing was added.
            OutOfRangeError: A 64-bit sum would overflow. Nothing was added.
            ResourceExhaustedError: Shared memory is full. Nothing was added.
            DeadlineExceededError: The timeout passed. Nothing was added.
        """
        terms = None  # most gradients need no terms, which saves a call
        if contributor is not None or timeout is not None or weight is not arguments.ONCE:
            terms = self._terms(contributor, weight, timeout)
        step = arguments.int64(local_step, "local_step")
        if weight is arguments.ONCE:
            added = self._handle.apply_plain_dense(grad, self._plain_type, self._shape, step, terms)
            if added is not None:
                return added or self._dropped(local_step)
        value = self._member.dense(grad, 1 if terms is None else terms[1], "grad")
        return self._handle.apply_dense(value, step, terms) or self._dropped(local_step)

    def apply_partial(
        self,
        partial: DensePartial,
        local_step: int = arguments.NO_STEP,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Add a partial from another accumulator's `take_partial`.

        It counts as ``partial.count`` gradients with the total weight ``partial.weight``. Its
        contributors become the round's.

        Args:
            partial: A partial from an accumulator of this dtype, with an array of this shape.
            local_step: The step that its gradients were computed at.
            timeout: The same as for `apply_grad`.

        Returns:
            The same as for `apply_grad`.

        Raises:
            The same errors as `apply_grad`; also AlreadyExistsError if one of the partial's
            contributors is in the round already.
        """
        step, seconds = arguments.int64(local_step, "local_step"), arguments.timeout(timeout)
        sums = self._member.sums(partial)
        who = gradient_checks.partial_contributors(partial)
        if sums.count == 0:
            return not self._handle.drop_if_stale(step, 0, seconds) or self._dropped(local_step)
        terms = sums.count, sums.weight, who, seconds
        added = self._handle.apply_dense(self._member.array_of_sums(sums), step, terms)
        return added or self._dropped(local_step)

    def take_grad(
        self,
        num_required: int,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        timeout: float | None = None,
    ) -> ValueArray:
        """Wait for gradients and take their reduction (TF: AccumulatorTakeGradient).

        Arguments and errors are the same as for `SparseConditionalAccumulator.take_grad`.

        Returns:
            An array of the round's shape.
        """
        return rounds.take(self._handle, self._gradient, num_required, timeout)

    def _gradient(self, taken: RoundResult) -> ValueArray:
        return results.to_dtype(self._dtype, taken.values(0))

    def _taken(self, taken: RoundResult) -> DenseTaken:
        return results.dense_taken(taken, self._member_spec)

    def _partial(self, taken: RoundResult) -> DensePartial:
        return results.dense_partial(taken, self._member_spec)
