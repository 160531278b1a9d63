"""The library passes TensorFlow's own tests of constructors, overlapping rows and raw ops.

Refusals of gradients that do not fit, in TensorFlow's words, are in tests/values/test_arguments.py.
"""

import inspect
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import ConditionalAccumulator, IndexedSlices, SparseConditionalAccumulator, errors

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("kind", [ConditionalAccumulator, SparseConditionalAccumulator])
def test_the_constructor_accepts_what_tensorflows_accepts(kind: Any) -> None:
    for given, shape in (None, None), ([1, 5, 2, 8], (1, 5, 2, 8)):
        with kind("float32", name="Q", shape=given) as acc:
            assert (acc.dtype, acc.shape, acc.name) == (np.float32, shape, "Q")
            assert (acc.reduction_type, acc.num_accumulated()) == ("MEAN", 0)
    with pytest.raises(ValueError, match="Invalid"):
        kind(np.float32, name="Q", shape=[1], reduction_type="Invalid")


# Two gradients that share row 0: MEAN divides each row by the gradients that touched it.
FIRST = IndexedSlices(np.array([[1, 0], [0, 2]], np.float32), np.array([0, 1]))
SECOND = IndexedSlices(np.array([[0, 1], [3, 0]], np.float32), np.array([0, 2]))


def _lists(taken: Any) -> tuple[list[Any], list[Any], list[Any]]:
    indices, values, shape = taken
    return indices.tolist(), values.tolist(), shape.tolist()


@pytest.mark.parametrize(("reduction", "first", "second"), [
    ("MEAN", [[0.5, 0.5], [0, 2], [3, 0]], [[5, 5], [0, 20], [30, 0]]),
    ("SUM", [[1, 1], [0, 2], [3, 0]], [[10, 10], [0, 20], [30, 0]]),
    ("CMEAN", [[0.5, 0.5], [0, 1], [1.5, 0]], [[5, 5], [0, 10], [15, 0]]),
])  # fmt: skip
def test_take_grad_of_overlapping_rows(reduction: str, first: list[Any], second: list[Any]) -> None:
    """Both ways to apply are used, with and without a shape. The second round starts empty."""
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


def test_raw_ops_have_tensorflows_names_and_arguments() -> None:
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
        gradient_shape=[9, 9, 9],  # ignored, since has_known_shape is False
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
