"""What TensorFlow's own tests of SparseConditionalAccumulator check, restated case by case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.support import LONG, refused, until

from shmacc import IndexedSlices, SparseConditionalAccumulator, errors

# Two gradients that share row 0: MEAN divides each row by the gradients that touched it.
FIRST = IndexedSlices(np.array([[1, 0], [0, 2]], np.float32), np.array([0, 1]))
SECOND = IndexedSlices(np.array([[0, 1], [3, 0]], np.float32), np.array([0, 2]))


def _lists(taken: Any) -> tuple[list[Any], list[Any], list[Any]]:
    indices, values, shape = taken
    return indices.tolist(), values.tolist(), shape.tolist()


def test_constructor() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q") as acc:
        assert acc.dtype == np.float32
        assert acc.shape is None
        assert acc.name == "Q"
        assert acc.reduction_type == "MEAN"


def test_constructor_with_shape() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=(1, 5, 2, 8)) as acc:
        assert acc.shape == (1, 5, 2, 8)


def test_constructor_with_invalid_argument() -> None:
    with pytest.raises(ValueError, match="Invalid"):
        SparseConditionalAccumulator(np.float32, name="Q", reduction_type="Invalid")


def test_size_empty() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q") as acc:
        assert acc.num_accumulated() == 0


def test_set_global_step() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        acc.set_global_step(1)
        assert acc.global_step == 1


def test_apply_grad_float32() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=[3, 3]) as acc:
        slices = IndexedSlices(np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([0, 2]))
        assert acc.apply_indexed_slices_grad(slices) is True
        assert acc.num_accumulated() == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(dtype: str) -> None:
    values = np.arange(8, dtype=dtype).reshape(1, 2, 4)
    with SparseConditionalAccumulator(dtype, shape=[3, 2, 4]) as acc:
        acc.apply_grad([1], values)
        acc.apply_grad([1], values * 2)
        indices, mean, _ = acc.take_grad(2)
    assert indices.tolist() == [1]
    assert mean.dtype == dtype
    assert mean.tolist() == (values * 1.5).tolist()


def test_multiple_accumulators() -> None:
    kinds = ["float32", "float32", "float16", "float16"]
    accs = [SparseConditionalAccumulator(dtype, name="Q", shape=[2, 2]) for dtype in kinds]
    for i, acc in enumerate(accs):
        acc.apply_grad([0], [[1.0 * i, 2.0]])
    for i, acc in enumerate(accs):
        slices = acc.take_indexed_slices_grad(1)
        assert slices.values.tolist() == [[1.0 * i, 2.0]]
        assert slices.indices.tolist() == [0]
        acc.close()


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        ("MEAN", [[0.5, 0.5], [0, 2], [3, 0]], [[5, 5], [0, 20], [30, 0]]),
        ("SUM", [[1, 1], [0, 2], [3, 0]], [[10, 10], [0, 20], [30, 0]]),
        ("CMEAN", [[0.5, 0.5], [0, 1], [1.5, 0]], [[5, 5], [0, 10], [15, 0]]),
    ],
)
def test_take_grad(reduction: str, first: list[Any], second: list[Any]) -> None:
    """Both ways to apply, a given shape, and a second round that carries nothing over."""
    with SparseConditionalAccumulator(
        np.float32, name="Q", shape=(), reduction_type=reduction
    ) as acc:
        acc.apply_indexed_slices_grad(FIRST)
        acc.apply_grad([0, 2], SECOND.values)
        assert _lists(acc.take_grad(1)) == ([0, 1, 2], first, [-1, 2])

        ten = np.float32(10)
        acc.apply_grad([0, 1], FIRST.values * ten, grad_shape=[3, 2], local_step=1)
        acc.apply_indexed_slices_grad(
            IndexedSlices(SECOND.values * ten, SECOND.indices, np.array([3, 2])), local_step=1
        )
        assert _lists(acc.take_grad(2)) == ([0, 1, 2], second, [-1, 2])


def test_take_grad_invalid_reduction_type() -> None:
    with pytest.raises(ValueError, match="Invalid"):
        SparseConditionalAccumulator(np.float32, shape=(), reduction_type="Invalid")


def test_repeated_take_grad() -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=()) as acc:
        acc.apply_indexed_slices_grad(FIRST, local_step=0)
        acc.apply_indexed_slices_grad(SECOND, local_step=0)
        taken = acc.take_grad(1)
        assert _lists(taken) == ([0, 1, 2], [[0.5, 0.5], [0, 2], [3, 0]], [-1, 2])
        acc.apply_grad([5], [[8, 8]], local_step=1)
        assert _lists(acc.take_grad(1)) == ([5], [[8, 8]], [-1, 2])


@pytest.mark.parametrize(("reduction", "result"), [("MEAN", 55.0), ("SUM", 550.0)])
def test_parallel_apply_grad(reduction: str, result: float) -> None:
    with SparseConditionalAccumulator(
        np.float32, name="Q", shape=(), reduction_type=reduction
    ) as acc:
        with ThreadPoolExecutor(10) as pool:
            applied = pool.map(
                lambda x: acc.apply_grad([0, 1], [[x, 0], [0, x]]),
                [10.0 * i for i in range(1, 11)],
            )
            assert all(applied)
        assert _lists(acc.take_grad(1)) == ([0, 1], [[result, 0], [0, result]], [-1, 2])


def test_parallel_take_grad() -> None:
    """Takers are served in the order in which they came, one gradient each."""
    with (
        SparseConditionalAccumulator(np.float32, name="Q", shape=()) as acc,
        ThreadPoolExecutor(10) as pool,
    ):
        takes = []
        for i in range(10):
            takes.append(pool.submit(acc.take_grad, 1, timeout=LONG))
            until(lambda i=i: acc.stats().waiting == i + 1)  # type: ignore[misc]
        for i in range(10):
            assert acc.apply_grad([i], [[10.0 * i]], local_step=i)
        assert [_lists(take.result()) for take in takes] == [
            ([i], [[10.0 * i]], [-1, 1]) for i in range(10)
        ]


def test_apply_and_blocking_take() -> None:
    with (
        SparseConditionalAccumulator(np.float32, name="Q", shape=()) as acc,
        ThreadPoolExecutor(1) as pool,
    ):
        take = pool.submit(acc.take_grad, 3, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        for x in (10.0, 20.0):
            acc.apply_grad([0], [[x]])
        assert not take.done()
        acc.apply_grad([0], [[30.0]])
        assert _lists(take.result()) == ([0], [[20.0]], [-1, 1])


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancel(how: str) -> None:
    acc: Any = SparseConditionalAccumulator(np.float32, name="Q", shape=[1, 2, 3])
    with acc, ThreadPoolExecutor(1) as pool:
        take = pool.submit(acc.take_grad, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        getattr(acc, how)()
        with pytest.raises(errors.CancelledError, match="was cancelled"):
            take.result()


@pytest.mark.parametrize("as_slices", [False, True])
def test_non_vector_indices(*, as_slices: bool) -> None:
    values = np.zeros((2, 2), np.float32)
    indices = np.array([[0, 1], [1, 0]])
    with (
        SparseConditionalAccumulator(np.float32) as acc,
        refused("Input indices should be vector but received shape: [2,2]"),
    ):
        if as_slices:
            acc.apply_indexed_slices_grad(IndexedSlices(values, indices))
        else:
            acc.apply_grad(indices, values)


def test_zero_dimension_values() -> None:
    with (
        SparseConditionalAccumulator(np.float32) as acc,
        refused("Values cannot be 0-dimensional."),
    ):
        acc.apply_grad([0], np.float32(1))


def test_wrong_non_empty_input_values() -> None:
    with (
        SparseConditionalAccumulator(np.float32) as acc,
        refused("Expected 2 non-empty input values, got 1"),
    ):
        acc.apply_grad([0, 1], np.array([[0, 1, 1]], np.float32))


@pytest.mark.parametrize("given", [None, []])
def test_empty_shape_apply(given: list[int] | None) -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=[]) as acc:
        with refused("Input indices should be vector but received shape: []"):
            acc.apply_grad(0, [1.0], grad_shape=given)
        with refused("Values cannot be 0-dimensional."):
            acc.apply_grad([0], 1.0, grad_shape=given)
        assert acc.apply_grad([0], [1.0], grad_shape=given)
        assert _lists(acc.take_grad(1)) == ([0], [1.0], [-1])


def test_validate_shape() -> None:
    def ones(*shape: int) -> np.ndarray[Any, Any]:
        return np.ones(shape, np.float32)

    with SparseConditionalAccumulator(np.float32, name="Q", shape=[2, 2, None]) as acc:
        with refused("Shape mismatch: expected shape rank at least 3, got 2"):
            acc.apply_grad([0], ones(1, 2), grad_shape=[2, 2])
        with refused("Shape mismatch: expected shape dim 1 to be 2, got 3"):
            acc.apply_grad([0], ones(1, 3, 2), grad_shape=[2, 3, 2])
        with refused(
            "Shape mismatch: index of slice 0 exceeded limits of shape; index is 3 exceeded 2"
        ):
            acc.apply_grad([3], ones(1, 2, 2))
        with refused("Shape mismatch: expected values rank at least 3, got 2"):
            acc.apply_grad([0, 1], ones(2, 2))
        with refused("Shape mismatch: expected values dim 1 to be 2, got 3"):
            acc.apply_grad([0, 1], ones(2, 3, 2))
        assert acc.num_accumulated() == 0

        # The first gradient of a round settles what the declaration leaves open.
        acc.apply_grad([0], ones(1, 2, 2, 2))
        with refused("Shape mismatch: expected values rank 4, got 3"):
            acc.apply_grad([0, 1], ones(2, 2, 2))
        with refused("Shape mismatch: expected values dim 3 to be 2, got 3"):
            acc.apply_grad([0, 1], ones(2, 2, 2, 3))
        acc.apply_grad([1], ones(1, 2, 2, 2))
        assert acc.num_accumulated() == 2

        # The take lifts it, the next round settles another.
        assert acc.take_grad(1).shape.tolist() == [2, 2, 2, 2]
        acc.apply_grad([0, 1], ones(2, 2, 3), local_step=1)
        with refused("Shape mismatch: expected values dim 2 to be 3, got 4"):
            acc.apply_grad([0], ones(1, 2, 4), local_step=1)
        assert acc.take_grad(1).shape.tolist() == [2, 2, 3]


@pytest.mark.parametrize(
    ("declared", "values", "returned"),
    [
        ([2, None], (1, 2, 2, 2), [2, 2, 2, 2]),
        ([None, 2], (1, 2, 2, 3), [-1, 2, 2, 3]),
        (None, (1, 2), [-1, 2]),
        ([], (1,), [-1]),
        ([5], (1,), [5]),
        ([None, None], (1, 0), [-1, 0]),
    ],
)
def test_return_shape(declared: Any, values: tuple[int, ...], returned: list[int]) -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=declared) as acc:
        acc.apply_grad([0], np.ones(values, np.float32))
        assert acc.take_indexed_slices_grad(1).dense_shape.tolist() == returned
        acc.apply_grad([0], np.ones(values, np.float32), local_step=1)
        assert acc.take_grad(1).shape.tolist() == returned


def test_int32_indices_and_shape() -> None:
    indices, shape = np.array([0, 2], np.int32), np.array([3, 3], np.int32)
    values = np.array([[0, 0, 1], [3, 0, 4]], np.float32)
    with SparseConditionalAccumulator(np.float32, name="Q", shape=(3, 3)) as acc:
        acc.apply_grad(indices, values, shape)
        acc.apply_indexed_slices_grad(IndexedSlices(values, indices, shape))
        taken = acc.take_grad(1)
    assert _lists(taken) == ([0, 2], values.tolist(), [3, 3])
    assert taken.indices.dtype == taken.shape.dtype == np.int64
