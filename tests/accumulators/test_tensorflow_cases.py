"""TensorFlow's own tests of its two conditional accumulators and its raw ops, for this library.

Refusals of gradients that do not fit, in TensorFlow's words, are in tests/values/test_arguments.py.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, IndexedSlices, SparseConditionalAccumulator, errors

pytestmark = pytest.mark.threads


class Dense:
    """An accumulator of arrays of one number."""

    kind = ConditionalAccumulator

    @staticmethod
    def apply(acc: Any, number: float, local_step: int = 0) -> Any:
        return acc.apply_grad((number,), local_step=local_step)

    @staticmethod
    def take(acc: Any, num_required: Any, **keywords: Any) -> float:
        taken = acc.take_grad(num_required, **keywords)
        assert taken.shape == (1,)
        return float(taken.item())


class Sparse:
    """An accumulator of tables, of which one row with one number is used."""

    kind = SparseConditionalAccumulator

    @staticmethod
    def apply(acc: Any, number: float, local_step: int = 0) -> Any:
        return acc.apply_grad([3], [[number]], local_step=local_step)

    @staticmethod
    def take(acc: Any, num_required: Any, **keywords: Any) -> float:
        indices, values, shape = acc.take_grad(num_required, **keywords)
        assert (indices.tolist(), values.shape, shape.tolist()) == ([3], (1, 1), [-1, 1])
        return float(values.item())


both = pytest.mark.parametrize("way", [Dense, Sparse])


@both
def test_constructor(way: Any) -> None:
    for given, shape in (None, None), ([1, 5, 2, 8], (1, 5, 2, 8)):
        with way.kind("float32", name="Q", shape=given) as acc:
            assert (acc.dtype, acc.shape, acc.name) == (np.float32, shape, "Q")
            assert (acc.reduction_type, acc.num_accumulated()) == ("MEAN", 0)
    with pytest.raises(ValueError, match="Invalid"):
        way.kind(np.float32, name="Q", shape=[1], reduction_type="Invalid")


@both
def test_dtypes_and_several_accumulators(way: Any) -> None:
    accs = [way.kind(dtype, name="Q") for dtype in ("float16", "float32", "float64", "float32")]
    for i, acc in enumerate(accs):
        for grad in range(10):
            assert way.apply(acc, float(grad + i)) is True
    assert [way.take(acc, 1) for acc in accs] == [4.5, 5.5, 6.5, 7.5]
    for acc in accs:
        acc.close()


def test_apply_and_take_grad_with_shape() -> None:
    for shape in (3, 2), None:
        with ConditionalAccumulator(np.float32, name="Q", shape=shape) as acc:
            acc.apply_grad([[1, 2], [3, 4], [5, 6]])
            acc.apply_grad([[8, 6], [4, 2], [0, -2]])
            for wrong in (2, 2), (3, 1):
                with pytest.raises(ValueError, match="expected"):
                    acc.apply_grad(np.ones(wrong))
            assert acc.num_accumulated() == 2
            assert acc.take_grad(1).tolist() == [[4.5, 4.0], [3.5, 3.0], [2.5, 2.0]]


@both
def test_size_after_apply_grad_and_take_grad(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc:
        for step, number in enumerate((2, 4)):
            for count in range(1, number + 1):
                assert way.apply(acc, 10.0, step)
                assert acc.num_accumulated() == count
            # All four are taken, not only the two that were asked for.
            acc.take_grad(2)
            assert acc.num_accumulated() == 0
        assert way.apply(acc, 10.0) is False  # the default step is stale by now


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
    """By both ways to apply, with a given shape; a second round starts empty."""
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
def test_set_global_step_prevents_accumulation(way: Any) -> None:
    with way.kind(np.float32, name="Q") as acc:
        for current in range(1000, 1005):
            acc.set_global_step(np.asarray(current))
            assert acc.global_step == current
            accepted = [s for s in range(1000, 1005) if way.apply(acc, float(s), s)]
            assert accepted == list(range(current, 1005))
            assert way.take(acc, 1) == np.mean(accepted)


@both
@pytest.mark.parametrize(("reduction", "result"), [("MEAN", 55.0), ("SUM", 550.0)])
def test_parallel_apply_grad(way: Any, reduction: str, result: float) -> None:
    with way.kind(np.float32, name="Q", reduction_type=reduction) as acc:
        with ThreadPoolExecutor(10) as pool:
            assert all(pool.map(lambda x: way.apply(acc, x), [10.0 * i for i in range(1, 11)]))
        assert way.take(acc, 1) == result


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


# --- raw ops -------------------------------------------------------------------------------------

APPLY = "handle local_step gradient"
TAKE = "handle num_required dtype name"
MAKE = "dtype shape container shared_name reduction_type name"
_SHARED: Final = {
    "SparseConditionalAccumulator": MAKE,
    "SparseAccumulatorApplyGradient": (
        f"{APPLY}_indices gradient_values gradient_shape has_known_shape name"
    ),
    "SparseAccumulatorTakeGradient": TAKE,
    "ConditionalAccumulator": MAKE,
    "AccumulatorApplyGradient": f"{APPLY} name",
    "AccumulatorTakeGradient": TAKE,
    "AccumulatorNumAccumulated": "handle name",
    "AccumulatorSetGlobalStep": "handle new_global_step name",
}
RAW_OPS: Final = _SHARED | {
    f"Resource{op}": names for op, names in _SHARED.items() if "Sparse" not in op
}


def test_raw_ops_and_their_arguments() -> None:
    assert set(shmacc.raw_ops.__all__) == set(RAW_OPS)
    for op, names in RAW_OPS.items():
        parameters = inspect.signature(getattr(shmacc.raw_ops, op)).parameters.values()
        assert [p.name for p in parameters] == names.split()
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_resource_ops_are_for_dense_accumulators() -> None:
    raw = shmacc.raw_ops
    handle = raw.ResourceConditionalAccumulator(dtype="float64", shape=[2])
    assert raw.ResourceAccumulatorApplyGradient(handle, local_step=0, gradient=[1.0, 3.0])
    assert raw.ResourceAccumulatorNumAccumulated(handle) == 1
    assert raw.ResourceAccumulatorTakeGradient(handle, 1, "float64").tolist() == [1.0, 3.0]
    raw.ResourceAccumulatorSetGlobalStep(handle, new_global_step=7)
    assert handle.accumulator.global_step == 7
    sparse = raw.SparseConditionalAccumulator("float64", None)
    for call in (
        lambda: raw.ResourceAccumulatorApplyGradient(sparse, 0, [1.0]),
        lambda: raw.ResourceAccumulatorTakeGradient(sparse, 1, "float64"),
        lambda: raw.ResourceAccumulatorNumAccumulated(sparse),
        lambda: raw.ResourceAccumulatorSetGlobalStep(sparse, 1),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="must lead to a ConditionalAcc"):
            call()
    for each in (handle, sparse):
        each.accumulator.close()


def test_raw_ops_apply_and_take() -> None:
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
    with pytest.raises(errors.NotFoundError):
        raw.AccumulatorNumAccumulated("nobody")
