"""Ids and batches as programs have them: with gaps, of none, and a step where a shape belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from shmacc import (
    AccumulatorGroup,
    IndexedSlices,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    errors,
    raw_ops,
)

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS: Final[dict[str, Callable[[Any, Any, Any], bool]]] = {
    "an accumulator": lambda acc, ids, values: acc.apply_grad(ids, values),
    "slices": lambda acc, ids, values: acc.apply_indexed_slices_grad(IndexedSlices(values, ids)),
    "a raw op": lambda acc, ids, values: raw_ops.SparseAccumulatorApplyGradient(
        acc, 0, ids, values, [], has_known_shape=False
    ),
    "a weight": lambda acc, ids, values: acc.apply_grad(ids, values, weight=2),
    "a group": lambda acc, ids, values: acc.apply({"t": (ids, values)}, 0),
}


def accumulator(way: str, shape: Any) -> Any:
    if way == "a group":
        return AccumulatorGroup({"t": IndexedSlicesSpec(shape)})
    return SparseConditionalAccumulator("f4", shape)


EMPTY: Final[dict[str, tuple[Any, Any]]] = {
    "lists": ([], []),
    "tuples": ((), ()),
    "arrays of nothing said": (np.array([]), np.array([])),
    "arrays": (np.array([], np.int32), np.array([], np.float32)),
}


@pytest.mark.parametrize("shape", [(10, 2), (None, 2), (10, 2, 3), (10,)], ids=str)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("way", WAYS)
def test_an_empty_batch_has_no_shape_to_be_wrong(way: str, empty: str, shape: Any) -> None:
    """`([], [])` counts as a gradient, before other ones and after them."""
    row = np.ones((1, *shape[1:]), np.float32)
    with accumulator(way, shape) as acc:
        assert WAYS[way](acc, *EMPTY[empty])
        assert WAYS[way](acc, [3], row)
        assert WAYS[way](acc, *EMPTY[empty])
        taken = acc.take(3)
        part = taken["t"] if way == "a group" else taken
        assert (taken.count, part.indices.tolist(), part.values.shape) == (3, [3], row.shape)


@pytest.mark.parametrize("way", WAYS)
def test_values_without_ids_are_no_empty_batch(way: str) -> None:
    with accumulator(way, (10, 2)) as acc:
        for ids, values in ([], [[1.0, 2.0]]), ([1], []), ([1], np.zeros((0, 2))):
            with pytest.raises(errors.InvalidArgumentError, match="non-empty input values"):
                WAYS[way](acc, ids, values)


MISSING: Final[dict[str, Any]] = {
    "NaN": np.array([1, np.nan]),
    "NaN in a list": [1.0, float("nan")],
    "a mask": np.ma.masked_array([1, 2], [False, True]),
}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("way", WAYS)
def test_a_missing_id_is_left_out_and_not_filled_with_row_0(way: str, missing: str) -> None:
    with accumulator(way, (10, 1)) as acc:
        with pytest.raises(
            errors.InvalidArgumentError, match=r"indices.*leave these out"
        ) as raised:
            WAYS[way](acc, MISSING[missing], np.ones((2, 1)))
        assert "fill" not in str(raised.value)


@pytest.mark.parametrize("ids", [[2**63], np.array([1, 2**63], np.uint64)], ids=["list", "uint64"])
@pytest.mark.parametrize("way", WAYS)
def test_an_id_from_2_to_the_63_on_is_told_the_bound(way: str, ids: Any) -> None:
    with (
        accumulator(way, None) as acc,
        pytest.raises(errors.InvalidArgumentError, match=r"below 2\*\*63, but one is 922337203685"),
    ):
        WAYS[way](acc, ids, np.ones((len(ids), 1)))


@pytest.mark.parametrize("step", [0, 1, np.int64(3), np.array(2)], ids=repr)
@pytest.mark.parametrize("declared", [(10, 2), (10,), None], ids=str)
def test_a_step_in_the_place_of_the_shape(declared: Any, step: Any) -> None:
    """`apply_grad(ids, values, 0)`: the third argument is the gradient's shape."""
    values = np.ones((1, *(declared or (0, 2))[1:]), np.float32)
    with (
        SparseConditionalAccumulator("f4", declared) as acc,
        pytest.raises(errors.InvalidArgumentError, match=f"a step is passed as local_step={step}"),
    ):
        acc.apply_grad([9], values, step)


@pytest.mark.parametrize("number", [5, 1000])
def test_rows_are_sorted_by_all_of_their_bits(number: int) -> None:
    """Ids are hashes, so their upper halves differ, and their lower ones say nothing."""
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


def test_a_row_whose_neighbours_stand_at_its_distance() -> None:
    """Rows 0 and 3 are three slots apart, so 2 is looked for in between, where 100 stands."""
    with SparseConditionalAccumulator("float64", reduction_type="SUM") as acc:
        for ids in ([0, 1], [100], [3], [0, 2, 3]):
            acc.apply_grad(ids, [1.0] * len(ids))
        taken = acc.take(4)
    assert dict(zip(taken.indices.tolist(), taken.values.tolist(), strict=True)) == {
        0: 2, 1: 1, 2: 1, 3: 2, 100: 1
    }  # fmt: skip
