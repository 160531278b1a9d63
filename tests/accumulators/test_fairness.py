"""Processes that apply to one accumulator as fast as they can all get their turn.

An apply in a loop gives the lock back and wants it again within microseconds; who sleeps for it
takes longer than that to wake up. Left to chance, the first would go on for seconds.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.support import LONG

import shmacc
from shmacc import NEVER_STALE, SparseConditionalAccumulator

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier, Event

NAME = "fair"
ROWS = 10_000  # so many that a turn is longer than anybody looks for a token without sleeping
TURNS = 1_500
FORK = multiprocessing.get_context("fork")


def _apply(number: int, begin: Barrier, end: Event, done: list[int]) -> None:
    acc = shmacc.attach(NAME)
    assert isinstance(acc, SparseConditionalAccumulator)
    indices, values = np.arange(ROWS), np.ones((ROWS, 64), np.float32)
    begin.wait(LONG)
    while not end.is_set():
        assert acc.apply_grad(indices, values, local_step=NEVER_STALE)
        done[number] += 1
        if done[number] >= TURNS:
            end.set()


@pytest.mark.parametrize("processes", [2, 4])
def test_nobody_is_passed_over_for_long(processes: int) -> None:
    begin, end = FORK.Barrier(processes), FORK.Event()
    done = FORK.RawArray("q", processes)
    with SparseConditionalAccumulator("float32", (ROWS, 64), NAME, reduction_type="SUM") as acc:
        workers = [
            FORK.Process(target=_apply, args=(number, begin, end, done))
            for number in range(processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LONG)
            assert worker.exitcode == 0
        counts = list(done)
        acc.unlink()
        assert acc.stats().num_accumulated == sum(counts)
        assert min(counts) > max(counts) / 10
