"""What TensorFlow's own tests of its two conditional accumulators check, restated; and its raw ops.

Refusals of gradients that do not fit, in TensorFlow's words, are in test_arguments.py.
"""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import LONG, refused, until

import shmacc
from shmacc import ConditionalAccumulator, IndexedSlices, SparseConditionalAccumulator, errors

pytestmark = pytest.mark.threads


class Dense:
    """An accumulator of arrays of one number."""

    kind = ConditionalAccumulator

    @staticmethod
    def apply(acc: Any, number: float, local_step: int = 0) -> bool:
        accepted: bool = acc.apply_grad((number,), local_step=local_step)
        return accepted

    @staticmethod
    def take(acc: Any, num_required: Any, **keywords: Any) -> float:
        taken = acc.take_grad(num_required, **keywords)
        assert taken.shape == (1,)
        return float(taken.item())


class Sparse:
    """An accumulator of tables, of which one row of one number is used."""

    kind = SparseConditionalAccumulator

    @staticmethod
    def apply(acc: Any, number: float, local_step: int = 0) -> bool:
        accepted: bool = acc.apply_grad([3], [[number]], local_step=local_step)
        return accepted

    @staticmethod
    def take(acc: Any, num_required: Any, **keywords: Any) -> float:
        indices, values, shape = acc.take_grad(num_required, **keywords)
        assert (indices.tolist(), values.shape, shape.tolist()) == ([3], (1, 1), [-1, 1])
        return float(values.item())


both = pytest.mark.parametrize("way", [Dense, Sparse])


@both
@pytest.mark.parametrize(("given", "shape"), [(None, None), ([1, 5, 2, 8], (1, 5, 2, 8))])
def test_constructor(way: Any, given: Any, shape: Any) -> None:
    with way.kind("float32", name="Q", shape=given) as acc:
        assert acc.dtype == np.float32
        assert acc.shape == shape
        assert acc.name == "Q"
        assert acc.reduction_type == "MEAN"
        assert acc.num_accumulated() == 0


@both
def test_constructor_with_invalid_argument(way: Any) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        way.kind(np.float32, name="Q", shape=[1], reduction_type="Invalid")


@both
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(way: Any, dtype: str) -> None:
    with way.kind(dtype, name="Q") as acc:
        for grad in range(10):
            assert way.apply(acc, float(grad)) is True
        taken = acc.take_grad(1)
    mean = taken if way is Dense else taken.values[0]
    assert mean.dtype == dtype
    assert mean.tolist() == [4.5]


@both
def test_multiple_accumulators(way: Any) -> None:
    kinds = ["float32", "float32", "float16", "float16"]
    accs = [way.kind(dtype, name="Q") for dtype in kinds]
    for value, acc in enumerate(accs, start=10):
        way.apply(acc, float(value))
    assert [way.take(acc, 1) for acc in accs] == [10.0, 11.0, 12.0, 13.0]
    for acc in accs:
        acc.close()


def test_apply_and_take_grad_with_shape() -> None:
    grads = [np.array([[1, 2], [3, 4], [5, 6]]), np.array([[8, 6], [4, 2], [0, -2]])]
    with ConditionalAccumulator(np.float32, name="Q", shape=(3, 2)) as acc:
        for grad in grads:
            acc.apply_grad(grad)
        mean = acc.take_grad(1)
    assert mean.tolist() == [[4.5, 4.0], [3.5, 3.0], [2.5, 2.0]]


def test_dynamic_shape() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=None) as acc:
        acc.apply_grad([[0.0, 1.0], [2.0, 3.0]])
        acc.apply_grad([[4.0, 5.0], [6.0, 7.0]])
        assert acc.take_grad(1).tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("declared", [None, (3, 2)])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_apply_grad_with_wrong_shape(declared: Any, shape: tuple[int, ...]) -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=declared) as acc:
        acc.apply_grad(np.ones((3, 2)))
        with pytest.raises(ValueError, match="expected"):
            acc.apply_grad(np.ones(shape))
        assert acc.num_accumulated() == 1
        assert acc.take_grad(1).tolist() == [[1.0, 1.0]] * 3


