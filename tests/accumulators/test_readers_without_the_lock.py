"""Who reads without the lock sees one commit whole, however many are made meanwhile.

All of it happens among threads of one process, so that `make tsan` sees every word that they share.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import process_work
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.threads

ROUNDS: Final = 40
MOST: Final = np.iinfo(np.int64).max


def add_rows(acc: Any, number: int) -> None:
    """Rows that are there and rows that are new: the undo log grows, by a commit of its own."""
    rows = np.arange(number % 7, 40 * (number % ROUNDS + 1), 3)
    acc.apply_grad(rows, np.ones((len(rows), 2), np.int64), shmacc.NEVER_STALE)


def overflow(acc: Any, _number: int) -> None:
    """Change rows in place, then give up and put them back: a commit of another kind."""
    rows = np.arange(10**6, 10**6 + 8)  # nobody else's
    values = np.ones((8, 2), np.int64)
    for last in (1, MOST):  # does not overflow if there was a take in between
        values[-1] = last
        with contextlib.suppress(errors.OutOfRangeError):
            acc.apply_grad(rows, values, shmacc.NEVER_STALE)


def add_array(acc: Any, number: int) -> None:
    """Dense arrays, of another shape in each round."""
    try:
        acc.apply_grad(np.ones(number % 5 + 1, np.int64), shmacc.NEVER_STALE)
    except errors.InvalidArgumentError:  # of another shape than this round's first
        assert acc.num_accumulated() >= 0


def empty(acc: Any, number: int) -> None:
    """Take all, or throw it away."""
    if number % 3:
        with contextlib.suppress(errors.CancelledError):
            acc.take_partial(0)
    else:
        acc.advance_step(acc.global_step + 1)


def look(acc: Any, _number: int) -> None:
    """Hold what is seen against itself: numbers of two commits do not fit each other."""
    stats = acc.stats()
    assert stats.applied == stats.taken + stats.discarded + stats.num_accumulated
    assert stats.recoveries == 0
    step = acc.global_step
    try:
        assert acc.wait_step(step, timeout=0.001) > step
    except errors.DeadlineExceededError:
        assert acc.global_step >= step


def describe(acc: Any, _number: int) -> None:
    """Look from outside: participants, waiting takes, the round's shape, rows."""
    seen = inspection.describe(acc.shared_name)
    assert seen.stats.num_accumulated >= 0
    inspection.check(acc.shared_name)


def wait_a_little(acc: Any, number: int) -> None:
    """Wait in the queue, and leave it without anything."""
    with pytest.raises((errors.DeadlineExceededError, errors.CancelledError)):
        acc.take_partial(10**9, timeout=0.001)
    if number % 4 == 0:
        acc.cancel()


def open_and_close(acc: Any, _number: int) -> None:
    """Use a handle of one's own, closed by somebody else."""
    handle = process_work.attached(acc.shared_name)
    closing = threading.Thread(target=handle.close)
    closing.start()
    with contextlib.suppress(errors.FailedPreconditionError):
        assert handle.num_accumulated() >= 0
    closing.join()


ANY: Final = (empty, look, look, describe, wait_a_little, open_and_close)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (SparseConditionalAccumulator, (add_rows, add_rows, overflow)),
        (ConditionalAccumulator, (add_array, add_array)),
    ],
)
def test_rounds_are_seen_whole(kind: Any, parts: tuple[Any, ...]) -> None:
    parts += ANY
    together = threading.Barrier(len(parts))

    def play(part: Callable[[Any, int], None]) -> None:
        together.wait(LONG)
        for number in range(ROUNDS):
            part(acc, number)

    with (
        kind("int64", shared_name="seen", reduction_type="SUM") as acc,
        ThreadPoolExecutor(len(parts)) as pool,
    ):
        for played in [pool.submit(play, part) for part in parts]:
            played.result()
        acc.unlink()
