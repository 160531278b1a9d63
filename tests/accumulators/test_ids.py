"""Sparse gradients as in real programs: ids with gaps, empty batches, a step in the wrong place."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.gradients import numbers
from helpers.numpy_model import SparseModel
from helpers.support import nothing_changes, same_outcome

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    IndexedSlices,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    errors,
    raw_ops,
)
from shmacc._accumulators.taken import GroupPartial, SparsePartial


def partial(indices: Any, values: Any) -> SparsePartial:
    counts = np.ones(len(indices), np.int64)
    return SparsePartial(indices, values, np.array([-1, *values.shape[1:]]), counts, 1, 0)


def restored(acc: Any, indices: Any, values: Any) -> None:
    one = np.array(1)
    of_member = {
        "0.values": values, "0.indices": indices,
        "0.row_counts": np.ones(len(indices), np.int64),
        "0.shape": np.array([-1, *values.shape[1:]]), "0.count": one, "0.weight": one,
    }  # fmt: skip
    acc.restore(acc.state() | of_member | {"count": one, "weight": one})


# Ways to apply rows to a single accumulator or a group.
WAYS: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "arrays": lambda acc, ids, values: acc.apply_grad(ids, values),
    "slices": lambda acc, ids, values: acc.apply_indexed_slices_grad(IndexedSlices(values, ids)),
    "a raw op": lambda acc, ids, values: raw_ops.SparseAccumulatorApplyGradient(
        acc, 0, ids, values, [], has_known_shape=False
    ),
    "a weight": lambda acc, ids, values: acc.apply_grad(ids, values, weight=2),
    "a group": lambda acc, ids, values: acc.apply({"t": (ids, values)}, 0),
    "a group's slices": lambda acc, ids, values: acc.apply({"t": IndexedSlices(values, ids)}, 0),
}
OTHER_WAYS: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "lists": lambda acc, i, v: acc.apply_grad(i.tolist(), v.tolist() if v.size else v),
    "a wider type": lambda acc, i, v: acc.apply_grad(i, v.astype("f8")),
    "its own shape": lambda acc, i, v: acc.apply_grad(
        i, v, [*acc.shape, *v.shape[len(acc.shape) :]]
    ),
    "a partial": lambda acc, i, v: acc.apply_partial(partial(i, v)),
    "a state": restored,
    "a group's wider type": lambda acc, i, v: acc.apply({"t": (i, v.astype("f8"))}, 0),
    "a group's partial": lambda acc, i, v: acc.apply_partial(
        GroupPartial({"t": partial(i, v)}, 1, 0), 0
    ),
    "a group's state": restored,
}
every_way = pytest.mark.parametrize("way", WAYS)


def accumulator(way: str, shape: Any) -> Any:
    if way.startswith("a group"):
        return AccumulatorGroup({"t": IndexedSlicesSpec(shape)})
    return SparseConditionalAccumulator("f4", shape)


@every_way
def test_an_empty_batch_counts_whatever_its_shape(way: str) -> None:
    """`([], [])` counts as a gradient, both before and after a gradient with rows."""
    shapes: list[Any] = [(10, 2), (None, 2), (10, 2, 3), (10,)]
    nothing_said: tuple[Any, ...] = ([], (), np.array([]), np.array([], np.int32))
    for shape, empty in zip(shapes, nothing_said, strict=True):
        row = np.ones((1, *shape[1:]), np.float32)
        with accumulator(way, shape) as acc:
            assert WAYS[way](acc, empty, empty)
            assert WAYS[way](acc, [3], row)
            assert WAYS[way](acc, empty, empty)
            taken = acc.take(3)
            part = taken["t"] if isinstance(acc, AccumulatorGroup) else taken
            assert (taken.count, part.indices.tolist(), part.values.shape) == (3, [3], row.shape)


@every_way
def test_bad_ids_raise_an_error_that_says_why(way: str) -> None:
    for ids, values, said in (
        ([], [[1.0, 2.0]], "non-empty input values"),
        ([1], [], "non-empty input values"),
        ([1], np.zeros((0, 2)), "non-empty input values"),
        # The caller must leave a missing id out; it must not become row 0.
        (np.array([1, np.nan]), np.ones((2, 2)), r"indices.*leave these out"),
        ([1.0, float("nan")], np.ones((2, 2)), r"indices.*leave these out"),
        (np.ma.masked_array([1, 2], [False, True]), np.ones((2, 2)), r"indices.*leave these out"),
        ([2**63], np.ones((1, 2)), r"below 2\*\*63, but one is 922"),
        (np.array([1, 2**63], np.uint64), np.ones((2, 2)), r"below 2\*\*63, but one is 922"),
    ):
        with (
            accumulator(way, (None, 2)) as acc,
            pytest.raises(errors.InvalidArgumentError, match=said),
        ):
            WAYS[way](acc, ids, values)


def test_a_step_passed_as_the_shape_is_refused() -> None:
    """In `apply_grad(ids, values, 0)` the third argument is the gradient's shape."""
    steps: list[Any] = [0, 1, np.int64(3), np.array(2)]
    for declared in ((10, 2), (10,), None):
        values = np.ones((1, *(declared or (0, 2))[1:]), np.float32)
        with SparseConditionalAccumulator("f4", declared) as acc:
            for step in steps:
                said = f"a step is passed as local_step={step}"
                with pytest.raises(errors.InvalidArgumentError, match=said):
                    acc.apply_grad([9], values, step)


