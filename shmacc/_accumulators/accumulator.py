"""The common base of accumulators: steps, takes and rounds, saved states, counters.

Accumulators behave as TensorFlow's ``SparseConditionalAccumulator`` and ``ConditionalAccumulator``
(ops ``SparseAccumulatorApplyGradient`` and so on); docstrings name each difference. Data flows one
way: gradient_checks.py converts and checks arguments, the extension does the work under the lock,
and results.py makes NumPy arrays of its results.
"""

import logging
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from shmacc import _core
from shmacc._accumulators import rounds, saved_state
from shmacc._accumulators.drops import Drops, warn_of_repeated
from shmacc._accumulators.members import AccumulatedMember, AccumulatorSpec
from shmacc._accumulators.rounds import Round
from shmacc._accumulators.steps import Stepped
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._base.reports import MemberConfig, Terms
from shmacc._core import RoundResult
from shmacc._segment.options import Owners
from shmacc._segment.stats import Stats, stats_of
from shmacc._values import arguments

if TYPE_CHECKING:
    from shmacc._accumulators.coroutines import AsyncRound

_Taken_co = TypeVar("_Taken_co", covariant=True)
_Partial_co = TypeVar("_Partial_co", covariant=True)

NEVER_STALE: int = 2**63 - 1
"""A ``local_step`` that is never stale: no accumulator's step can exceed it."""

_logger = logging.getLogger("shmacc")
_IS_PRIVATE = (
    "name=%r is a label, by which no process can attach: without a shared_name this %s is private, "
    "and removed with its creator. With shared_name=%r other processes find it"
)


class AccumulatorRef:
    """The ``handle`` that raw ops take; keeps its accumulator open.

    Two references to the same accumulator are equal and have the same hash, in any process.
    """

    __slots__ = ("accumulator",)

    def __init__(self, accumulator: "Accumulator[Any, Any]") -> None:
        self.accumulator: Accumulator[Any, Any] = accumulator

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AccumulatorRef):
            return NotImplemented
        return self.accumulator._token == other.accumulator._token

    def __hash__(self) -> int:
        return hash(self.accumulator._token)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"AccumulatorRef({self.accumulator!r})"


