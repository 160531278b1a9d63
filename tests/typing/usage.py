"""Programs that use shmacc, with the types that checkers must find. Checked, and never run."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    DensePartial,
    DenseTaken,
    IndexedSlices,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    SparseGradient,
    SparsePartial,
    SparseTaken,
    Stats,
    errors,
    inspection,
    optim,
    raw_ops,
    testing,
)


def sparse(acc: SparseConditionalAccumulator) -> None:
    """Check every result of the sparse class."""
    assert_type(acc.apply_grad([1], [[1.0]], local_step=acc.global_step), bool)
    assert_type(acc.apply_indexed_slices_grad(IndexedSlices([1.0], [1])), bool)
    assert_type(acc.take_grad(1), SparseGradient)
    indices, values, _ = acc.take_grad(1, timeout=1.0)
    assert_type(indices, npt.NDArray[np.int64])
    assert_type(values, npt.NDArray[Any])
    assert_type(acc.take_indexed_slices_grad(1), IndexedSlices)
    assert_type(acc.take(1), SparseTaken)
    partial = acc.take_partial(0, seal=True)
    assert_type(partial, SparsePartial)
    assert_type(acc.apply_partial(partial, acc.global_step), bool)


def dense(acc: ConditionalAccumulator) -> None:
    """Check every result of the dense class, and what both classes have."""
    assert_type(acc.take_grad(1), npt.NDArray[Any])
    assert_type(acc.take(1), DenseTaken)
    assert_type(acc.take_partial(), DensePartial)
    assert_type(acc.stats(), Stats)
    assert_type(acc.stats().applied, int)
    assert_type(acc.wait_step(3), int)
    assert_type(acc.shape, tuple[int | None, ...] | None)
    with acc as same:
        assert_type(same, ConditionalAccumulator)


def opening() -> None:
    """Check constructors, and both ways to attach."""
    with SparseConditionalAccumulator(np.float32, (None, 8), "name", mode=0o660, owners={1000}):
        pass
    with ConditionalAccumulator("f4", None, "name", if_exists="replace", unlink_on_close=True):
        pass
    assert_type(SparseConditionalAccumulator.attach("name"), SparseConditionalAccumulator)
    assert_type(ConditionalAccumulator.attach("name", timeout=0.5), ConditionalAccumulator)
    assert_type(ConditionalAccumulator.attach("name", owners="any"), ConditionalAccumulator)
    found = shmacc.attach("name")
    assert_type(
        found, SparseConditionalAccumulator | ConditionalAccumulator | AccumulatorGroup | Any
    )
    assert_type(found.num_accumulated(), int | Any)
    assert_type(
        shmacc.sparse.SparseConditionalAccumulator.attach("n"), SparseConditionalAccumulator
    )


def arrays() -> None:
    with SharedArrays({"w": np.zeros(3)}, "name", mode=0o660, if_exists="error") as params:
        assert_type(params, SharedArrays)
        assert_type(params["w"], npt.NDArray[Any])
        params["w"] -= 1
        params["w"][...] = 2
    assert_type(SharedArrays.attach("name", writable=True, timeout=1), SharedArrays)


def updates(group: AccumulatorGroup, single: SparseConditionalAccumulator) -> None:
    optimizer = optim.Adagrad(0.1, rowwise=True)
    with Parameters({"w": np.zeros(3)}, "name", optimizer={"w": optimizer}) as params:
        assert_type(params, Parameters)
        assert_type(params["w"], Any)  # an array, or a Table
        with group.round(1) as taken:
            assert_type(params.update(taken, {"w": np.ones(3)}, learning_rate=0.1), bool)
        with single.round(1) as rows:
            assert_type(params.update({"w": rows}, timeout=1), bool)
            assert_type(params.skip(rows), bool)
        assert_type(params.step, int)
        assert_type(params.snapshot(), tuple[int, dict[str, Any]])
        params.restore(params.state())
    assert_type(Parameters.attach("name", timeout=1), Parameters)
    assert_type(params.get("w"), npt.NDArray[Any] | None)


def either(acc: shmacc.ConditionalAccumulatorBase) -> int:
    """Check the base class of both accumulators, written without type parameters."""
    acc.set_global_step(acc.num_accumulated())
    assert_type({acc.accumulator_ref: 1}.popitem()[1], int)
    return acc.take(1).count if isinstance(acc, SparseConditionalAccumulator) else acc.global_step


def around() -> None:
    """Check errors, inspection, raw ops, testing."""
    try:
        assert_type(inspection.describe("name").stats, Stats)
    except errors.DeadlineExceededError as error:
        assert_type(error.accumulated, int | None)
        assert_type(error.dropped, int | None)
    except errors.NotFoundError as error:
        assert_type(error.shared_name, str | None)
    assert_type(raw_ops.AccumulatorNumAccumulated("name"), int)
    assert_type(raw_ops.ResourceAccumulatorTakeGradient("name", 1, "f4"), npt.NDArray[Any])
    assert_type(testing.leaked_names(), tuple[str, ...])
    assert_type(shmacc.__version__, str)
    assert_type(shmacc.NEVER_STALE, int)
