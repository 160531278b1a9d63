"""Lets coroutines wait: each waiting call runs in a thread of its own, which ends with the call.

A coroutine that is cancelled while it waits consumes nothing. The thread cannot know whether the
coroutine will get its result. So the thread does not take, but opens a round. The coroutine
consumes the round, and returns without another wait. A coroutine that is cancelled ends the
thread's wait, or gives up the round that the thread has opened. So a round that was delivered to
the event loop but not to the coroutine is not lost.

    thread      opens the round ──> delivers ──> ends
    coroutine   waits ─────────────────────────> consumes, returns      no wait in between
                waits ──> cancelled: ends the thread's wait, waits for its end, gives up the round

So a round is open until the event loop resumes the coroutine, and other takes wait for its end. The
event loop's own thread must not wait for itself: if it makes a call that would wait for the round's
end, the call gives the round up, and the coroutine waits again (OwnRound in
shmacc/native/segment/caller.hpp).

Rejected: a take in the thread that keeps its result if the coroutine is cancelled. The step would
have moved, and takes of other processes would miss the gradients. Also rejected: threads of an
executor. Waits could occupy all of them, and keep everything else from running.
"""

import asyncio
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from shmacc import _core
from shmacc._core import RoundResult
from shmacc._values import arguments
from shmacc.errors import FailedPreconditionError, ResourceExhaustedError

_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)

_PAUSE = 0.05  # seconds between two checks whether a thread has ended

# The open rounds of each task. A task that takes while its own round is open would wait for itself,
# which is an error; other tasks wait in the queue.
_in_rounds: "weakref.WeakKeyDictionary[asyncio.Task[object], weakref.WeakSet[Any]]" = (
    weakref.WeakKeyDictionary()
)


async def wait_in_thread(
    handle: _core.Handle, call: Callable[[_core.Caller], _Result], undo: Callable[[], None]
) -> _Result:
    """Return the call's result; if this coroutine is cancelled, end the call's wait, then `undo`.

    Raises:
        ResourceExhaustedError: No thread could be started.
        BaseException: The call raised it.
    """
    caller = _core.Caller()
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    results: list[_Result] = []
    failures: list[BaseException] = []

    def make_call() -> None:
        try:
            results.append(call(caller))
        except BaseException as error:  # noqa: BLE001  the coroutine raises it
            failures.append(error)
        try:
            loop.call_soon_threadsafe(ended.set_result, None)
        except RuntimeError:  # the loop is closed: there is no coroutine any more
            undo()

    thread = threading.Thread(target=make_call, name="shmacc: a coroutine's wait", daemon=True)
    try:
        try:
            # Do not use the loop's executor: its threads are few, and a wait may last for ever.
            thread.start()
        except RuntimeError as error:
            raise ResourceExhaustedError(
                f"No thread could be started for a wait: {error}"
            ) from error
        await asyncio.wait([ended])  # `await ended` would cancel `ended` with this coroutine
    except GeneratorExit:  # the task was discarded, and must not wait
        handle.end_wait(caller)
        raise
    except BaseException:
        handle.end_wait(caller)
        # Watch the thread: a loop that a signal handler interrupted may never set `ended`.
        while thread.is_alive():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended], timeout=_PAUSE)
        # Undo what the call has done if it succeeded before `end_wait` could end it.
        failures.clear()
        undo()
        raise
    # The thread's call is over, so this join waits for its last few instructions only.
    thread.join()
    if failures:
        raise failures.pop()  # pop breaks the reference cycle of error, frame and list
    return results.pop()


class AsyncRound(_core.AsyncBlock[_Result_co]):
    """A round of gradients for an ``async with`` block; made by ``round_async()``.

    Like `Round`, but waiting for the gradients does not block the event loop. If the task is
    cancelled, in the wait or in the block, nothing is consumed. In the block, a call in the event
    loop's thread that would wait for the block's end, such as an apply with a later ``local_step``,
    raises FailedPreconditionError.
    """

    __slots__ = ("_entered",)

    # `__aexit__` must not be written in Python: see shmacc/native/python/round_block.hpp.

    def __aenter__(self) -> Awaitable[_Result_co]:
        """Wait for the gradients and open the round.

        Raises:
            asyncio.CancelledError: The task was cancelled. Nothing is consumed.
            ShmaccError: The errors of ``Round.__enter__``; also FailedPreconditionError if this
                round was entered before, or this task has a round of this accumulator open; also
                ResourceExhaustedError if no thread could be started for the wait.
        """
        # Two threads must not open a round for one block.
        if getattr(self, "_entered", False):
            raise FailedPreconditionError("This round has been entered already; make another one")
        self._entered = True
        return _core.Guarded(self._enter(), self)

    async def _enter(self) -> _Result_co:
        block = _core.BlockAccess(self)
        taken: _Result_co = await _opened(block, block.hold)
        _rounds_of_task().add(self)
        return taken


