"""Each death ends one wait of a take; at a take's timeout, `at_least` gradients are enough."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pytest
from helpers import departures
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator, errors

pytestmark = pytest.mark.threads

NAME: Final = "acc"
SHORT: Final = 0.05


@pytest.fixture(params=[1, 2])
def lanes(request: pytest.FixtureRequest) -> Any:
    return request.param


worker = partial(departures.worker, name=NAME)


def test_a_death_before_the_take_ends_its_wait(acc: ConditionalAccumulator) -> None:
    with worker(7) as dead:
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(2, timeout=LONG, on_death="raise")
        error = caught.value
        assert (tuple(error.pids or ()), tuple(error.contributors or ())) == ((dead.pid,), (7,))
        assert str(dead.pid) in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (again.pids, again.contributors) == (error.pids, error.contributors)
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)
    # Each death is reported once, so the next take waits.
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=SHORT, on_death="raise")
    assert acc.take(1, timeout=0).contributors.tolist() == [7]


def test_a_death_is_reported_once_by_check_departures_or_take(acc: ConditionalAccumulator) -> None:
    with worker(7) as dead, worker(8):
        acc._handle.check_departures()
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc._handle.check_departures()
        error = caught.value
        assert (tuple(error.pids or ()), tuple(error.contributors or ())) == ((dead.pid,), (7,))
        acc._handle.check_departures()
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(3, timeout=SHORT, on_death="raise")
    assert acc.take(2, timeout=0).contributors.tolist() == [7, 8]


@pytest.mark.parametrize("how", ["take", "round"])
def test_a_death_during_a_wait_ends_the_wait(acc: ConditionalAccumulator, how: str) -> None:
    def wait() -> Any:
        if how == "take":
            return acc.take(3, timeout=LONG, on_death="raise")
        with acc.round(3, timeout=LONG, on_death="raise") as taken:
            return taken

    with worker(1) as dead, worker(2), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        until(lambda: acc.stats().waiting == 1)
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            waiting.result(LONG)
        assert tuple(caught.value.pids or ()) == (dead.pid,)
        assert acc.stats().waiting == 0
        assert acc.take(2, timeout=0).count == 2


def test_a_take_without_on_death_waits_until_its_timeout(acc: ConditionalAccumulator) -> None:
    with worker() as dead:
        dead.kill()
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=SHORT)
    with pytest.raises(errors.DeadlineExceededError):
        acc.take_partial(2, timeout=SHORT)
    assert acc.take(1, timeout=0).count == 1


def test_a_take_with_enough_gradients_returns_after_a_death(acc: ConditionalAccumulator) -> None:
    with worker(1) as dead:
        dead.kill()
        assert acc.take(1, timeout=LONG, on_death="raise").count == 1
        acc.apply_grad(1.0, acc.global_step)
        with acc.round(1, timeout=LONG, on_death="raise") as taken:
            assert taken.count == 1


def test_a_death_of_a_process_that_never_applied_ends_no_wait(acc: ConditionalAccumulator) -> None:
    with departures.bystander(NAME) as dead:
        dead.kill()
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(1, timeout=SHORT, on_death="raise")


def test_a_death_ends_only_one_of_two_waits(acc: ConditionalAccumulator) -> None:
    def wait() -> Any:
        try:
            return acc.take(3, timeout=LONG, on_death="raise").count
        except errors.WorkerDiedError as error:
            return tuple(error.pids or ())

    with worker() as dead, ThreadPoolExecutor() as pool:
        waits = [pool.submit(wait) for _ in range(2)]
        until(lambda: acc.stats().waiting == 2)
        dead.kill()
        until(lambda: any(waiting.done() for waiting in waits))
        told = [waiting.result() for waiting in waits if waiting.done()]
        assert told == [(dead.pid,)]
        for _ in range(2):
            acc.apply_grad(1.0)
        assert sorted(waiting.result(LONG) == 3 for waiting in waits) == [False, True]


# With at_least, a take accepts fewer gradients when its timeout ends.


def test_at_its_timeout_a_take_accepts_at_least_gradients(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    start = time.monotonic()
    taken = acc.take(3, at_least=2, timeout=SHORT)
    assert time.monotonic() - start >= SHORT
    assert (taken.count, taken.value.item()) == (2, 3.0)
    assert acc.global_step == 1


def test_a_take_with_less_than_at_least_consumes_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    for at_least in 2, None:  # None means the required number
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(3, at_least=at_least, timeout=SHORT)
        assert (caught.value.accumulated, caught.value.required) == (1, 3)
    assert acc.num_accumulated() == 1


@pytest.mark.parametrize("timeout", [LONG, None])
def test_a_complete_round_ends_the_wait(acc: ConditionalAccumulator, timeout: float | None) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(acc.take, 2, at_least=1, timeout=timeout)
        until(lambda: acc.stats().waiting == 1)
        acc.apply_grad(1.0)
        assert not waiting.done()
        acc.apply_grad(2.0)
        assert waiting.result(LONG).count == 2


def test_with_a_timeout_of_0_at_least_is_enough_at_once(acc: ConditionalAccumulator) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(5, at_least=1, timeout=0)
    acc.apply_grad(1.0)
    assert acc.take(5, at_least=1, timeout=0).count == 1


async def test_rounds_and_coroutines_accept_at_least_gradients(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with acc.round(3, at_least=1, timeout=SHORT) as taken:
        assert taken.count == 1
    acc.apply_grad(1.0, 1)

    assert (await acc.take_async(3, at_least=1, timeout=SHORT)).count == 1
    acc.apply_grad(1.0, 2)
    async with acc.round_async(3, at_least=1, timeout=SHORT) as taken:
        assert taken.count == 1
    with pytest.raises(errors.DeadlineExceededError):
        await acc.take_async(3, at_least=1, timeout=SHORT)
    assert acc.global_step == 3


def test_a_take_not_at_the_head_of_the_queue_gets_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(acc.take, 2, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(2, at_least=1, timeout=SHORT)
        acc.apply_grad(1.0)
        assert first.result(LONG).count == 2


def test_at_its_timeout_a_large_round_is_taken_whole() -> None:
    """A large round is copied before the commit, which is a code path of its own."""
    with ConditionalAccumulator("f8", (1 << 18,)) as acc:
        acc.apply_grad(range(1 << 18))
        taken = acc.take(2, at_least=1, timeout=SHORT)
        assert taken.count == 1
        assert taken.value[-1] == (1 << 18) - 1


def test_a_death_ends_a_wait_but_no_take_that_has_enough_at_its_timeout(
    acc: ConditionalAccumulator,
) -> None:
    """Before the timeout a death raises; at the timeout, `at_least` gradients are taken."""
    with worker() as dead:
        dead.kill()
        with pytest.raises(errors.WorkerDiedError):
            acc.take(3, at_least=1, timeout=LONG, on_death="raise")
    assert acc.take(3, at_least=1, timeout=SHORT, on_death="raise").count == 1
    with worker() as dead:
        dead.kill()
        assert acc.take(3, at_least=1, timeout=0, on_death="raise").count == 1
