"""The takes that accumulators of every kind have: at once, for a block, for coroutines."""

from typing import TYPE_CHECKING, Generic, TypeVar

from shmacc import _core
from shmacc._accumulators import taking
from shmacc._accumulators.taking import Round
from shmacc._core import TakenRound
from shmacc._gradients import arguments

if TYPE_CHECKING:
    from shmacc._accumulators.coroutines import AsyncRound

_Taken = TypeVar("_Taken")
_Partial = TypeVar("_Partial")


class Takes(Generic[_Taken, _Partial]):
    """The takes that accumulators of every kind have; a subclass makes the results."""

    _handle: _core.Handle

    def _taken(self, taken: TakenRound) -> _Taken:
        raise NotImplementedError

    def _partial(self, taken: TakenRound) -> _Partial:
        raise NotImplementedError

    def take(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> _Taken:
        """Wait for gradients and take their reduction, with more numbers than TensorFlow's.

        Waits in the queue until ``num_required`` gradients have accumulated, takes all that have,
        empties the accumulator and adds 1 to its step. Arguments, errors and what an interruption
        leaves are as for ``SparseConditionalAccumulator.take_grad``.

        With ``on_death="raise"`` the wait ends with WorkerDiedError if a process that has applied
        is found dead; each death ends one wait. A process that closed its accumulator or exited in
        order is not dead. Gradients that are enough are taken, whether a process has died or not.

        Returns:
            A `SparseTaken` or a `DenseTaken`; of a group a mapping from member to one of these, in
            which a member that no gradient had is absent.
        """
        return taking.take(self._handle, self._taken, num_required, timeout, on_death)

    def round(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> Round[_Taken]:
        """Take gradients for the length of a ``with`` block, and consume them at its end.

        Waits as `take` and seals the step: from then on applies at it return False; an apply with
        a later ``local_step`` waits for the end of the block. Leaving the block consumes the
        gradients and moves the step on by one, in one commit; an exception in it, `close` and the
        death of this process consume nothing and open the step again as it was. A process that is
        merely stopped in the block keeps the round. `advance_step` and `set_global_step`, by any
        process, end it at once, and then the end of the block is a FailedPreconditionError. Other
        takes and rounds wait; in this thread and on this object they are a
        FailedPreconditionError.

        Args:
            num_required: At least 1.
            timeout: Seconds to wait for the gradients; None: for ever.
            on_death: As for `take`.

        Returns:
            A context manager whose value is what `take` returns; its ``__enter__`` and
            ``__exit__`` name the errors.

        Raises:
            InvalidArgumentError: A bad argument.
        """
        return Round(self._handle, self._taken, num_required, timeout, on_death)

    async def take_async(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> _Taken:
        """Take as `take` does, without blocking the event loop of asyncio.

        If the task is cancelled (``asyncio.timeout``, ``wait_for``, a task group, Ctrl-C) nothing
        is consumed. From the moment the gradients are there until the event loop comes to the task,
        the accumulator is as in an open round.

        Raises:
            asyncio.CancelledError: The task was cancelled.
            ShmaccError: As for `take`; ResourceExhaustedError: no thread could be started for the
                wait.
        """
        from shmacc._accumulators.coroutines import (
            AsyncTake,  # asyncio takes longer to import than all of shmacc
        )

        wait = AsyncTake(self._handle, self._taken, num_required, timeout, on_death)
        return await wait.result()

    def round_async(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> "AsyncRound[_Taken]":
        """Return a round as `round` does, for ``async with``.

        The block may await. If its task is cancelled, before the block or in it, nothing is
        consumed.
        """
        from shmacc._accumulators.coroutines import AsyncRound  # as in take_async

        return AsyncRound(self._handle, self._taken, num_required, timeout, on_death)

    def take_partial(
        self, num_required: int = 1, *, timeout: float | None = None, seal: bool = False
    ) -> _Partial:
        """Take the sums, not divided; the step stays.

        A partial of no gradients has no rows; of a dense accumulator it is zeros of the declared
        shape, where an undeclared dimension has size 0.

        Args:
            num_required: 0: all gradients that are there, even none. Such a take joins no queue and
                waits for no number. But a round whose number is reached belongs to the first take
                in line, also in the moment before that take gets it; then nothing is there.
            timeout: As for `take`.
            seal: Refuse later applies until `advance_step` or `unseal`.

        Raises:
            As for `take`, but sums always fit.
        """
        return taking.take(
            self._handle, self._partial, num_required, timeout, partial=True, seal=bool(seal)
        )

    def snapshot(self) -> _Taken:
        """Return what a take would give now; consumes nothing, and waits for no number.

        Of an empty accumulator it is as `take_partial` of none; in an open round it shows the
        round.
        """
        return taking.look(self._handle, self._taken, partial=False)
