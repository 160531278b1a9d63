"""Row numbers that an attacker chose to collide cost no more than others."""

import time
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from shmacc import SparseConditionalAccumulator, inspection
from shmacc._base.array_types import IndexArray

ROWS: Final = 10_000
MUCH: Final = 10  # times the cost of ordinary rows; rows of one bucket cost a hundred times
_U64: Final = (1 << 64) - 1
_HALF = np.uint64(32)  # bits
_LOWER_HALF = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def cost(acc: SparseConditionalAccumulator, rows: IndexArray, rounds: int = 5) -> float:
    """Return the processor seconds to add the rows, then to find every second row."""
    values = np.ones((rows.size, 1), np.float32)
    found = []
    for _ in range(rounds):
        begin = time.thread_time()
        assert acc.apply_grad(rows, values, local_step=acc.global_step)
        assert acc.apply_grad(rows[::2], values[::2], local_step=acc.global_step)
        found.append(time.thread_time() - begin)
        acc.take_grad(2)
    return min(found)


def hash_rows(rows: IndexArray, key: list[int]) -> npt.NDArray[np.uint64]:
    """Hash row numbers like row_index.hpp: ``factor * row + addend`` modulo ``2**128``, mixed.

    The product is computed in digits of 32 bits, so that no product or sum of the lower 64 bits
    wraps around. The upper 64 bits are returned; their overflow is lost, as it should be.
    """
    factor, factor_low, addend, addend_low = map(np.uint64, key)
    row = rows.astype(np.uint64)
    low, high = row & _LOWER_HALF, row >> _HALF
    first, second = factor_low & _LOWER_HALF, factor_low >> _HALF
    column = first * low + (addend_low & _LOWER_HALF)
    column = second * low + (column >> _HALF)
    other = first * high + (column & _LOWER_HALF) + (addend_low >> _HALF)
    upper = factor * row + second * high + (column >> _HALF) + (other >> _HALF) + addend
    mixed: npt.NDArray[np.uint64] = (upper ^ (upper >> _HALF)) * _MIX
    return mixed


def random_rows(count: int = ROWS) -> IndexArray:
    """Return distinct random rows in ascending order."""
    return np.sort(np.random.default_rng(1).integers(0, 2**63, count, np.int64))


def test_rows_that_collide_in_one_segment_do_not_collide_in_another() -> None:
    with (
        SparseConditionalAccumulator("f4", (None, 1)) as known,
        SparseConditionalAccumulator("f4", (None, 1)) as secret,
    ):
        # An attacker who may read the segment knows the key of its hash.
        key = known._handle.config()["hash_key"]
        assert key != secret._handle.config()["hash_key"]
        # Choose the rows whose home is in the first hundredth of the index.
        rows = random_rows(100 * ROWS)
        flood = np.sort(rows[np.argsort(hash_rows(rows, key))[:ROWS]])
        ordinary = cost(secret, random_rows())
        assert cost(known, flood, 1) > MUCH * ordinary  # this attack works: see docs/hazards.md
        assert cost(secret, flood) < MUCH * ordinary


RUNS = {
    "3 * 2**20 apart": np.arange(3000) * (3 << 20),
    "in squares": (np.arange(3000) // 50 << 32) + np.arange(3000) % 50,
    "in squares, far apart": (np.arange(3000) // 50 << 40) + (np.arange(3000) % 50 << 16),
} | {f"2**{bits} apart": np.arange(3000) << bits for bits in (0, 1, 8, 16, 31, 32, 48)}


def overflow(rows: IndexArray, key: list[int]) -> int:
    """Return how many rows do not fit into their bucket of ten, at the load of a new index."""
    buckets = np.uint64(rows.size * 10 // 72 + 1)
    homes = (hash_rows(rows, key) >> np.uint64(32)) * buckets >> np.uint64(32)
    return int(np.maximum(np.bincount(homes.astype(np.int64)) - 10, 0).sum())


@pytest.mark.parametrize("rows", RUNS.values(), ids=RUNS.keys())
def test_rows_in_regular_steps_are_spread_like_random_ones(rows: IndexArray) -> None:
    drawn = np.random.default_rng(2)
    keys = [[int(word) for word in drawn.integers(0, _U64, 4, np.uint64)] for _ in range(100)]
    found = [overflow(rows, key) for key in keys]
    random = [overflow(random_rows(3000), key) for key in keys]
    assert np.mean(found) < 1.1 * np.mean(random)
    assert max(found) < 2 * max(random)


def test_check_finds_every_row_through_the_index() -> None:
    rows = np.concatenate([*RUNS.values(), random_rows(30_000)])
    with SparseConditionalAccumulator("f4", (None, 1), "checked", unlink_on_close=True) as acc:
        for part in np.array_split(rows, 3):
            assert acc.apply_grad(part, np.ones((part.size, 1), np.float32))
        assert inspection.check("checked") == ()
