"""Gradients as torch tensors, JAX arrays and lists, beside the least that they could cost."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
)
from shmacc_bench.tables import Table
from shmacc_bench.timing import microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Pair = tuple[str, str, Callable[[], object], Callable[[], object]]
    """What is measured, what it is compared with, and a call of each."""

_WIDTH: Final = 64
_ROWS, _FEW = 10, 2  # rows of a gradient given as arrays, and as lists
_CALLS: Final = 50  # calls in a turn
_GOAL: Final = 2.0


def measure(quick: bool) -> Iterator[Table]:
    """Yield the microseconds of a call: shmacc's, and the one beside it, in turns."""
    table = Table("Arrays of other packages (us)", ("apply of", "time", "beside", "time", "ratio"))
    specs = {
        "rows": IndexedSlicesSpec((100, _WIDTH), "float32"),
        "weights": TensorSpec((8, 8)),
        "bias": TensorSpec((8,)),
    }
    with (
        SparseConditionalAccumulator("float32", (100, _WIDTH)) as acc,
        AccumulatorGroup(specs) as group,
    ):
        for what, against, mine, theirs in _pairs(acc, group):
            turns = [
                (microseconds(mine, _CALLS), microseconds(theirs, _CALLS))
                for _ in range(15 if quick else 100)
            ]
            table.compare(what, turns, _GOAL, against)
    yield table


def _pairs(acc: SparseConditionalAccumulator, group: AccumulatorGroup) -> Iterator[Pair]:
    def apply(indices: Any, values: Any) -> None:
        acc.apply_grad(indices, values, None, NEVER_STALE)

    indices, values = _gradient(_ROWS)
    few, its = (array.tolist() for array in _gradient(_FEW))
    yield (
        f"lists, {_FEW} x {_WIDTH}", "np.array of them",
        lambda: apply(few, its), lambda: (np.array(few), np.array(its)),
    )  # fmt: skip
    if (torch := _imported("torch")) is not None:
        tensors = torch.from_numpy(indices), torch.from_numpy(values)
        arrays = {
            "rows": (indices, values),
            "weights": np.ones((8, 8), np.float32),
            "bias": np.ones(8, np.float32),
        }
        as_tensors = {"rows": tensors, "weights": torch.ones(8, 8), "bias": torch.ones(8)}
        yield (
            f"torch tensors, {_ROWS} x {_WIDTH}", "NumPy's arrays",
            lambda: apply(*tensors), lambda: apply(indices, values),
        )  # fmt: skip
        yield (
            "torch tensors, a group of 3", "NumPy's arrays",
            lambda: group.apply(as_tensors, NEVER_STALE), lambda: group.apply(arrays, NEVER_STALE),
        )  # fmt: skip
    if (jax := _imported("jax.numpy")) is not None:
        rows, its_values = jax.asarray(indices), jax.asarray(values)
        yield (
            f"JAX's arrays, {_ROWS} x {_WIDTH}", "np.asarray and NumPy's",
            lambda: apply(rows, its_values),
            lambda: apply(np.asarray(rows), np.asarray(its_values)),
        )  # fmt: skip


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _gradient(rows: int) -> tuple[Any, Any]:
    values = np.random.default_rng(0).normal(size=(rows, _WIDTH)).astype(np.float32)
    return np.arange(rows) * 10, values