async def take(
    handle: _core.Handle,
    finish: Callable[[RoundResult], _Result],
    num_required: object,
    timeout: object,
    at_least: object,
    on_death: object,
) -> _Result:
    """Wait for the gradients and take them: open a round, and consume it at once.

    Raises:
        asyncio.CancelledError: The task was cancelled. Nothing is consumed.
        ShmaccError: The errors of `AsyncRound.__aenter__`.
    """
    required, least = arguments.required(num_required, at_least)
    seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
    block = _core.RoundBlock(handle, finish, required, least, seconds, raises)
    taken: _Result = await _core.Guarded(_taken(_core.BlockAccess(block)), block)
    return taken


async def _taken(block: _core.BlockAccess) -> Any:
    kept = block.take_kept()
    return await _opened(block, block.consume) if kept is None else kept


async def _opened(block: _core.BlockAccess, accept: Callable[[], bool]) -> Any:
    """Wait until a round is open. Accept the round, and return its result without another wait.

    A round may end before the event loop resumes this coroutine: by a new step, or because this
    thread made a call that would have waited for the round. Then `accept` returns False, and the
    wait begins again.
    """
    handle = block.handle
    opened = map(_core.BlockAccess, _rounds_of_task())
    if any(other.is_open and other.is_of(handle) for other in opened):
        raise FailedPreconditionError(
            "This task has a round of this accumulator open; it must end before another take or "
            "round"
        )
    timeout = block.timeout
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        taken = await wait_in_thread(
            handle, functools.partial(block.open, timeout), block.give_back
        )
        if accept():
            return taken
        if until is not None:
            timeout = max(0.0, until - time.monotonic())


def _rounds_of_task() -> "weakref.WeakSet[AsyncRound[Any]]":
    task = asyncio.current_task()
    return weakref.WeakSet() if task is None else _in_rounds.setdefault(task, weakref.WeakSet())


async def wait_step(
    handle: _core.Handle, after: int, timeout: float | None, *, raises: bool
) -> int:
    """Return the global step as soon as it is past `after`."""
    at = await wait_in_thread(
        handle, lambda caller: handle.wait_step(after, timeout, raises, caller), lambda: None
    )
    # The other thread has read the step. Note the read for this thread, which computes from it.
    handle.read_in_thread(at)
    return at[0]


class AsyncSteps:
    """The steps of a run, like `Steps`, for ``async for``; made by ``steps_async()``."""

    __slots__ = ("_ended", "_handle", "_last", "_raises", "_timeout")

    def __init__(self, handle: "_core.Handle", timeout: object, on_death: object) -> None:
        self._handle = handle
        self._timeout = arguments.timeout(timeout)
        self._raises = arguments.on_death(on_death)
        self._ended = False
        self._last: tuple[int, int] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Wait until the step has changed, and return it.

        Raises:
            StopAsyncIteration: The accumulator is finished.
            asyncio.CancelledError: The task was cancelled; the next call waits for the same step.
            ShmaccError: The errors of `Steps`; also ResourceExhaustedError if no thread could be
                started for the wait.
        """
        if self._ended:
            raise StopAsyncIteration
        # Read the fields here: only the loop's thread uses them, and the wait is in another thread.
        last, timeout, raises = self._last, self._timeout, self._raises
        self._last = new = await wait_in_thread(
            self._handle,
            lambda caller: self._handle.next_step(last, timeout, raises, caller),
            lambda: None,
        )
        if new is None:
            self._ended = True
            raise StopAsyncIteration
        self._handle.read_in_thread(new)
        return new[0]
