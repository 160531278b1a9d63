"""Waits of coroutines: each is a call in a thread of its own, which ends with the wait.

A coroutine that is cancelled while it waits consumes nothing. The thread cannot know whether the
coroutine will get its result, so it does not take: it opens a round, and the coroutine, which from
then on runs to its end without another wait, consumes it. A coroutine that is cancelled ends the
thread's wait, or gives up the round that the thread has opened; nothing that was delivered to the
event loop but not to the coroutine is lost.

    thread      opens the round ──> delivers ──> ends
    coroutine   waits ─────────────────────────> consumes, returns      no wait in between
                waits ──> cancelled: ends the thread's wait, waits for its end, gives up the round

So a round is open until the event loop comes to the coroutine, and other takes wait for that. The
event loop's own thread does not: what it calls meanwhile ends the round, and the coroutine waits
again (LoopRound in shmacc/native/segment/caller.hpp).

Not done: a take in a thread whose result is kept if the coroutine is cancelled. The step would have
moved, and takes of other processes would miss the gradients. Nor is the thread an executor's: one
whose threads all wait would keep everybody else from theirs.
"""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from shmacc import _core
from shmacc._accumulators.rounds import RoundBlock, with_attached
from shmacc._core import TakenRound
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
)

_Result = TypeVar("_Result")

# The task that has a round open would wait for the round's end. Other tasks wait for it in line.
_in_rounds: "weakref.WeakKeyDictionary[asyncio.Task[object], list[_core.Handle]]" = (
    weakref.WeakKeyDictionary()
)


async def wait_in_thread(
    handle: _core.Handle, call: Callable[[_core.Caller], _Result], undo: Callable[[], None]
) -> _Result:
    """Return what the call returns; if this coroutine is cancelled, end the call's wait, and undo.

    Raises:
        ResourceExhaustedError: There can be no more threads.
        BaseException: The call's.
    """
    caller = _core.Caller()
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    results: list[_Result] = []
    failures: list[BaseException] = []

    def make_call() -> None:
        try:
            results.append(call(caller))
        except BaseException as error:  # noqa: BLE001  it is the coroutine's
            failures.append(error)
        try:
            loop.call_soon_threadsafe(ended.set_result, None)
        except RuntimeError:  # the loop is closed: there is no coroutine any more
            undo()

    thread = threading.Thread(target=make_call, name="shmacc: a coroutine's wait", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceExhaustedError(f"No thread could be started for a wait: {error}") from error
    except BaseException:  # a signal handler's: the thread may have been started
        handle.end_wait(caller)
        raise
    try:
        await asyncio.wait([ended])  # unlike `await ended`, does not cancel it
    except GeneratorExit:  # the task was thrown away: it may not wait
        handle.end_wait(caller)
        raise
    except BaseException:
        handle.end_wait(caller)
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        thread.join()  # it has nothing left to do
        failures.clear()
        undo()
        raise
    thread.join()
    if failures:
        raise failures.pop()  # the error knows this frame, which is not to know the error
    return results.pop()


class _Block(RoundBlock[_Result]):
    __slots__ = ()

    async def _wait(self, accept: Callable[[TakenRound], bool]) -> _Result:
        """Return the round that was opened and accepted, before another wait.

        One that has ended before the event loop came to it (by a new step, or because this thread
        called something that would have waited for it) is not accepted, and the wait begins again.
        """
        if self._handle in _handles_in_rounds():
            raise FailedPreconditionError(
                "This task has a round of this accumulator open; it must end before another take "
                "or round"
            )
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            taken = await wait_in_thread(self._handle, self._open, self._give_up)
            if self._taken_round is not None and accept(self._taken_round):
                return taken
            self._taken_round = None
            if until is not None:
                self._timeout = max(0.0, until - time.monotonic())


class AsyncRound(_Block[_Result]):
    """A round of gradients for an ``async with`` block; made by ``round_async()``.

    As `Round`; but waiting for the gradients does not block the event loop. If the task is
    cancelled in the wait, nothing is consumed; if in the block, it is as any exception there.
    In the block, a call in the event loop's thread that waits for the block's end, as an apply with
    a later ``local_step`` does, is a FailedPreconditionError.
    """

    __slots__ = ("_held",)

    async def __aenter__(self) -> _Result:
        """Wait for the gradients and open the round.

        Raises:
            asyncio.CancelledError: The task was cancelled. Nothing is consumed.
            ShmaccError: As for ``Round.__enter__``; FailedPreconditionError: this task has a round
                of this accumulator open already; ResourceExhaustedError: no thread could be started
                for the wait.
        """
        taken = await self._wait(lambda opened: self._handle.hold_round(opened.serial))
        self._held = _handles_in_rounds()
        self._held.append(self._handle)
        return taken

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Consume the gradients and move the step on; after an exception, neither.

        This does not wait: it takes the lock in the event loop's thread, as an apply does there.

        Raises:
            FailedPreconditionError: As for ``Round.__exit__``.
        """
        self._held.remove(self._handle)
        self._close(consume=kind is None)


class AsyncTake(_Block[_Result]):
    """A take for a coroutine: a round that is consumed as soon as it is there."""

    __slots__ = ()

    async def result(self) -> _Result:
        """Wait for the gradients and take them.

        Raises:
            asyncio.CancelledError: The task was cancelled. Nothing is consumed.
            ShmaccError: As for `AsyncRound.__aenter__`.
        """
        return await self._wait(self._consume)


def _handles_in_rounds() -> list[_core.Handle]:
    task = asyncio.current_task()
    return [] if task is None else _in_rounds.setdefault(task, [])


async def wait_step(handle: _core.Handle, after: int, timeout: float | None) -> int:
    """Return the global step as soon as it is past `after`."""
    try:
        return await wait_in_thread(
            handle, lambda caller: handle.wait_step(after, timeout, caller), lambda: None
        )
    except DeadlineExceededError as error:
        raise with_attached(error, handle) from None
