"""Coroutines wait without blocking their loop, and a cancelled wait consumes nothing."""

import asyncio
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from helpers.apart import Apart, Pipe
from helpers.interpreter import run
from helpers.support import LONG, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, errors

pytestmark = pytest.mark.threads

Accumulator = ConditionalAccumulator


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    assert threading.active_count() == 1


def until_taken(acc: Accumulator) -> None:
    """Block the event loop until the waiting thread has taken its gradients."""
    until(lambda: acc.stats().round_pid is not None)


async def queued(acc: Accumulator, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task whose take is in the queue."""
    task = asyncio.create_task(wait)
    await until_async(lambda: acc.stats().waiting > 0)
    return task


async def until_async(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds; meanwhile other tasks run."""
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110  threads and processes set no asyncio.Event
            await asyncio.sleep(0.0005)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def untouched(acc: Accumulator, count: int, step: int = 0) -> None:
    """Assert that nothing was consumed, and that the step is open."""
    stats = acc.stats()
    assert (stats.num_accumulated, stats.global_step, stats.takes) == (count, step, 0)
    assert (stats.waiting, stats.round_pid, stats.sealed) == (0, None, False)
    assert acc.apply_grad(1.0, local_step=step)


async def test_a_take_is_awaited_while_the_loop_goes_on(acc: Accumulator) -> None:
    task = await queued(acc, acc.take_async(2))
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    taken = await task
    assert (taken.value.item(), taken.count, taken.step) == (3.0, 2, 0)
    assert acc.global_step == 1
    assert acc.stats().taken == 2


async def test_a_cancelled_wait_consumes_nothing(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    await cancelled(await queued(acc, acc.take_async(2)))
    assert threading.active_count() == 1
    untouched(acc, 1)


@pytest.mark.parametrize("delivered", [False, True])
async def test_a_cancel_after_the_thread_took_its_gradients_consumes_nothing(
    acc: Accumulator, *, delivered: bool
) -> None:
    task = await queued(acc, acc.take_async(1))
    acc.apply_grad(1.0)
    until_taken(acc)  # the task has not received the gradients yet
    if delivered:
        until(lambda: threading.active_count() == 1)  # the thread has passed on its result
        # Cancel after the result has arrived, but before the task runs.
        asyncio.get_running_loop().call_soon(task.cancel)
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    untouched(acc, 1)


async def test_a_timeout_error_says_how_many_gradients_came(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    for timeout in 0.01, 0:
        with pytest.raises(errors.DeadlineExceededError, match="1 of the 3 required") as caught:
            await acc.take_async(3, timeout=timeout)
        assert (caught.value.accumulated, caught.value.required) == (1, 3)
    with pytest.raises(errors.DeadlineExceededError, match="still 0, not past 0"):
        await acc.wait_step_async(0, timeout=0.01)
    untouched(acc, 1)


async def test_a_round_is_consumed_when_its_block_ends(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    follower = asyncio.create_task(acc.wait_step_async(0))
    async with acc.round_async(1) as taken:
        await asyncio.sleep(0)
        assert taken.value.item() == 1.0
        assert not follower.done()
        assert not acc.apply_grad(2.0)  # the step is sealed
        assert acc.global_step == 0
    assert await follower == 1


async def test_an_exception_or_a_cancel_in_the_block_consumes_nothing(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(ZeroDivisionError):
        async with acc.round_async(1):
            raise ZeroDivisionError
    entered = asyncio.Event()

    async def chief() -> None:
        async with acc.round_async(1):
            entered.set()
            await asyncio.sleep(LONG)

    task = asyncio.create_task(chief())
    await entered.wait()
    await cancelled(task)
    untouched(acc, 1)


async def test_a_second_entry_into_a_round_is_refused(acc: Accumulator) -> None:
    """If two tasks could enter the same round, each might give up the other's gradients."""
    one = acc.round_async(1)

    async def chief() -> float:
        async with one as taken:
            await asyncio.sleep(0)
            return float(taken.value.item())

    tasks = [asyncio.create_task(chief()) for _ in range(3)]
    await until_async(lambda: acc.stats().waiting > 0)
    acc.apply_grad(1.0)
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert first == 1.0
    assert all(isinstance(error, errors.FailedPreconditionError) for error in others)
    assert (acc.global_step, acc.stats().round_pid) == (1, None)
    with pytest.raises(errors.FailedPreconditionError, match="entered already"):
        await chief()


async def test_a_take_inside_of_the_tasks_own_round_is_refused(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    async with acc.round_async(1):
        with pytest.raises(errors.FailedPreconditionError, match="This task has a round"):
            await acc.take_async(1)
        with pytest.raises(errors.FailedPreconditionError, match="event loop has open"):
            acc.take(1)  # would block the event loop, and the round would never end
        with pytest.raises(errors.FailedPreconditionError, match="event loop has open"):
            acc.apply_grad(1.0, local_step=NEVER_STALE)
        other = await queued(acc, acc.take_async(1))
    assert acc.apply_grad(2.0, local_step=1)
    assert (await other).value.item() == 2.0


@pytest.mark.parametrize("own", [True, False], ids=["one_handle", "two_handles"])
@pytest.mark.parametrize("waiter", ["take", "round"])
def test_a_call_undoes_a_take_not_yet_received(acc: Accumulator, waiter: str, *, own: bool) -> None:
    async def chief() -> int:
        if waiter == "take":
            return (await acc.take_async(1)).count
        async with acc.round_async(1) as taken:
            return taken.count

    async def main(other: Accumulator) -> None:
        task = await queued(acc, chief())
        other.apply_grad(1.0)
        until_taken(acc)
        assert other.apply_grad(2.0, local_step=NEVER_STALE)
        assert await task == 2
        assert acc.global_step == 1
        task = await queued(acc, chief())
        other.apply_grad(4.0, local_step=1)
        until_taken(acc)
        assert other.take(1).value.item() == 4.0
        other.apply_grad(8.0, local_step=2)
        assert await task == 1
        assert acc.stats().taken == 4

    with ConditionalAccumulator.attach(acc.shared_name) as other:
        asyncio.run(main(acc if own else other))


async def test_advance_step_discards_a_take_that_its_task_did_not_receive(acc: Accumulator) -> None:
    task = await queued(acc, acc.take_async(1))
    acc.apply_grad(1.0)
    until_taken(acc)
    assert acc.advance_step(7) == 1  # before the event loop runs the task
    assert not acc.apply_grad(2.0, local_step=6)
    assert acc.apply_grad(3.0, local_step=7)
    taken = await task
    assert (taken.value.item(), taken.step) == (3.0, 7)


async def test_close_and_cancel_end_waits(acc: Accumulator) -> None:
    task = await queued(acc, acc.take_async(1))
    acc.cancel()
    with pytest.raises(errors.CancelledError, match="was cancelled"):
        await task
    other = shmacc.attach(acc.shared_name)
    task = await queued(acc, other.take_async(1))
    follower = asyncio.create_task(other.wait_step_async(0))
    await asyncio.sleep(0)
    other.close()
    with pytest.raises(errors.CancelledError, match="closed"):
        await task
    with pytest.raises((errors.CancelledError, errors.FailedPreconditionError), match="closed"):
        await follower
    with pytest.raises(errors.FailedPreconditionError, match="closed"):
        await other.take_async(1)


async def test_a_wait_whose_thread_cannot_start_raises(
    acc: Accumulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    acc.apply_grad(1.0)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(errors.ResourceExhaustedError, match="can't start new thread"):
        await acc.take_async(1)
    monkeypatch.undo()
    untouched(acc, 1)


async def test_a_signal_handler_that_raises_while_the_thread_starts_ends_its_wait(
    acc: Accumulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    acc.apply_grad(1.0)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        await acc.take_async(2)
    monkeypatch.undo()
    await until_async(lambda: threading.active_count() == 1)
    untouched(acc, 1)


def test_the_error_of_a_failed_wait_is_freed_without_the_collector(acc: Accumulator) -> None:
    async def main() -> weakref.ref[Any]:
        with pytest.raises(errors.DeadlineExceededError) as caught:
            await acc.round_async(1, timeout=0).__aenter__()
        known = weakref.ref(caught.value.with_traceback(None))
        del caught
        return known

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


def apply_until_told(name: str, *, pipe: Pipe) -> int:
    """Apply 1.0 until the test sends something; return the number of accepted gradients."""
    count = 0
    with Accumulator.attach(name) as own:
        while not pipe.poll():
            count += own.apply_grad(1.0, local_step=NEVER_STALE)
            time.sleep(0)
    return count


def test_a_task_that_waits_is_collected_with_its_loop(acc: Accumulator) -> None:
    """The task is in a reference cycle, and is collected once its thread has ended."""

    class Mark:
        pass

    async def wait(mark: Mark) -> None:
        await acc.take_async(1)
        del mark

    loop, mark = asyncio.new_event_loop(), Mark()
    known = weakref.ref(mark)
    task = loop.create_task(wait(mark))
    loop.run_until_complete(until_async(lambda: acc.stats().waiting > 0))
    loop.close()
    del loop, task, mark
    acc.cancel()
    until(lambda: threading.active_count() == 1)
    gc.collect()
    assert known() is None


def test_many_cancellations_lose_no_gradient(acc: Accumulator) -> None:
    took = cancellations = 0

    async def taker(seed: int) -> None:
        nonlocal took, cancellations
        delay = random.Random(seed)
        while cancellations < 300 or not took:
            try:
                async with asyncio.timeout(delay.random() * 0.004):
                    taken = await acc.take_async(3)
            except TimeoutError:
                cancellations += 1
            else:
                assert taken.value.item() == taken.count
                took += taken.count

    async def main() -> None:
        await asyncio.gather(*(taker(seed) for seed in range(4)))

    with Apart(apply_until_told, acc.shared_name) as process:
        asyncio.run(main())
        assert process.finish() == took + acc.num_accumulated()
    assert (acc.stats().taken, acc.stats().waiting) == (took, 0)


def test_ctrl_c_ends_the_program_at_once(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    program = "import asyncio, sys, shmacc; asyncio.run(shmacc.attach(sys.argv[1]).take_async(2))"
    command = [sys.executable, "-P", "-c", program, acc.shared_name]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: acc.stats().waiting > 0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG)
    assert "KeyboardInterrupt" in said
    untouched(acc, 1)


THROWN_AWAY = """
import asyncio

acc = shmacc.attach(sys.argv[1])
loop = asyncio.new_event_loop()
task = loop.create_task(acc.take_async(2))
while acc.stats().waiting == 0:
    loop.run_until_complete(asyncio.sleep(0.001))
loop.close()
print("closed", flush=True)
"""


def test_a_process_whose_loop_closed_during_a_take_still_ends(acc: Accumulator) -> None:
    acc.apply_grad(1.0)
    assert run(THROWN_AWAY, acc.shared_name)[:2] == (0, "closed")
    until(lambda: acc.stats().waiting == 0)
    untouched(acc, 1)
