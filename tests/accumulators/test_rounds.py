"""A round lends its gradients to a block, and the end of the block consumes them."""

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activity
from helpers.support import LONG, until

from shmacc import NEVER_STALE, ConditionalAccumulator, errors

pytestmark = pytest.mark.threads


def test_the_step_moves_on_when_the_block_ends(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    assert (acc.stats().round_pid, acc.stats().round_since) == (None, None)
    before = time.time()
    with acc.round(2) as taken:
        assert (taken.value.item(), taken.count, taken.step) == (3.0, 2, 0)
        assert acc.global_step == 0
        assert acc.num_accumulated() == 2
        acc.cancel()  # does not end the round
        stats = acc.stats()
        assert stats.round_pid == os.getpid()
        assert stats.round_since is not None
        assert before - 1 < stats.round_since <= time.time()
    stats = acc.stats()
    assert (stats.global_step, stats.num_accumulated, stats.taken, stats.takes) == (1, 0, 2, 1)
    assert (stats.round_pid, stats.round_since) == (None, None)
    assert acc.apply_grad(4.0, local_step=1)
    with acc.round(1) as taken:
        assert (taken.value.item(), taken.step) == (4.0, 1)


def test_the_step_is_sealed_in_the_block(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    block = acc.round(1)
    with block:
        assert not acc.apply_grad(2.0, local_step=0)
        assert acc.advance_step(0) == 0  # an old step does not end the round
        assert not acc.apply_grad(2.0)
        assert acc.stats().dropped == 2
    assert acc.apply_grad(4.0, local_step=1)
    assert acc.take(1, timeout=0).value.item() == 4.0
    with pytest.raises(errors.FailedPreconditionError, match="entered"):
        block.__enter__()


@pytest.mark.parametrize("step", [1, NEVER_STALE])
def test_applies_of_later_steps_wait_for_the_end(acc: ConditionalAccumulator, step: int) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool:
        with acc.round(1):
            later = pool.submit(acc.apply_grad, 2.0, step)
            until(lambda: activity("acc", os.getpid()) != "idle")
            assert not later.done()
            assert acc.num_accumulated() == 1
        assert later.result(LONG) is True
    assert acc.take(1, timeout=0).value.item() == 2.0


def test_applies_that_waited_are_checked_against_the_new_step(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool, pytest.raises(errors.FailedPreconditionError), acc.round(1):
        late = pool.submit(acc.apply_grad, 2.0, 1)
        until(lambda: activity("acc", os.getpid()) != "idle")
        acc.set_global_step(5)
        assert late.result(LONG) is False


def test_an_exception_in_the_block_consumes_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(ZeroDivisionError), acc.round(1):
        raise ZeroDivisionError
    assert (acc.global_step, acc.num_accumulated()) == (0, 1)
    assert acc.apply_grad(2.0)
    with acc.round(2) as taken:
        assert taken.value.item() == 3.0


def test_a_round_that_times_out_holds_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(errors.DeadlineExceededError, match="1 of the 2"), acc.round(2, timeout=0):
        raise AssertionError
    assert acc.apply_grad(2.0)
    assert acc.take(2, timeout=0).count == 2


def test_takes_and_rounds_inside_a_rounds_block_are_refused(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with acc.round(1):
        for again in (
            lambda: acc.round(1).__enter__(),
            lambda: acc.take(1),
            lambda: acc.take_grad(1),
            lambda: acc.take_partial(0),
        ):
            with pytest.raises(errors.FailedPreconditionError, match="open"):
                again()
        with ConditionalAccumulator.attach("acc") as other:
            for handle in (acc, other):
                with pytest.raises(errors.FailedPreconditionError, match="round"):
                    handle.unseal()
    assert acc.global_step == 1


def test_other_takes_wait_until_the_block_ends(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ConditionalAccumulator.attach("acc") as other, ThreadPoolExecutor() as pool:
        with acc.round(1):
            with pytest.raises(errors.DeadlineExceededError):
                other.take(1, timeout=0)
            with pytest.raises(errors.DeadlineExceededError):
                other.take_partial(1, timeout=0.01)
            waiting = pool.submit(acc.take, 1)
            until(lambda: acc.stats().waiting == 1)
        assert not waiting.done()
        acc.apply_grad(2.0, local_step=1)
        assert waiting.result(LONG).value.item() == 2.0


def test_a_new_thread_does_not_get_an_ended_threads_round(acc: ConditionalAccumulator) -> None:
    """An ended thread's round does not belong to a new thread with the same thread id."""
    acc.apply_grad(1.0)
    block = acc.round(1)
    with ThreadPoolExecutor() as pool:
        pool.submit(block.__enter__).result(LONG)

    def wait() -> None:
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(1, timeout=0)
        with pytest.raises(errors.DeadlineExceededError):
            acc.apply_grad(1.0, 5, timeout=0)

    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            pool.submit(wait).result(LONG)
    block.__exit__(None, None, None)
    assert (acc.global_step, acc.num_accumulated()) == (1, 0)


def test_the_next_take_gets_a_round_that_was_given_up(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool:
        with pytest.raises(ZeroDivisionError), acc.round(1):
            waiting = pool.submit(acc.take, 1)
            until(lambda: acc.stats().waiting == 1)
            raise ZeroDivisionError
        assert waiting.result(LONG).value.item() == 1.0


def test_a_cancelled_wait_holds_no_round(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: acc.round(1).__enter__())
        until(lambda: acc.stats().waiting == 1)
        acc.cancel()
        with pytest.raises(errors.CancelledError):
            waiting.result(LONG)
    assert acc.apply_grad(1.0)


@pytest.mark.parametrize(("step", "left"), [("advance_step", 0), ("set_global_step", 1)])
def test_a_new_step_ends_the_round(acc: ConditionalAccumulator, step: str, left: int) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(errors.FailedPreconditionError, match="ended"), acc.round(1):
        getattr(acc, step)(7)
        assert acc.num_accumulated() == left
        assert acc.apply_grad(2.0, local_step=7)
    assert (acc.global_step, acc.num_accumulated()) == (7, left + 1)
    assert acc.stats().taken == 0
    with pytest.raises(ZeroDivisionError), acc.round(1):
        getattr(acc, step)(8)
        raise ZeroDivisionError  # reaches the caller
    assert acc.global_step == 8


def test_a_round_that_ended_does_not_end_the_next_one(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ConditionalAccumulator.attach("acc") as other:
        first, second = acc.round(1), other.round(1)
        first.__enter__()
        acc.set_global_step(3)
        with second:
            with pytest.raises(errors.FailedPreconditionError):
                first.__exit__(None, None, None)
            assert acc.stats().round_pid is not None
    assert acc.global_step == 4


def test_closing_in_the_block_gives_the_round_up(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with (
        pytest.raises(errors.FailedPreconditionError, match="closed"),
        ConditionalAccumulator.attach("acc") as other,
        other.round(1),
    ):
        other.close()
        assert acc.apply_grad(2.0)
    assert acc.take(2, timeout=0).value.item() == 3.0


def test_dropping_an_entered_round_gives_it_up(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    block = acc.round(1)
    block.__enter__()
    del block
    assert acc.take(1, timeout=0).value.item() == 1.0


def apply_when_told(name: str, *, pipe: Pipe) -> None:
    with ConditionalAccumulator.attach(name) as own:
        while pipe.hear() == "apply":
            own.apply_grad(1.0, NEVER_STALE)


@pytest.mark.parametrize("waits", ["thread", "coroutine"])
def test_a_close_before_the_waiting_thread_wakes_leaves_no_round_open(
    acc: ConditionalAccumulator, waits: str
) -> None:
    def chief(own: ConditionalAccumulator) -> None:
        with own.round(1):
            pass

    async def coroutine(own: ConditionalAccumulator) -> None:
        async with own.round_async(1):
            pass

    def closed_while_a_round_begins() -> bool:
        """Return False if the waiting thread was first: its block ended before the close."""
        other = ConditionalAccumulator.attach(acc.shared_name)
        ended = executor.submit(
            lambda: chief(other) if waits == "thread" else asyncio.run(coroutine(other))
        )
        until(lambda: acc.stats().waiting > 0)
        sys.setswitchinterval(LONG)  # the thread commits without the GIL, and then cannot get it
        try:
            worker.say("apply")
            since = time.monotonic()
            while acc.stats().round_pid is None and not ended.done():
                if time.monotonic() > since + 0.1:  # the thread needs the GIL before the commit
                    time.sleep(0)
                    since = time.monotonic()
            other.close()
        finally:
            sys.setswitchinterval(interval)
        failure = ended.exception()
        assert failure is None or isinstance(failure, errors.FailedPreconditionError), failure
        return failure is not None

    interval = sys.getswitchinterval()
    with Apart(apply_when_told, acc.shared_name) as worker, ThreadPoolExecutor(1) as executor:
        until(closed_while_a_round_begins)
        worker.finish("end")
    assert acc.stats().round_pid is None
    assert acc.take(1, timeout=0).count == 1
