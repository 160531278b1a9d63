"""A worker follows the run by a loop over its steps, which ends with the run."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart
from helpers.support import LONG, refused, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "steps"


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator."""
    with ConditionalAccumulator("f8", (), NAME, unlink_on_close=True) as made:
        yield made


def test_the_step_at_once_then_the_newest(acc: ConditionalAccumulator) -> None:
    acc.advance_step(3)
    steps = acc.steps(timeout=LONG)
    assert next(steps) == 3
    acc.advance_step(4)
    assert next(steps) == 4
    acc.advance_step(5)
    acc.advance_step(9)
    assert next(steps) == 9
    acc.finish()
    assert list(steps) == []
    assert list(steps) == []


def test_of_what_is_finished_there_are_none(acc: ConditionalAccumulator) -> None:
    acc.advance_step(3)
    acc.finish()
    assert list(acc.steps()) == []

    async def all_of_them() -> list[int]:
        return [step async for step in acc.steps_async()]

    assert asyncio.run(all_of_them()) == []


def test_they_end_with_the_run(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        following = pool.submit(lambda: list(acc.steps(timeout=LONG)))
        until(lambda: _waits_for_the_step(1))
        acc.finish()
        assert following.result(LONG) == [0]


def _waits_for_the_step(number: int) -> bool:
    processes = shmacc.inspection.describe(NAME).processes
    return [process.activity for process in processes].count("waits for the step") == number


def work(rank: int) -> list[bool]:
    """The loop of a worker."""
    with AccumulatorGroup.attach(NAME) as group:
        return [
            group.apply({"w": float(step)}, step, contributor=rank)
            for step in group.steps(timeout=LONG)
        ]


def test_a_run_of_several_processes() -> None:
    with AccumulatorGroup({"w": TensorSpec((), "f8")}, NAME, unlink_on_close=True) as group:
        workers = [Apart(work, rank) for rank in range(3)]
        for step in range(20):
            with group.round(3, timeout=LONG) as taken:
                assert taken["w"].value == step
                assert taken.contributors.tolist() == [0, 1, 2]
                if step == 19:
                    group.finish()
        for worker in workers:
            with worker:
                assert worker.result() == [True] * 20


async def _work_async(rank: int) -> list[bool]:
    with AccumulatorGroup.attach(NAME) as group:
        return [
            group.apply({"w": float(step)}, step, contributor=rank, timeout=0)
            async for step in group.steps_async(timeout=LONG)
        ]


def test_a_run_of_coroutines() -> None:
    async def run(group: Any) -> list[list[bool]]:
        async def lead() -> list[bool]:
            for step in range(5):
                async with group.round_async(2, timeout=LONG) as taken:
                    assert taken["w"].value == step
                    if step == 4:
                        group.finish()
            return []

        return list(await asyncio.gather(lead(), _work_async(0), _work_async(1)))

    with AccumulatorGroup({"w": TensorSpec((), "f8")}, NAME, unlink_on_close=True) as group:
        assert asyncio.run(run(group))[1:] == [[True] * 5, [True] * 5]


def test_the_timeout_is_that_of_each_wait(acc: ConditionalAccumulator) -> None:
    steps = acc.steps(timeout=0.01)
    assert next(steps) == 0
    for _ in range(2):
        with pytest.raises(errors.DeadlineExceededError, match="still 0"):
            next(steps)
    acc.advance_step(1)
    assert next(steps) == 1  # the same object waits on

    async def twice() -> None:
        following = acc.steps_async(timeout=0.01)
        assert await anext(following) == 1
        with pytest.raises(errors.DeadlineExceededError):
            await anext(following)
        acc.advance_step(2)
        assert await anext(following) == 2

    asyncio.run(twice())


def test_a_step_that_is_set_back_is_another_one(acc: ConditionalAccumulator) -> None:
    acc.advance_step(7)
    steps = acc.steps(timeout=LONG)
    assert next(steps) == 7
    acc.set_global_step(2)
    assert next(steps) == 2


def test_what_is_restored_begins_anew(acc: ConditionalAccumulator) -> None:
    """Else a worker whose gradient is not in the checkpoint would wait for a chief that does so."""
    state = acc.state()
    steps = acc.steps(timeout=LONG)
    assert next(steps) == 0
    acc.apply_grad(1.0)
    acc.restore(state)
    assert next(steps) == 0
    assert acc.num_accumulated() == 0


def test_what_has_ended_stays_so(acc: ConditionalAccumulator) -> None:
    """As of any iterator: a loop that a restore begins again is a new one."""
    before, steps, own = acc.state(), acc.steps(timeout=0), acc.steps_async(timeout=0)

    async def rest_of_own() -> list[int]:
        return [step async for step in own]

    acc.finish()
    assert list(steps) == asyncio.run(rest_of_own()) == []
    acc.restore(before)
    assert list(steps) == asyncio.run(rest_of_own()) == []


def test_a_cancelled_wait_loses_no_step(acc: ConditionalAccumulator) -> None:
    async def follow() -> None:
        steps = acc.steps_async()
        assert await anext(steps) == 0
        for step in range(1, 20):
            waiting = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            acc.advance_step(step)
            assert await anext(steps) == step

    asyncio.run(follow())


def test_a_signal_handler_that_raises_loses_no_step(acc: ConditionalAccumulator) -> None:
    class AlarmError(Exception):
        pass

    def alarm(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        steps = acc.steps()
        assert next(steps) == 0
        for step in range(1, 5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(AlarmError):
                next(steps)
            acc.advance_step(step)
            assert next(steps) == step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_the_wait(acc: ConditionalAccumulator) -> None:
    own = ConditionalAccumulator.attach(NAME)
    steps = own.steps()
    assert next(steps) == 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, steps)
        until(lambda: _waits_for_the_step(1))
        own.close()
        with pytest.raises(errors.CancelledError):
            waiting.result(LONG)
    assert acc.running


@pytest.mark.parametrize("bad", [{"timeout": -1}, {"timeout": "x"}, {"on_death": "ignore"}])
def test_bad_arguments_are_refused_at_once(acc: ConditionalAccumulator, bad: Any) -> None:
    with refused():
        acc.steps(**bad)
    with refused():
        acc.steps_async(**bad)
