"""Takes and rounds: the request is checked, the extension waits, and results are made.

A take consumes its gradients at once. A round hands them out for the length of a block, and
consumes them at its end: gradients of the next step are accepted when what was computed from this
one's is in place.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from shmacc import _arguments as arguments
from shmacc import _core
from shmacc._core import TakenRound
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ShmaccError,
)

_Result = TypeVar("_Result")
_Taken = TypeVar("_Taken")
_Partial = TypeVar("_Partial")


def take(
    handle: _core.Handle,
    finish: Callable[[TakenRound], _Result],
    num_required: object,
    timeout: object,
    on_death: object = "wait",
    *,
    partial: bool = False,
    seal: bool = False,
) -> _Result:
    """Take, and make the result of what was taken.

    The gradients taken are not lost if an exception (a signal handler's, or a MemoryError of a
    conversion) keeps the result from the caller. The handle keeps them for its next take of the
    same sort. The interpreter runs signal handlers at the end of a call, at the start of a
    function and at a backward jump, and nowhere else. So a handler runs within this ``try``, or
    when the caller has the result; and once caught here, the round reaches `keep` whatever
    comes next.
    """
    required = _required(num_required, 0 if partial else 1)
    seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
    place = TakenRound(not partial, seal)
    try:
        # No call with a star: CPython 3.11 crashes if memory runs out while it makes one.
        handle.take(place, required, seconds, raises)
        return finish(place)
    except BaseException as error:
        if not handle.keep(place) and type(error) is DeadlineExceededError:
            raise with_attached(error, handle) from None
        raise


def look(
    handle: _core.Handle, finish: Callable[[TakenRound], _Result], *, partial: bool
) -> _Result:
    """Return what a take of all that is there would give; consumes nothing."""
    place = TakenRound(not partial, seal=False)
    handle.look(place)
    return finish(place)


def _required(num_required: object, least: int) -> int:
    required = arguments.int64(num_required, "num_required")
    if required < least:
        what = "positive" if least else "not be negative"
        must = "must be" if least else "must"
        raise InvalidArgumentError(f"Argument num_required {must} {what}, but was {required}")
    return required


class Round(Generic[_Result]):
    """A round of gradients that is consumed when a ``with`` block ends; made by ``round()``.

    Entering waits for the gradients as a take does, seals the step and returns the reduction.
    Leaving consumes the gradients and moves the step on, in one commit. An exception in the block,
    ``close()`` of the accumulator and the death of the process consume nothing: the step is open
    again as it was. So a gradient that counts was computed from parameters that were read before
    the block changed them, and parameters may be updated in place without a lock.
    """

    __slots__ = ("_finish", "_handle", "_place", "_raises", "_required", "_timeout")

    def __init__(
        self,
        handle: _core.Handle,
        finish: Callable[[TakenRound], _Result],
        num_required: object,
        timeout: object,
        on_death: object,
    ) -> None:
        self._place: TakenRound | None = None  # not entered yet
        self._handle = handle
        self._finish = finish
        self._required = _required(num_required, 1)
        self._timeout = arguments.timeout(timeout)
        self._raises = arguments.on_death(on_death)

    def __enter__(self) -> _Result:
        """Wait for the gradients and open the round.

        Raises:
            DeadlineExceededError: The timeout passed.
            CancelledError: ``cancel()``, or the handle was closed.
            FailedPreconditionError: This thread has a round of this accumulator open already.
            WorkerDiedError: A process that had applied has died, and ``on_death`` is "raise".
            OutOfRangeError: An integer result does not fit the dtype, or the step cannot move on.
        """
        if self._place is not None:
            raise FailedPreconditionError("This round has been entered already; make another one")
        self._place = place = TakenRound(advance=True, seal=False)
        try:
            self._handle.open_round(place, self._required, self._timeout, self._raises)
            return self._finish(place)
        except BaseException as error:
            self._give_up()
            if place.serial == 0 and type(error) is DeadlineExceededError:
                raise with_attached(error, self._handle) from None
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Consume the gradients and move the step on; after an exception, neither.

        Raises:
            FailedPreconditionError: The round has ended before its block: by a new step
                (``advance_step``, ``set_global_step``), or since the handle was closed.
        """
        if kind is not None or self._place is None:
            self._give_up()
            return
        try:
            ended = self._handle.close_round(self._place.serial, consume=True)
        except BaseException:
            self._give_up()
            raise
        if not ended:
            raise FailedPreconditionError(
                "The round was ended before its block: by advance_step or set_global_step, which "
                "do not wait for it, or by a fork (it is the parent's)"
            )

    def __del__(self) -> None:
        """Give up a round that was entered and never left."""
        if self._place is not None:
            self._give_up()

    def _give_up(self) -> None:
        # A round that has ended is none of this handle's any more, which is no error here.
        if self._place is not None and self._place.serial != 0:
            with contextlib.suppress(ShmaccError):
                self._handle.close_round(self._place.serial, consume=False)


def with_attached(error: DeadlineExceededError, handle: _core.Handle) -> DeadlineExceededError:
    """Return the error with the attached processes in it."""
    pids, more = handle.some_attached()
    named = ", ".join(f"pid {pid}" for pid in sorted(pids))
    others = f" and up to {more} more" if more else ""
    return (
        DeadlineExceededError(f"{error}; attached processes: {named}{others}")
        .with_fields(**error.__dict__)
        .with_fields(pids=tuple(sorted(pids)))
    )


class Takes(Generic[_Taken, _Partial]):
    """The takes that accumulators of every kind have; a subclass makes the results."""

    _handle: _core.Handle

    def _taken(self, place: TakenRound) -> _Taken:
        raise NotImplementedError

    def _partial(self, place: TakenRound) -> _Partial:
        raise NotImplementedError

    def take(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> _Taken:
        """Wait for gradients and take their reduction, with more numbers than TensorFlow's.

        Waits in line until ``num_required`` gradients have accumulated, takes all that have,
        empties the accumulator and adds 1 to its step. Arguments, errors and what an interruption
        leaves are as for ``SparseConditionalAccumulator.take_grad``.

        With ``on_death="raise"`` the wait ends with WorkerDiedError if a process that has applied
        is found dead; each death ends one wait. A process that closed its accumulator or exited in
        order is not dead. Gradients that are enough are taken, whether a process has died or not.

        Returns:
            A `SparseTaken` or a `DenseTaken`; of a group a mapping from member to one of these, in
            which a member that no gradient had is absent.
        """
        return take(self._handle, self._taken, num_required, timeout, on_death)

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
        return take(
            self._handle, self._partial, num_required, timeout, partial=True, seal=bool(seal)
        )

    def snapshot(self) -> _Taken:
        """Return what a take would give now; consumes nothing, and waits for no number.

        Of an empty accumulator it is as `take_partial` of none; in an open round it shows the
        round.
        """
        return look(self._handle, self._taken, partial=False)
