"""Coroutines wait in uvloop, and in anyio's scopes, which cancel a task again until it ends."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import uvloop

from shmacc import NEVER_STALE, ConditionalAccumulator


def in_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    anyio.run(main, backend="asyncio")


def in_uvloop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    anyio.run(main, backend="asyncio", backend_options={"loop_factory": uvloop.new_event_loop})


LOOPS = pytest.mark.parametrize("run", [in_asyncio, in_uvloop])


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """Yield an accumulator of sums; the test must leave no thread."""
    before = threading.active_count()
    with ConditionalAccumulator(np.float64, (), reduction_type="SUM") as made:
        yield made
    assert threading.active_count() == before


@LOOPS
def test_takes_rounds_and_steps_are_awaited(acc: ConditionalAccumulator, run: Any) -> None:
    async def main() -> None:
        acc.apply_grad(1.0)
        assert (await acc.take_async(1)).value.item() == 1.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acc.wait_step_async, 1)
            acc.apply_grad(2.0, local_step=1)
            async with acc.round_async(1) as taken:
                await anyio.lowlevel.checkpoint()
                assert taken.value.item() == 2.0
        assert acc.global_step == 2

    run(main)


@LOOPS
def test_a_cancelled_take_or_round_consumes_nothing(acc: ConditionalAccumulator, run: Any) -> None:
    async def main() -> None:
        acc.apply_grad(1.0)
        with anyio.move_on_after(0.01) as scope:
            await acc.take_async(2)
        assert scope.cancelled_caught

        async def chief() -> None:
            with anyio.fail_after(0.01):
                async with acc.round_async(1):
                    await anyio.sleep_forever()

        with pytest.raises(TimeoutError):
            await chief()
        stats = acc.stats()
        assert (stats.num_accumulated, stats.taken, stats.waiting, stats.round_pid) == (
            1,
            0,
            0,
            None,
        )

    run(main)


@LOOPS
def test_scopes_that_end_at_any_moment_lose_nothing(acc: ConditionalAccumulator, run: Any) -> None:
    applied = took = ended = 0

    async def take(seconds: float) -> None:
        nonlocal took, ended
        with anyio.move_on_after(seconds) as scope:
            count = (await acc.take_async(2)).count
            took += count  # in one line, `took` would be read before the wait
        ended += scope.cancelled_caught

    async def main() -> None:
        nonlocal applied
        for i in range(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take, i * 2e-5)
                tasks.start_soon(take, i * 4e-5)
                for _ in range(3):
                    await asyncio.sleep(i % 7 * 2e-5)
                    applied += acc.apply_grad(1.0, local_step=NEVER_STALE)
        assert took + acc.num_accumulated() == applied
        assert ended > 0

    run(main)
