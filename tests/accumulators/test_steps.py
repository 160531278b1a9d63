"""A worker loops over the run's steps, and the loop ends with the run."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import pytest
from helpers.apart import Apart
from helpers.lock_holder import activity
from helpers.support import LONG, until

from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors

NAME: Final = "acc"


def test_a_loop_yields_the_present_step_then_each_newest(acc: ConditionalAccumulator) -> None:
    acc.advance_step(3)
    steps = acc.steps(timeout=LONG)
    assert next(steps) == 3
    acc.advance_step(5)
    acc.advance_step(9)
    assert next(steps) == 9
    acc.set_global_step(2)  # going back to an earlier step counts as a new step
    assert next(steps) == 2
    acc.finish()
    assert list(steps) == []


def test_a_finished_run_has_no_steps(acc: ConditionalAccumulator) -> None:
    acc.advance_step(3)
    acc.finish()
    assert list(acc.steps()) == asyncio.run(rest(acc.steps_async())) == []


def test_a_loop_over_steps_ends_with_the_run(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        following = pool.submit(lambda: list(acc.steps(timeout=LONG)))
        until(lambda: activity(NAME, os.getpid()) == "waits for the step")
        acc.finish()
        assert following.result(LONG) == [0]


def work(rank: int) -> list[bool]:
    with AccumulatorGroup.attach(NAME) as group:
        return [
            group.apply({"w": float(step)}, step, contributor=rank)
            for step in group.steps(timeout=LONG)
        ]


def test_several_processes_loop_over_steps() -> None:
    with (
        AccumulatorGroup({"w": TensorSpec((), "f8")}, NAME, unlink_on_close=True) as group,
        ExitStack() as stack,
    ):
        workers = [stack.enter_context(Apart(work, rank)) for rank in range(3)]
        for step in range(10):
            with group.round(3, timeout=LONG) as taken:
                assert taken["w"].value == step
                assert taken.contributors.tolist() == [0, 1, 2]
                if step == 9:
                    group.finish()
        for worker in workers:
            assert worker.result() == [True] * 10


def test_coroutines_loop_over_steps() -> None:
    async def follow(rank: int) -> list[bool]:
        with AccumulatorGroup.attach(NAME) as group:
            return [
                group.apply({"w": float(step)}, step, contributor=rank, timeout=0)
                async for step in group.steps_async(timeout=LONG)
            ]

    async def lead(group: Any) -> None:
        for step in range(5):
            async with group.round_async(2, timeout=LONG) as taken:
                assert taken["w"].value == step
                if step == 4:
                    group.finish()

    async def run(group: Any) -> Any:
        return await asyncio.gather(follow(0), follow(1), lead(group))

    with AccumulatorGroup({"w": TensorSpec((), "f8")}, NAME, unlink_on_close=True) as group:
        assert asyncio.run(run(group))[:2] == [[True] * 5, [True] * 5]


async def test_the_timeout_of_steps_holds_for_each_wait(acc: ConditionalAccumulator) -> None:
    steps = acc.steps(timeout=0.01)
    assert next(steps) == 0
    for _ in range(2):
        with pytest.raises(errors.DeadlineExceededError, match="still 0"):
            next(steps)
    acc.advance_step(1)
    assert next(steps) == 1  # the same iterator goes on

    following = acc.steps_async(timeout=0.01)
    assert await anext(following) == 1
    with pytest.raises(errors.DeadlineExceededError):
        await anext(following)
    acc.advance_step(2)
    assert await anext(following) == 2


def test_a_restored_step_is_yielded_again(acc: ConditionalAccumulator) -> None:
    """A worker must repeat a gradient that the checkpoint lacks, or it would wait for ever."""
    state = acc.state()
    steps = acc.steps(timeout=LONG)
    assert next(steps) == 0
    acc.apply_grad(1.0)
    acc.restore(state)
    assert next(steps) == 0
    assert acc.num_accumulated() == 0


def test_a_loop_that_has_ended_stays_ended_after_a_restore(acc: ConditionalAccumulator) -> None:
    """Python's iterators stay exhausted, too; after a restore, a worker needs a new loop."""
    before, steps, own = acc.state(), acc.steps(timeout=0), acc.steps_async(timeout=0)
    acc.finish()
    assert list(steps) == asyncio.run(rest(own)) == []
    acc.restore(before)
    assert list(steps) == asyncio.run(rest(own)) == []


async def rest(steps: AsyncIterator[int]) -> list[int]:
    return [step async for step in steps]


async def test_a_cancelled_wait_loses_no_step(acc: ConditionalAccumulator) -> None:
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