@both
def test_size_after_apply_grad_and_take_grad(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc:
        for count in range(1, 3):
            way.apply(acc, 10.0)
            assert acc.num_accumulated() == count
        acc.take_grad(2)
        assert acc.num_accumulated() == 0
        for count in range(1, 5):
            way.apply(acc, 10.0, 1)
            assert acc.num_accumulated() == count
        # All four go, not only the two that were asked for.
        acc.take_grad(2)
        assert acc.num_accumulated() == 0


@both
@pytest.mark.parametrize(("reduction", "factor"), [("MEAN", 1), ("SUM", 2)])
def test_repeated_take_grad(way: Any, reduction: str, factor: int) -> None:
    with way.kind(np.float32, name="Q", reduction_type=reduction) as acc:
        for step, (first, second) in enumerate([(10.0, 20.0), (20.0, 30.0)]):
            way.apply(acc, first, step)
            way.apply(acc, second, step)
            # The number may be a NumPy integer, as it was a tensor there.
            number: Any = np.int32(2) if step else 2
            assert way.take(acc, number) == factor * (first + second) / 2


# Two gradients that share row 0: MEAN divides each row by the gradients that touched it.
FIRST = IndexedSlices(np.array([[1, 0], [0, 2]], np.float32), np.array([0, 1]))
SECOND = IndexedSlices(np.array([[0, 1], [3, 0]], np.float32), np.array([0, 2]))


def _lists(taken: Any) -> tuple[list[Any], list[Any], list[Any]]:
    indices, values, shape = taken
    return indices.tolist(), values.tolist(), shape.tolist()


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        ("MEAN", [[0.5, 0.5], [0, 2], [3, 0]], [[5, 5], [0, 20], [30, 0]]),
        ("SUM", [[1, 1], [0, 2], [3, 0]], [[10, 10], [0, 20], [30, 0]]),
        ("CMEAN", [[0.5, 0.5], [0, 1], [1.5, 0]], [[5, 5], [0, 10], [15, 0]]),
    ],
)
def test_take_grad_of_rows_that_overlap(
    reduction: str, first: list[Any], second: list[Any]
) -> None:
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


