"""Takes and rounds: the request is checked, the extension waits, and results are made.

A take consumes its gradients at once. A round hands them out for the length of a block, and
consumes them at its end: gradients of the next step are accepted when what was computed from this
one's is in place.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from shmacc import _core
from shmacc._accumulators import open_rounds
from shmacc._core import TakenRound
from shmacc._gradients import arguments
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ShmaccError,
)

_Result = TypeVar("_Result")


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
    taken = TakenRound(not partial, seal)
    try:
        # No call with a star: CPython 3.11 crashes if memory runs out while it makes one.
        handle.take(taken, required, seconds, raises)
        return finish(taken)
    except BaseException as error:
        if not handle.keep(taken) and type(error) is DeadlineExceededError:
            raise with_attached(error, handle) from None
        raise


def look(
    handle: _core.Handle,
    finish: Callable[[TakenRound], _Result],
    *,
    partial: bool,
    shards: int = 1,
) -> _Result:
    """Return what a take of all that is there would give; consumes nothing.

    Rows are handed out shard by shard: with one shard, as takes do, in ascending order.
    """
    taken = TakenRound(not partial, seal=False, shards=shards)
    handle.look(taken)
    return finish(taken)


def _required(num_required: object, least: int) -> int:
    required = arguments.int64(num_required, "num_required")
    if required < least:
        what = "positive" if least else "not be negative"
        must = "must be" if least else "must"
        raise InvalidArgumentError(f"Argument num_required {must} {what}, but was {required}")
    return required


class RoundBlock(Generic[_Result]):
    """What rounds have in common, whether a thread or a coroutine waits for them."""

    __slots__ = ("_finish", "_handle", "_raises", "_required", "_taken_round", "_timeout")

    def __init__(
        self,
        handle: _core.Handle,
        finish: Callable[[TakenRound], _Result],
        num_required: object,
        timeout: object,
        on_death: object,
    ) -> None:
        self._taken_round: TakenRound | None = None  # not entered yet
        self._handle = handle
        self._finish = finish
        self._required = _required(num_required, 1)
        self._timeout = arguments.timeout(timeout)
        self._raises = arguments.on_death(on_death)

    def _open(self, caller: _core.Caller | None) -> _Result:
        if self._taken_round is not None:
            raise FailedPreconditionError("This round has been entered already; make another one")
        self._taken_round = taken = TakenRound(advance=True, seal=False)
        try:
            self._handle.open_round(taken, self._required, self._timeout, self._raises, caller)
            given = self._finish(taken)
            open_rounds.add(given, self._handle, taken)
        except BaseException as error:
            self._give_up()
            if taken.serial == 0 and type(error) is DeadlineExceededError:
                raise with_attached(error, self._handle) from None
            raise
        return given

    def _close(self, *, consume: bool) -> None:
        if self._taken_round is not None:
            open_rounds.remove(self._taken_round)
        if not consume or self._taken_round is None:
            self._give_up()
        elif not self._consume(self._taken_round):
            raise FailedPreconditionError(
                "The round was ended before its block: by advance_step or set_global_step, which "
                "do not wait for it, or by a fork (it is the parent's)"
            )

    def _consume(self, taken: TakenRound) -> bool:
        try:
            return self._handle.close_round(taken.serial, consume=True)
        except BaseException:
            self._give_up()
            raise

    def __del__(self) -> None:
        """Give up a round that was entered and never left."""
        if self._taken_round is not None:
            self._give_up()

    def _give_up(self) -> None:
        if self._taken_round is not None:
            open_rounds.remove(self._taken_round)
        # A round that has ended is none of this handle's any more, which is no error here.
        if self._taken_round is not None and self._taken_round.serial != 0:
            with contextlib.suppress(ShmaccError):
                self._handle.close_round(self._taken_round.serial, consume=False)


class Round(RoundBlock[_Result]):
    """A round of gradients that is consumed when a ``with`` block ends; made by ``round()``.

    Entering waits for the gradients as a take does, seals the step and returns the reduction.
    Leaving consumes the gradients and moves the step on, in one commit. An exception in the block,
    ``close()`` of the accumulator and the death of the process consume nothing: the step is open
    again as it was. So a gradient that counts was computed from parameters that were read before
    the block changed them, and parameters may be updated in place without a lock.
    """

    __slots__ = ()

    def __enter__(self) -> _Result:
        """Wait for the gradients and open the round.

        Raises:
            DeadlineExceededError: The timeout passed.
            CancelledError: ``cancel()``, or the handle was closed.
            FailedPreconditionError: This thread has a round of this accumulator open already.
            WorkerDiedError: A process that had applied has died, and ``on_death`` is "raise".
            OutOfRangeError: An integer result does not fit the dtype, or the step cannot move on.
        """
        return self._open(None)

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
        self._close(consume=kind is None)


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
