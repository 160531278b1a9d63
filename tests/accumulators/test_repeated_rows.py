"""Gradients as real programs have them: ids that repeat, mostly a few frequent ones, unsorted.

The sums of repeats are compared to the bit: floating-point numbers of mixed magnitudes give another
sum in another order.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.gradients import numbers
from helpers.numpy_model import SparseModel
from helpers.support import nothing_changes, same_outcome

from shmacc import NEVER_STALE, SparseConditionalAccumulator, errors

# Widths that the loops have as constants, others, and one that is not fetched ahead to its end.
INNER: Final = (
    *((), (0,), (1,), (2,), (3,), (2, 2), (8,), (16,), (5, 5), (32,), (64,), (128,), (300,)),
)
TABLE_ROWS: Final = 500
FEW, MANY = 150, 500  # sorted by comparing, and by counting
# Between the ids: they lie together, apart, and so far apart that they need more than 32 bits.
APART: Final = (1001, 1, 2**33 + 5)
FIRST: Final = 7


def zipf_ids(count: int, seed: int, apart: int = 1) -> Any:
    """Draw ids with repeats; a frequent one lies anywhere in the table."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(TABLE_ROWS)[(rng.zipf(1.2, count) - 1) % TABLE_ROWS]
    assert np.unique(ids).size < count
    assert (np.diff(ids) < 0).any()
    return ids.astype(np.int64) * apart + FIRST * (apart > 1)


def table_rows(apart: int) -> int:
    return TABLE_ROWS * apart + FIRST * (apart > 1)


@pytest.mark.parametrize(
    ("name", "apart"), list(zip(ELEMENTS, itertools.cycle(APART), strict=False))
)
def test_repeats_are_summed_in_their_order(name: str, apart: int) -> None:
    element = ELEMENTS[name]
    for seed, inner in enumerate(INNER):
        shape = (table_rows(apart), *inner)
        model = SparseModel(element, shape, "SUM")
        with SparseConditionalAccumulator(name, shape) as acc:
            for count, kind in ((MANY, "mixed"), (FEW, "special"), (MANY, "mixed")):
                ids = zipf_ids(count, seed, apart)
                values = numbers(element, (count, *inner), kind, seed)
                model.apply_grad(ids, values, None, 0)
                assert acc.apply_grad(ids, values)
            same_outcome(acc.take_partial(3), model.take_partial(3))


@pytest.mark.parametrize(
    ("name", "reduction"),
    [("float16", "MEAN"), ("float32", "SUM"), ("complex128", "CMEAN"), ("int64", "MEAN")],
)
def test_a_row_counts_once_however_often_it_repeats(name: str, reduction: str) -> None:
    element = ELEMENTS[name]
    model = SparseModel(element, (TABLE_ROWS, 7), reduction)
    with SparseConditionalAccumulator(name, (TABLE_ROWS, 7), reduction_type=reduction) as acc:
        for seed in range(3):
            ids = zipf_ids(MANY, seed)
            values = numbers(element, (MANY, 7), "mixed", seed)
            model.apply_grad(ids, values, None, 0)
            assert acc.apply_grad(ids, values)
        same_outcome(acc.take(3), model.take(3))


@pytest.mark.parametrize("name", ["int64", "uint64"])
def test_repeats_that_overflow_change_nothing(name: str) -> None:
    with SparseConditionalAccumulator(name, (TABLE_ROWS, 3)) as acc:
        ids = zipf_ids(MANY, 0)
        values = np.ones((MANY, 3), dtype=name)
        assert acc.apply_grad(ids, values)
        [frequent, *_] = np.flatnonzero(ids == np.bincount(ids).argmax())
        values[frequent, 1] = np.iinfo(name).max
        with nothing_changes(acc), pytest.raises(errors.OutOfRangeError, match="64-bit sum"):
            acc.apply_grad(ids, values, local_step=NEVER_STALE)


@pytest.mark.parametrize(
    ("count", "apart"), [(1, 1001), (2, 2**33 + 5), (FEW, 1), (MANY, 1001), (MANY, 2**33 + 5)]
)
def test_different_ids_come_in_any_order(count: int, apart: int) -> None:
    rng = np.random.default_rng(count)
    shape = (table_rows(apart), 3)
    model = SparseModel(ELEMENTS["float32"], shape, "MEAN")
    with SparseConditionalAccumulator("float32", shape) as acc:
        for seed in range(3):
            ids = rng.permutation(TABLE_ROWS)[:count] * apart + FIRST * (apart > 1)
            values = numbers(ELEMENTS["float32"], (count, 3), "mixed", seed)
            model.apply_grad(ids, values, None, 0)
            assert acc.apply_grad(ids, values)
        same_outcome(acc.take_partial(3), model.take_partial(3))
