"""Gradients as torch, JAX and lists have them, against the same as NumPy's arrays."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
)
from shmacc_bench.samples import paired_ratio, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmacc_bench.peers.base import Peer

    Calls = tuple[str, str, Callable[[], object], Callable[[], object]]
    """What is measured, and what it is compared with."""

WIDTH = 64
ROWS, FEW_ROWS = 10, 2  # of arrays and of lists
CALLS = 50  # in a turn
LIMIT = 2.0  # the target of each line


class Scenario:
    """One process; what is measured and what it is compared with have their turns in pairs."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del name, peer  # all are shmacc's own
        self.turns = 5 if quick else 20
        table = (100, WIDTH)
        self.acc = SparseConditionalAccumulator("float32", table)
        self.group = AccumulatorGroup(
            {
                "rows": IndexedSlicesSpec(table, "float32"),
                "weights": TensorSpec((8, 8)),
                "bias": TensorSpec((8,)),
            }
        )
        self.calls = [*self._of_lists(), *self._of_torch(), *self._of_jax()]

    def step(self) -> dict[tuple[str, str], Any]:
        """Return the microseconds of a call of both sides in each turn, by what is measured."""
        return {
            (what, against): [(_turn(mine), _turn(theirs)) for _ in range(self.turns)]
            for what, against, mine, theirs in self.calls
        }

    def _of_lists(self) -> list[Calls]:
        indices, values = _gradient(FEW_ROWS)
        lists = indices.tolist(), values.tolist()
        return [
            (
                f"lists, {FEW_ROWS} x {WIDTH}",
                "np.array of them",
                lambda: self._apply(*lists),
                lambda: (np.array(lists[0]), np.array(lists[1])),
            )
        ]

    def _of_torch(self) -> list[Calls]:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return []
        indices, values = _gradient(ROWS)
        tensors = torch.from_numpy(indices), torch.from_numpy(values)
        weights, bias = np.ones((8, 8), np.float32), np.ones(8, np.float32)
        arrays = {"rows": (indices, values), "weights": weights, "bias": bias}
        as_tensors = {
            "rows": tensors,
            "weights": torch.from_numpy(weights),
            "bias": torch.from_numpy(bias),
        }
        return [
            (
                f"torch tensors, {ROWS} x {WIDTH}",
                "NumPy's arrays",
                lambda: self._apply(*tensors),
                lambda: self._apply(indices, values),
            ),
            (
                "torch tensors, a group of 3",
                "NumPy's arrays",
                lambda: self.group.apply(as_tensors, NEVER_STALE),
                lambda: self.group.apply(arrays, NEVER_STALE),
            ),
        ]

    def _of_jax(self) -> list[Calls]:
        try:
            jax_numpy = importlib.import_module("jax.numpy")
        except ImportError:
            return []
        indices, values = (jax_numpy.asarray(array) for array in _gradient(ROWS))
        return [
            (
                f"JAX's arrays, {ROWS} x {WIDTH}",
                "np.asarray and NumPy's",
                lambda: self._apply(indices, values),
                lambda: self._apply(np.asarray(indices), np.asarray(values)),
            )
        ]

    def _apply(self, indices: Any, values: Any) -> None:
        self.acc.apply_grad(indices, values, None, NEVER_STALE)

    def close(self) -> None:
        """Remove the segments."""
        self.acc.close()
        self.group.close()


def _gradient(rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    values = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    return np.arange(rows) * 10, values


def _turn(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begun) / CALLS / 1000


def summary(steps: Sequence[dict[tuple[str, str], Any]]) -> dict[str, Any]:
    """Return both distributions of each line, and their paired ratio."""
    lines = []
    for what, against in steps[0]:
        turns = [turn for step in steps for turn in step[what, against]]
        mine, theirs = ([turn[side] for turn in turns] for side in (0, 1))
        lines.append(
            {
                "what": what,
                "against": against,
                "apply": summarise(mine),
                "other": summarise(theirs),
                "ratio": paired_ratio([[us] for us in mine], [[us] for us in theirs]),
                "limit": LIMIT,
            }
        )
    return {"measured": lines}