class Accumulator(Stepped, Generic[_Taken_co, _Partial_co]):
    """The common base of single accumulators and groups; subclasses make the results of takes.

    Use as a context manager to close at the end of the block; an accumulator that is collected
    unclosed is closed with a ResourceWarning. Accumulators pickle: another process that unpickles
    one attaches to the same segment.
    """

    _DEFAULT_NAME: ClassVar[str]
    _COPY = "state() has a copy of what is in it"

    def _member_of_config(self, number: int, config: MemberConfig) -> AccumulatedMember:
        return AccumulatedMember.of_config(number, config)

    def _examine(self, existing: AccumulatorSpec, own: str | None) -> None:
        self._label = self._DEFAULT_NAME if own is None else own
        self._spec = existing
        self._drops = Drops(self._handle, self._shared_name)
        self._handle.on_repeat(partial(warn_of_repeated, self._shared_name))

    def _check_asked(self, asked: AccumulatorSpec) -> None:
        if asked.private and self._label != self._DEFAULT_NAME:
            _logger.warning(_IS_PRIVATE, self._label, type(self).__name__, self._label)

    def _own(self) -> str:
        return self._label

    def _terms(self, contributor: object, weight: object, timeout: object) -> Terms:
        """Return the terms of a single gradient.

        With a contributor, takes learn from now on if this process dies or fails.

        Raises:
            InvalidArgumentError: An argument is bad.
        """
        # Announce the worker first, so that takes report its failure even if a check below fails.
        who = arguments.contributor(contributor)
        if who is not None:
            self._handle.be_contributor(who)
        return 1, arguments.weight(weight), who, arguments.timeout(timeout)

    def _dropped(self, local_step: int) -> bool:
        """Note a gradient that was dropped, and return False."""
        self._drops.note(local_step)
        return False

    def _taken(self, taken: RoundResult) -> _Taken_co:
        raise NotImplementedError

    def _partial(self, taken: RoundResult) -> _Partial_co:
        raise NotImplementedError

    @classmethod
    def attach(
        cls, shared_name: str, *, owners: Owners = "mine", timeout: float | None = None
    ) -> Self:
        """Return the accumulator of that name and this kind: the typed form of ``shmacc.attach``.

        Args:
            shared_name: The name.
            owners: The same as in the constructor.
            timeout: How many seconds to wait until the accumulator exists; None: do not wait. (In
                every other call, None means to wait for ever.)

        Raises:
            NotFoundError: There is no accumulator of that name, and no timeout.
            DeadlineExceededError: The timeout passed, and there was still no such accumulator.
            InvalidArgumentError: An impossible name, a bad timeout, or an object of another kind.
            PermissionDeniedError: The accumulator is another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        return cls._attach(shared_name, owners, timeout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. After an exception in the block, waits with ``on_death="raise"`` report a failure.

        SystemExit of 0 or None is no failure. GeneratorExit is a failure: a ``break`` in the loop
        over a generator raises it in the generator, but so does an exception in that loop.
        """
        self._close(error)

    @property
    def reduction_type(self) -> str:
        """The reduction; in a group, the reduction of members without their own."""
        return self._spec.reduction

    @property
    def lanes(self) -> int:
        """How many applies can go on at the same time."""
        return self._spec.lanes or 1

    @property
    def capacity(self) -> int | None:
        """How many gradients may be pending; None: any number."""
        return self._spec.capacity

    @property
    def name(self) -> str:
        """The label given at construction."""
        return self._label

    @property
    def accumulator_ref(self) -> AccumulatorRef:
        """The handle that raw ops take."""
        return AccumulatorRef(self)

    def num_accumulated(self, name: str | None = None) -> int:  # noqa: ARG002  TensorFlow's signature
        """Return how many gradients are pending (TF: AccumulatorNumAccumulated). Uses no lock.

        Args:
            name: Ignored.
        """
        return self._handle.count

    def take(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> _Taken_co:
        """Wait for gradients and take their reduction, with more details than TensorFlow returns.

        Waits in the queue until ``num_required`` gradients have accumulated. Then takes all
        accumulated gradients and adds 1 to the step. ``SparseConditionalAccumulator.take_grad``
        says what happens if an exception interrupts this.

        Args:
            num_required: At least 1. If this many gradients are pending, they are taken at once,
                even if a process has died.
            at_least: 1 to `num_required`: how many gradients are enough when the timeout has
                passed; None: `num_required`.
            timeout: Seconds to wait; None: for ever.
            on_death: "raise": end the wait if a worker died or failed. A worker is a process that
                has applied, or has called an apply with a ``contributor``, even in vain. It failed
                if an exception left its ``with`` block of the accumulator, or ended the process.
                The next wait with "raise" reports each such process once; one error may name
                several. A process that closed the accumulator, or ended in order, is not dead.

        Returns:
            A `SparseTaken` or a `DenseTaken`. A group returns a mapping from member to
            `SparseTaken` or `DenseTaken`, without members that no gradient had.

        Raises:
            FinishedError: The accumulator is finished.
            WorkerDiedError: A process died or failed, and `on_death` is "raise". Nothing was
                consumed.
            DeadlineExceededError: The timeout passed.
            All other errors are those of ``SparseConditionalAccumulator.take_grad``.
        """
        return rounds.take(self._handle, self._taken, num_required, timeout, at_least, on_death)

    def round(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> Round[_Taken_co]:
        """Take gradients for the length of a ``with`` block, and consume them at its end.

        Waits as `take` does and seals the step: from then on applies at this step return False; an
        apply with a later ``local_step`` waits for the end of the block. The end of the block
        consumes the gradients and moves the step on by one, in one commit. An exception in the
        block, `close` and the death of this process consume nothing and open the step again as it
        was. A process that is merely stopped in the block keeps the round. `advance_step` and
        `set_global_step`, by any process, end the round at once; then the end of the block raises
        FailedPreconditionError. Other takes and rounds wait. But a take or round that this thread
        begins on this object raises FailedPreconditionError.

        Args:
            num_required: The same as for `take`, like all arguments below.
            at_least: How many are enough at the timeout.
            timeout: Seconds to wait for the gradients; None: for ever.
            on_death: What to do if a process died or failed.

        Returns:
            A context manager whose value is what `take` returns; its ``__enter__`` and
            ``__exit__`` document the errors.

        Raises:
            InvalidArgumentError: A bad argument.
        """
        required, least = arguments.required(num_required, at_least)
        seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
        return Round(self._handle, self._taken, required, least, seconds, raises)

    async def take_async(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> _Taken_co:
        """Take as `take` does, without blocking the event loop of asyncio.

        If the task is cancelled (``asyncio.timeout``, ``wait_for``, a task group, Ctrl-C), nothing
        is consumed. From the moment the gradients are there until the event loop resumes the task,
        a round is open.

        Raises:
            asyncio.CancelledError: The task was cancelled.
            ShmaccError: The errors of `take`; also ResourceExhaustedError if no thread could be
                started for the wait.
        """
        from shmacc._accumulators import coroutines  # it imports asyncio

        return await coroutines.take(
            self._handle, self._taken, num_required, timeout, at_least, on_death
        )

    def round_async(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> "AsyncRound[_Taken_co]":
        """Return a round as `round` does, for ``async with``.

        The block may await. If the task is cancelled, before the block or in it, nothing is
        consumed.
        """
        from shmacc._accumulators.coroutines import AsyncRound  # it imports asyncio

        required, least = arguments.required(num_required, at_least)
        seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
        return AsyncRound(self._handle, self._taken, required, least, seconds, raises)

    def take_partial(
        self, num_required: int = 1, *, timeout: float | None = None, seal: bool = False
    ) -> _Partial_co:
        """Take the sums, not divided; leave the step as it is.

        A sparse partial of no gradients has no rows. A dense partial of no gradients has zeros of
        the declared shape, where an undeclared dimension has size 0.

        Args:
            num_required: How many gradients to wait for. 0: take all pending gradients, even none,
                and do not wait in the queue. But if they are enough for the first take in the
                queue, they belong to that take, and the partial has none.
            timeout: Seconds to wait; None: for ever.
            seal: Refuse later applies until `advance_step` or `unseal`.

        Raises:
            All errors of `take`; OutOfRangeError only if the lanes' sums together exceed 64 bits.
        """
        return rounds.take(
            self._handle, self._partial, num_required, timeout, partial=True, seal=bool(seal)
        )

    def snapshot(self, *, timeout: float | None = None) -> _Taken_co:
        """Return what a take would return now; consume nothing, and wait for no gradients.

        An empty accumulator gives the same as a `take_partial` of no gradients. While a round is
        open, this returns that round.

        Args:
            timeout: Seconds to wait for the lock, which a stopped process may hold; None: for ever.

        Raises:
            DeadlineExceededError: The timeout passed.
        """
        return rounds.look(self._handle, self._taken, timeout, partial=False)

    def contributors(self, *, timeout: float | None = None) -> IndexArray:
        """Return the contributors of the pending gradients: int64, ascending. Consumes nothing.

        Gradients that were applied without a ``contributor`` are not listed.

        Args:
            timeout: The same as for `snapshot`.

        Raises:
            The errors of `snapshot`.
        """
        contributors: IndexArray = rounds.look(
            self._handle, lambda taken: taken.contributors, timeout, partial=True
        )
        return contributors

    def state(self, *, timeout: float | None = None) -> dict[str, ValueArray]:
        """Return everything accumulated, and the step, as a dict of arrays for ``np.savez``.

        Consumes nothing. While a round is open, this returns the state of that round.

        Args:
            timeout: The same as for `snapshot`.

        Raises:
            The errors of `snapshot`.
        """
        members = self._spec.members
        return rounds.look(
            self._handle, lambda taken: saved_state.to_arrays(taken, members), timeout, partial=True
        )

    def restore(self, state: Mapping[str, ValueArray], *, timeout: float | None = None) -> None:
        """Replace everything by a result of `state`, from this accumulator or an equal one.

        One commit replaces sums, counts, contributors and step, also while other processes are
        attached. It drops the gradients accumulated before, unseals the step, and ends an open
        round. A finished accumulator is running again. Counters are not reset.

        A restore begins a timeline: gradients that were computed before it are dropped, whatever
        their step. A thread (or a task of asyncio) that read the step before the restore must read
        it again, by `global_step`, `steps` or `wait_step`.

        Args:
            state: The dict, or the same from ``np.load``.
            timeout: The same as for `set_global_step`.

        Raises:
            InvalidArgumentError: `state` is no state, or its accumulator had other members, dtypes,
                shapes or reductions. Nothing was changed.
            ResourceExhaustedError: Shared memory is full. Nothing was changed.
            DeadlineExceededError: The timeout passed. Nothing was changed.
        """
        seconds = arguments.timeout(timeout)
        _core.load([], [self._to_load(state)], seconds)

    def _to_load(self, state: Mapping[str, ValueArray]) -> tuple[Any, ...]:
        """Return the arguments for the extension's `load`: handle, step, gradients, terms."""
        members, step, terms = saved_state.from_arrays(state, self._spec.members)
        return self._handle, step, members, terms

    def unseal(self, *, timeout: float | None = None) -> None:
        """Accept gradients again after ``take_partial(seal=True)``, at the same step.

        Args:
            timeout: The same as for `set_global_step`.

        Raises:
            DeadlineExceededError: The timeout passed. Nothing was changed.
            FailedPreconditionError: A round is open, or an update with it has begun.
        """
        self._handle.unseal(arguments.timeout(timeout))

    def stats(self) -> Stats:
        """Return the segment's counters at one instant. Uses no lock."""
        return stats_of(self._handle.state())

    def cancel(self) -> None:
        """Make every take that waits now, in any process, raise CancelledError."""
        self._handle.cancel()

    def close(self) -> None:
        """Detach. Takes that wait on this object raise CancelledError. Idempotent."""
        super().close()