@both
def test_invalid_take_grad(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc:
        way.apply(acc, 10.0)
        way.apply(acc, 20.0)
        with pytest.raises(errors.InvalidArgumentError):
            acc.take_grad(-1)
        assert acc.num_accumulated() == 2


@both
def test_increment_global_step(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc:
        step: Any = np.zeros((), dtype=np.int64)
        for expected in (1, 2, 3):
            step += 1
            acc.set_global_step(step)
            assert acc.global_step == expected


@both
def test_set_global_step_prevents_accumulation(way: Any) -> None:
    steps = range(1000, 1005)
    with way.kind(np.float32, name="Q") as acc:
        for current in steps:
            acc.set_global_step(current)
            accepted = [way.apply(acc, float(s), s) for s in steps]
            assert accepted == [s >= current for s in steps]
            assert way.take(acc, 1) == np.mean([s for s in steps if s >= current])


@both
@pytest.mark.parametrize(("reduction", "result"), [("MEAN", 55.0), ("SUM", 550.0)])
def test_parallel_apply_grad(way: Any, reduction: str, result: float) -> None:
    with way.kind(np.float32, name="Q", reduction_type=reduction) as acc:
        with ThreadPoolExecutor(10) as pool:
            assert all(pool.map(lambda x: way.apply(acc, x), [10.0 * i for i in range(1, 11)]))
        assert way.take(acc, 1) == result


@both
def test_parallel_take_grad(way: Any) -> None:
    """Takes are served in the order in which they came, one gradient each."""
    with way.kind(np.float32, name="Q") as acc, ThreadPoolExecutor(10) as pool:
        takes = []
        for i in range(10):
            takes.append(pool.submit(way.take, acc, 1, timeout=LONG))
            until(lambda i=i: acc.stats().waiting == i + 1)  # type: ignore[misc]
        # One right after the other: each waiting take must get exactly one of them all the same.
        for i in range(10):
            assert way.apply(acc, 10.0 * i, i)
        assert [take.result() for take in takes] == [10.0 * i for i in range(10)]


@both
def test_apply_and_blocking_take(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc, ThreadPoolExecutor(1) as pool:
        take = pool.submit(way.take, acc, 3, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        for grad in (10.0, 20.0):
            way.apply(acc, grad)
        assert not take.done()
        assert acc.num_accumulated() == 2
        way.apply(acc, 30.0)
        assert take.result() == 20.0


@both
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancel(way: Any, how: str) -> None:
    acc: Any = way.kind(np.float32, name="Q")
    with acc, ThreadPoolExecutor(1) as pool:
        take = pool.submit(acc.take_grad, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        getattr(acc, how)()
        with pytest.raises(errors.CancelledError, match="was cancelled"):
            take.result()


@both
def test_default_local_step_is_stale_in_the_second_round(way: Any) -> None:
    """The commonest trap of the original, kept, but the False tells."""
    with way.kind(np.float32) as acc:
        assert way.apply(acc, 1.0) is True
        acc.take_grad(1)
        assert way.apply(acc, 1.0) is False
        assert acc.num_accumulated() == 0


@pytest.mark.parametrize("given", [None, []])
def test_empty_shape_apply(given: list[int] | None) -> None:
    with SparseConditionalAccumulator(np.float32, name="Q", shape=[]) as acc:
        with refused("Input indices should be vector but received shape: []"):
            acc.apply_grad(0, [1.0], grad_shape=given)
        with refused("Values cannot be 0-dimensional."):
            acc.apply_grad([0], 1.0, grad_shape=given)
        assert acc.apply_grad([0], [1.0], grad_shape=given)
        assert _lists(acc.take_grad(1)) == ([0], [1.0], [-1])


def test_a_round_settles_what_the_shape_leaves_open() -> None:
    def ones(*shape: int) -> np.ndarray[Any, Any]:
        return np.ones(shape, np.float32)

    with SparseConditionalAccumulator(np.float32, name="Q", shape=[2, 2, None]) as acc:
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


# --- raw ops -------------------------------------------------------------------------------------

RAW_OPS: Final = {
    "SparseConditionalAccumulator": (
        "dtype", "shape", "container", "shared_name", "reduction_type", "name",
    ),
    "SparseAccumulatorApplyGradient": (
        "handle", "local_step", "gradient_indices", "gradient_values", "gradient_shape",
        "has_known_shape", "name",
    ),
    "SparseAccumulatorTakeGradient": ("handle", "num_required", "dtype", "name"),
    "ConditionalAccumulator": (
        "dtype", "shape", "container", "shared_name", "reduction_type", "name",
    ),
    "AccumulatorApplyGradient": ("handle", "local_step", "gradient", "name"),
    "AccumulatorTakeGradient": ("handle", "num_required", "dtype", "name"),
    "AccumulatorNumAccumulated": ("handle", "name"),
    "AccumulatorSetGlobalStep": ("handle", "new_global_step", "name"),
}  # fmt: skip


@pytest.mark.parametrize("op", RAW_OPS)
def test_raw_ops_arguments(op: str) -> None:
    parameters = inspect.signature(getattr(shmacc.raw_ops, op)).parameters.values()
    assert tuple(p.name for p in parameters) == RAW_OPS[op]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_raw_ops_are_exactly_these() -> None:
    assert set(shmacc.raw_ops.__all__) == set(RAW_OPS)


def test_raw_ops_do_the_work() -> None:
    raw = shmacc.raw_ops
    handle = raw.SparseConditionalAccumulator(
        dtype=np.float32, shape=[4, 2], container="", shared_name="raw", reduction_type="SUM"
    )
    assert raw.SparseAccumulatorApplyGradient(handle, 0, [1], [[1.0, 2.0]], [], True) is True  # noqa: FBT003
    assert raw.SparseAccumulatorApplyGradient(
        handle=handle,
        local_step=0,
        gradient_indices=[1, 0],
        gradient_values=[[1.0, 2.0], [3.0, 4.0]],
        gradient_shape=[9, 9, 9],  # ignored: it is said not to be known
        has_known_shape=False,
    )
    assert raw.AccumulatorNumAccumulated(handle=handle) == 2
    # A handle is an accumulator_ref, an accumulator or a shared_name.
    with shmacc.attach("raw") as acc:
        for form in (handle, acc, acc.accumulator_ref, "raw"):
            assert raw.AccumulatorNumAccumulated(form) == 2
        taken = raw.SparseAccumulatorTakeGradient("raw", 2, np.float32)
        assert taken.indices.tolist() == [0, 1]
        assert taken.values.tolist() == [[3.0, 4.0], [2.0, 4.0]]
        assert taken.shape.tolist() == [4, 2]
        raw.AccumulatorSetGlobalStep(acc, new_global_step=9)
        assert acc.global_step == 9
        assert raw.SparseAccumulatorApplyGradient("raw", 1, [1], [[1.0, 2.0]], [], False) is False  # noqa: FBT003
        with pytest.raises(errors.InvalidArgumentError):
            raw.SparseAccumulatorTakeGradient(handle, 1, np.float64)
        with pytest.raises(errors.InvalidArgumentError):
            raw.AccumulatorApplyGradient(handle, 9, [1.0])
        acc.unlink()
    handle.accumulator.close()


def test_raw_ops_dense() -> None:
    raw = shmacc.raw_ops
    handle = raw.ConditionalAccumulator("float64", None, shared_name="raw")
    for value in (1.0, 4.0):
        assert raw.AccumulatorApplyGradient(handle, 0, value)
    assert raw.AccumulatorTakeGradient(handle, 2, "float64").tolist() == 2.5
    with pytest.raises(errors.InvalidArgumentError):
        raw.AccumulatorTakeGradient(handle, 0, "float64")
    with pytest.raises(errors.NotFoundError):
        raw.AccumulatorNumAccumulated("nobody")
    with handle.accumulator as acc:
        acc.unlink()
