"""The sparse accumulator; ``shmacc.sparse.SparseConditionalAccumulator``, as in ``tf.sparse``."""

from typing import Any

from shmacc._accumulators import gradient_checks, results, rounds
from shmacc._accumulators.gradient_checks import CheckedRows
from shmacc._accumulators.single import ConditionalAccumulatorBase
from shmacc._accumulators.taken import SparseGradient, SparsePartial, SparseTaken
from shmacc._base.reports import Terms
from shmacc._core import RoundResult
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values import arguments, foreign
from shmacc._values.slices import IndexedSlices
from shmacc.errors import InvalidArgumentError

__all__ = ["SparseConditionalAccumulator"]


class SparseConditionalAccumulator(ConditionalAccumulatorBase[SparseTaken, SparsePartial]):
    """Accumulates sparse gradients: rows of a tensor with their indices.

    There are three differences to ``tf.compat.v1.SparseConditionalAccumulator``. Indices may be in
    any order and may repeat; repeats within a gradient are summed, and count as one touch of the
    row. Results are always in ascending order. A malformed gradient raises even if it is stale.
    """

    _KIND = "sparse"
    _DEFAULT_NAME = "sparse_conditional_accumulator"

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str | None = "sparse_conditional_accumulator",
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
                this dimension is unknown. If a dimension is unknown, gradients may have more
                dimensions than declared, as in TensorFlow; otherwise, and in groups, they may not.
            shared_name: Processes that use the same name share the accumulator, and it lives until
                `unlink`. A name has 1 to 200 letters, digits, '.', '_', '-' (of ASCII). Any other
                character but NUL counts 3 for each byte of its UTF-8, since ``/dev/shm`` has it in
                a form like ``%3A``. None or empty: the accumulator is private, and removed when
                this process closes it or ends.
            name: A label.
            reduction_type: "MEAN": a row is divided by the number of gradients that touched it, a
                dense member of a group by the number of gradients that had it. "CMEAN": both are
                divided by the number of all gradients of the round. Or "SUM".
            mode: Permission bits of the files in /dev/shm; exact, whatever the umask. None: 0600
                for a new accumulator, and any mode of an existing one. A user with the right to
                write can do anything to the accumulator. A user who may only read sees all
                gradients, and can make others wait by read locks on the file: give no rights to
                users you do not trust.
            owners: Whose accumulator of this name may be attached: "mine" (this process's effective
                user's and root's), "any", or an iterable of uids. Pickled with the accumulator.
            if_exists: What to do with an accumulator of this shared_name that exists: "attach" to
                it; "error": raise AlreadyExistsError; "replace": remove it, if no living process
                has it attached, and create a new one. This has no effect on private accumulators.
            unlink_on_close: Whether the name is removed and the run finished when the process that
                created the accumulator closes this object or ends in order. In a process that
                attaches, the flag has no effect, unless the creator was killed: then the next
                process that constructs the accumulator with this flag takes over this duty.
            lanes: How many applies can go on at the same time (1 to 32); None: 1, or the number of
                an existing accumulator. A take adds the lanes up in the order of their numbers.
                With several lanes, gradients are not added in order of arrival, and a take may get
                up to lanes - 1 gradients more than its quorum.
            capacity: How many gradients may be pending; an apply that would exceed it waits for a
                take. None: any number, or the capacity of an existing accumulator. A partial counts
                as all of its gradients. A partial of more gradients than the capacity is added if
                nothing is pending. With several lanes the capacity may be exceeded by lanes - 1.

        Raises:
            AlreadyExistsError: The accumulator exists, and `if_exists` is "error".
            FailedPreconditionError: A living process, possibly this one, has it attached
                (``pids``), and `if_exists` is "replace".
            InvalidArgumentError: A bad argument, or the existing accumulator of this name disagrees
                in kind, dtype, shape, reduction, lanes, capacity or mode (the message gives both).
            ResourceExhaustedError: Shared memory is full.
            PermissionDeniedError: The accumulator is another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        options = Options(mode, owners, if_exists, unlink_on_close, lanes, capacity)
        self._make(dtype, shape, shared_name, name, reduction_type, options)

    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Any = None,
        local_step: int = arguments.NO_STEP,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        contributor: int | None = None,
        weight: int = 1,
        timeout: float | None = None,
    ) -> bool:
        """Add a gradient, unless it is stale (TF: SparseAccumulatorApplyGradient).

        Beware of the default ``local_step``: after the first take the step is 1, and 0 is stale.

        Args:
            grad_indices: Integers, shape ``(n,)``: which rows; any order, repeats allowed.
            grad_values: Shape ``(n, ...)``: the rows.
            grad_shape: The whole tensor's shape; -1: unknown; None or ``[]``: not given.
            local_step: The step that the gradient was computed at.
            name: Ignored.
            contributor: Whose gradient it is, 0 to ``2**63 - 1``: within a round a second gradient
                of the same contributor adds nothing, and True is returned. So a worker that was
                killed and started again may just compute its batch again. Asynchronous workers omit
                it, or give each gradient an id of its own: with `NEVER_STALE`, the logger
                ``shmacc`` warns of the first gradient that is not added. ``stats().repeated``
                counts these gradients.
            weight: How often the values count, in the sum and in the divisor; a quorum counts the
                gradient once.
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
        if grad_shape is None and weight is arguments.ONCE:
            added = self._handle.apply_plain_rows(
                grad_indices, grad_values, self._plain_type, self._shape, step, terms
            )
            if added is not None:
                return added or self._dropped(local_step)
        times = 1 if terms is None else terms[1]
        rows = self._member.rows(grad_indices, grad_values, grad_shape, times, "grad_")
        return self._add(rows, step, terms) or self._dropped(local_step)

    def apply_indexed_slices_grad(
        self,
        grad: Any,
        local_step: int = arguments.NO_STEP,
        name: str | None = None,
        *,
        contributor: int | None = None,
        weight: int = 1,
        timeout: float | None = None,
    ) -> bool:
        """Apply any object that has ``.indices``, ``.values`` and ``.dense_shape``.

        Also accepts sparse torch tensors, such as the ``.grad`` of ``nn.Embedding(sparse=True)``,
        and ``scipy.sparse`` matrices, and applies their rows that have stored entries.

        Args:
            grad: The object. Its attributes are used as ``grad_indices``, ``grad_values`` and
                ``grad_shape`` (which may be None) of `apply_grad`.
            local_step: The same as for `apply_grad`, like all arguments below.
            name: Ignored.
            contributor: Whose gradient it is.
            weight: How often the values count.
            timeout: Seconds to wait; None: for ever.

        Returns:
            The same as for `apply_grad`.

        Raises:
            The errors of `apply_grad`; also InvalidArgumentError if `grad` is no such object.
        """
        # Announce the worker before the conversion, so that takes learn if the conversion fails.
        if contributor is not None:
            self._handle.be_contributor(arguments.int64(contributor, "contributor"))
        grad = foreign.slices(grad)
        gradient_checks.check_has(
            grad, "Something like IndexedSlices", "indices", "values", "dense_shape"
        )
        return self.apply_grad(
            grad.indices,
            grad.values,
            grad.dense_shape,
            local_step,
            name,
            contributor=contributor,
            weight=weight,
            timeout=timeout,
        )

    def apply_partial(
        self,
        partial: SparsePartial,
        local_step: int = arguments.NO_STEP,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Add a partial from another accumulator's `take_partial`.

        It counts as ``partial.count`` gradients with the total weight ``partial.weight``. Each row
        has its weight in ``row_counts``. Its contributors become the round's.

        Args:
            partial: A partial from an accumulator of this dtype, with rows of this shape.
            local_step: The step that its gradients were computed at.
            timeout: The same as for `apply_grad`.

        Returns:
            The same as for `apply_grad`.

        Raises:
            The errors of `apply_grad`; also InvalidArgumentError if the partial's counts are
            inconsistent or its indices repeat, and AlreadyExistsError if one of its contributors is
            in the round already.
        """
        step, seconds = arguments.int64(local_step, "local_step"), arguments.timeout(timeout)
        sums = self._member.sums(partial)
        who = gradient_checks.partial_contributors(partial)
        if sums.count == 0:
            return not self._handle.drop_if_stale(step, 0, seconds) or self._dropped(local_step)
        terms = sums.count, sums.weight, who, seconds
        added = self._add(self._member.rows_of_sums(sums), step, terms)
        return added or self._dropped(local_step)

    def _add(self, rows: CheckedRows, step: int, terms: Terms | None) -> bool:
        if rows.conflict is not None:
            count, _, _, seconds = (1, 1, None, None) if terms is None else terms
            # TensorFlow drops a stale gradient before it makes check 9.
            if rows.refusal is None and self._handle.drop_if_stale(step, count, seconds):
                return False
            # If there is a refusal, too, a fresh gradient still gets the conflict's message, which
            # is TensorFlow's; a stale gradient gets the refusal's.
            if rows.refusal is None or step >= self._handle.step:
                raise InvalidArgumentError(rows.conflict)
        rows.check()
        return self._handle.apply_sparse(
            rows.indices, rows.values, rows.row_counts, rows.ascending, step, terms
        )

    def take_grad(
        self,
        num_required: int,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        timeout: float | None = None,
    ) -> SparseGradient:
        """Wait for gradients and take their reduction (TF: SparseAccumulatorTakeGradient).

        Waits in the queue until ``num_required`` gradients have accumulated. Then takes all
        accumulated gradients and adds 1 to the step.

        If an exception interrupts the take (a signal handler's, a MemoryError), either nothing was
        consumed, or the gradients were taken already. In the second case this object's next take of
        the same sort returns the gradients at once, whatever number it requires. (The sorts:
        `take`, `take_grad` and `take_indexed_slices_grad`; partials with ``seal``; partials without
        it.) The gradients are lost when this object is closed or this process ends.

        Args:
            num_required: At least 1.
            name: Ignored.
            timeout: Seconds to wait; None: for ever; 0: succeed only without waiting.

        Returns:
            ``(indices, values, shape)``.

        Raises:
            DeadlineExceededError: The timeout passed; nothing was consumed.
            CancelledError: `cancel` or `close` was called; nothing was consumed.
            OutOfRangeError: An integer result does not fit the dtype; the round stays.
            InvalidArgumentError: A bad argument.
        """
        return rounds.take(self._handle, self._gradient, num_required, timeout)

    def take_indexed_slices_grad(
        self,
        num_required: int,
        name: str | None = None,  # noqa: ARG002  TensorFlow's signature
        *,
        timeout: float | None = None,
    ) -> IndexedSlices:
        """Take like `take_grad`, with the same arguments and errors.

        Returns:
            `IndexedSlices` with ``values``, ``indices`` (int64, ascending) and ``dense_shape``.
        """
        return rounds.take(self._handle, self._slices, num_required, timeout)

    def _gradient(self, taken: RoundResult) -> SparseGradient:
        return SparseGradient(
            taken.indices(0), results.to_dtype(self._dtype, taken.values(0)), taken.shape(0)
        )

    def _slices(self, taken: RoundResult) -> IndexedSlices:
        values = results.to_dtype(self._dtype, taken.values(0))
        return IndexedSlices(values, taken.indices(0), taken.shape(0))

    def _taken(self, taken: RoundResult) -> SparseTaken:
        return results.sparse_taken(taken, self._member_spec)

    def _partial(self, taken: RoundResult) -> SparsePartial:
        return results.sparse_partial(taken, self._member_spec)
