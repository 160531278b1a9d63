"""At the end of a timeout fewer gradients may be enough."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart, Pipe
from helpers.support import LONG, refused, until

from shmacc import ConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "enough"
SHORT: Final = 0.05


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def acc(request: pytest.FixtureRequest) -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator(
        "f8", (), NAME, reduction_type="SUM", lanes=request.param, unlink_on_close=True
    ) as made:
        yield made


def test_at_the_end_of_the_timeout_so_many_are_enough(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    start = time.monotonic()
    taken = acc.take(3, at_least=2, timeout=SHORT)
    assert time.monotonic() - start >= SHORT
    assert (taken.count, taken.value.item()) == (2, 3.0)
    assert acc.global_step == 1


def test_fewer_are_not(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(errors.DeadlineExceededError) as caught:
        acc.take(3, at_least=2, timeout=SHORT)
    assert (caught.value.accumulated, caught.value.required) == (1, 3)
    assert acc.num_accumulated() == 1


def test_all_are_served_at_once(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    assert acc.take(2, at_least=1, timeout=LONG).count == 2


def test_all_end_the_wait(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(acc.take, 2, at_least=1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        acc.apply_grad(1.0)
        assert not waiting.done()
        acc.apply_grad(2.0)
        assert waiting.result(LONG).count == 2


def test_a_try_is_judged_at_once(acc: ConditionalAccumulator) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(5, at_least=1, timeout=0)
    acc.apply_grad(1.0)
    assert acc.take(5, at_least=1, timeout=0).count == 1


def test_of_a_round_and_of_coroutines(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with acc.round(3, at_least=1, timeout=SHORT) as taken:
        assert taken.count == 1
    acc.apply_grad(1.0, 1)

    async def take() -> None:
        assert (await acc.take_async(3, at_least=1, timeout=SHORT)).count == 1
        acc.apply_grad(1.0, 2)
        async with acc.round_async(3, at_least=1, timeout=SHORT) as taken:
            assert taken.count == 1
        with pytest.raises(errors.DeadlineExceededError):
            await acc.take_async(3, at_least=1, timeout=SHORT)

    asyncio.run(take())
    assert acc.global_step == 3


def test_who_is_not_the_head_gets_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(acc.take, 2, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(2, at_least=1, timeout=SHORT)
        acc.apply_grad(1.0)
        assert first.result(LONG).count == 2


def test_without_a_timeout_all_are_waited_for(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(acc.take, 2, at_least=1)
        until(lambda: acc.stats().waiting == 1)
        acc.apply_grad(1.0)
        assert waiting.result(LONG).count == 2


def test_a_large_round_is_served_whole() -> None:
    """The copy of a large round is made before the commit: see Take::take."""
    with ConditionalAccumulator("f8", (1 << 18,)) as acc:
        acc.apply_grad(range(1 << 18))
        taken = acc.take(2, at_least=1, timeout=SHORT)
        assert taken.count == 1
        assert taken.value[-1] == (1 << 18) - 1


def work(*, pipe: Pipe) -> None:
    """Apply, and stay."""
    with ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0)
        pipe.say()
        pipe.hear()


def test_a_death_comes_before_the_timeout(acc: ConditionalAccumulator) -> None:
    with Apart(work) as process:
        process.hear()
        process.kill()
        with pytest.raises(errors.WorkerDiedError):
            acc.take(3, at_least=1, timeout=LONG, on_death="raise")
    assert acc.take(3, at_least=1, timeout=SHORT, on_death="raise").count == 1


def test_what_is_enough_comes_before_a_death(acc: ConditionalAccumulator) -> None:
    with Apart(work) as process:
        process.hear()
        process.kill()
        assert acc.take(3, at_least=1, timeout=0, on_death="raise").count == 1


@pytest.mark.parametrize("bad", [0, -1, 4, 1.5, True, "2", None.__class__])
def test_what_is_no_such_number(acc: ConditionalAccumulator, bad: Any) -> None:
    with refused():
        acc.take(3, at_least=bad, timeout=0)
    with refused():
        acc.round(3, at_least=bad, timeout=0)


def test_none_is_the_number_itself(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, at_least=None, timeout=0)


def test_messages_say_what_was_dropped(acc: ConditionalAccumulator) -> None:
    acc.advance_step(2)
    for _ in range(3):
        assert not acc.apply_grad(1.0, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(acc.take, 2, timeout=0.5)
        until(lambda: acc.stats().waiting == 1)
        assert not acc.apply_grad(1.0, 0)
        with pytest.raises(errors.DeadlineExceededError) as caught:
            waiting.result(LONG)
    text = "1 were dropped during this wait, and 4 since the last take"
    assert text in str(caught.value)
    assert caught.value.dropped == 1
    acc.apply_grad(1.0, 2)
    acc.take(1)
    assert not acc.apply_grad(1.0, 2)
    for wait in (
        lambda: acc.take(1, timeout=0),
        lambda: acc.round(1, timeout=0).__enter__(),
        lambda: acc.wait_step(3, timeout=0),
        lambda: [None for _ in acc.steps(timeout=0)],
    ):
        with pytest.raises(errors.DeadlineExceededError, match="and 1 since the last take"):
            wait()