@pytest.mark.parametrize("number", [5, 1000])
def test_hashed_ids_are_sorted_by_all_their_bits(number: int) -> None:
    """Ids may be hashes, whose upper halves differ too."""
    rng = np.random.default_rng(number)
    ids = rng.integers(2**32, 2**63, number)
    ids[:2] = 7 << 33, 6 << 33 | 1
    values = np.arange(number, dtype=np.float64)
    with SparseConditionalAccumulator("float64", reduction_type="SUM") as acc:
        acc.apply_grad(ids, values)
        taken = acc.take(1)
    order = np.argsort(ids)
    np.testing.assert_array_equal(taken.indices, ids[order])
    np.testing.assert_array_equal(taken.values, values[order])


def test_a_row_is_not_confused_with_the_row_at_its_expected_place() -> None:
    """Rows 0 and 3 stand three places apart, so row 2 is expected between them, where 100 is."""
    with SparseConditionalAccumulator("float64", reduction_type="SUM") as acc:
        for ids in ([0, 1], [100], [3], [0, 2, 3]):
            acc.apply_grad(ids, [1.0] * len(ids))
        taken = acc.take(4)
    assert dict(zip(taken.indices.tolist(), taken.values.tolist(), strict=True)) == {
        0: 2, 1: 1, 2: 1, 3: 2, 100: 1
    }  # fmt: skip


# An accumulator's shape, and the shape of rows that it must refuse even in a first gradient.
WRONG: Final[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [
    ((10,), (1,)), ((10,), (1, 1)), ((10, 2), (2, 1)), ((10, 2), (2, 3)), ((10, 2, 3), (2, 3, 1)),
    ((10, 0), (0, 1)), ((0, 2), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("way", [*WAYS, *OTHER_WAYS])
def test_a_gradient_must_have_the_declared_shape(way: str) -> None:
    apply = (WAYS | OTHER_WAYS)[way]
    for declared, wrong in WRONG:
        ids = np.arange(min(2, declared[0]))
        with accumulator(way, declared) as acc:
            said = f"expected values rank {len(declared)}, got {len(wrong) + 1}"
            with pytest.raises(errors.InvalidArgumentError, match=said):
                apply(acc, ids, np.ones((len(ids), *wrong), np.float32))
            assert acc.num_accumulated() == 0
            apply(acc, ids, np.ones((len(ids), *declared[1:]), np.float32))
            assert acc.num_accumulated() == 1
    with AccumulatorGroup({"t": IndexedSlicesSpec((None, 2))}) as group:
        said = "Member 't': .*expected values rank 2, got 3"
        with pytest.raises(errors.InvalidArgumentError, match=said):
            group.apply({"t": ([1], np.ones((1, 2, 1)))}, 0)


# Some widths are constants in the loops, others are not; 300 is too wide to be prefetched whole.
INNER: Final = (
    *((), (0,), (1,), (2,), (3,), (2, 2), (8,), (16,), (5, 5), (32,), (64,), (128,), (300,)),
)


# Sums of repeats are compared bit by bit: with mixed magnitudes, another order of adding gives
# another sum.
TABLE_ROWS: Final = 500


FEW, MANY = 150, 500  # 150 ids are sorted by comparison, 500 by counting


# Distances between neighbouring ids; with the largest, ids need more than 32 bits.
APART: Final = (1001, 1, 2**33 + 5)


FIRST: Final = 7


def zipf_ids(count: int, seed: int, apart: int = 1) -> Any:
    """Draw ids with repeats; the frequent ids are spread over the table."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(TABLE_ROWS)[(rng.zipf(1.2, count) - 1) % TABLE_ROWS]
    assert np.unique(ids).size < count
    assert (np.diff(ids) < 0).any()
    return ids.astype(np.int64) * apart + FIRST * (apart > 1)


@pytest.mark.parametrize(
    ("name", "apart"), list(zip(ELEMENTS, itertools.cycle(APART), strict=False))
)
def test_repeats_are_summed_in_their_order(name: str, apart: int) -> None:
    element = ELEMENTS[name]
    for seed, inner in enumerate(INNER):
        shape = (TABLE_ROWS * apart + FIRST, *inner)
        model = SparseModel(element, shape, "SUM")
        with SparseConditionalAccumulator(name, shape) as acc:
            for count, kind in ((MANY, "mixed"), (FEW, "special"), (MANY, "mixed")):
                ids = zipf_ids(count, seed, apart)
                values = numbers(element, (count, *inner), kind, seed)
                model.apply_grad(ids, values, None, 0)
                assert acc.apply_grad(ids, values)
            same_outcome(acc.take_partial(3), model.take_partial(3))


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


def test_rows_that_overflow_the_last_bucket_are_found_in_the_first() -> None:
    """The hash key is random; the last bucket overflows in a third of small, crowded indexes."""
    ids = np.random.default_rng(3).choice(10**6, 44, replace=False)
    for _ in range(50):
        with SparseConditionalAccumulator("float32") as acc:
            for rows in (ids[:30], ids[30:], ids):
                acc.apply_grad(rows, np.ones(len(rows)))
            assert acc.take(3).row_counts.tolist() == [2] * 44
