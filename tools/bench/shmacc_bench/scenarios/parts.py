"""The parts of an apply that the cost model is made of, and how fast memory is copied."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

import shmacc
from shmacc_bench.cases import IDS
from shmacc_bench.workload import Gradient, Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

WIDTH = 64
WORKLOADS = (*(Workload("sparse", rows, WIDTH) for rows in (10, 1_000, 10_000, 50_000)), IDS)
GRADIENTS = 4  # in turn, so that none stays in the cache
ROWS_A_TURN = 40_000
MOST_CALLS = 400
STALE, FRESH = 0, shmacc.NEVER_STALE
COPIED = 25_000_000  # float32, 100 MB: more than any cache


class Scenario:
    """One process. What is dropped as stale has been checked, sorted and summed, and not added."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del name, peer  # it needs steps, which peers do not have
        self.turns = 1 if quick else 3
        self.accs = [shmacc.SparseConditionalAccumulator("float32", of.shape) for of in WORKLOADS]
        self.gradients = [
            [make_gradient(of, seed) for seed in range(GRADIENTS)] for of in WORKLOADS
        ]
        one_row = make_gradient(Workload("sparse", 1, WIDTH))
        for acc, gradients in zip(self.accs, self.gradients, strict=True):
            acc.set_global_step(STALE + 1)
            for gradient in gradients:
                acc.apply_grad(gradient.indices, gradient.values, local_step=FRESH)
        self.one_row = [one_row]
        self.copied = np.ones(COPIED, np.float32)
        self.copy = self.copied.copy()

    def step(self) -> dict[str, Any]:
        """Return microseconds of an apply, of a dropped one, and of a dropped one of one row."""
        measured = []
        for workload, acc, gradients in zip(WORKLOADS, self.accs, self.gradients, strict=True):
            calls = max(GRADIENTS, min(MOST_CALLS, ROWS_A_TURN // workload.rows))
            turns = [
                (
                    _turn(acc, gradients, FRESH, calls),
                    _turn(acc, gradients, STALE, calls),
                    _turn(acc, self.one_row, STALE, MOST_CALLS),
                )
                for _ in range(self.turns)
            ]
            parts = zip(("whole", "dropped", "least"), zip(*turns, strict=True), strict=True)
            measured.append(
                dict(parts)
                | {"what": workload.label, "bytes": _bytes_moved(workload, gradients[0])}
            )
        begun = time.perf_counter()
        np.copyto(self.copy, self.copied)
        return {"measured": measured, "copy": 2 * self.copy.nbytes / (time.perf_counter() - begun)}

    def close(self) -> None:
        """Remove the segments."""
        for acc in self.accs:
            acc.close()


def _bytes_moved(workload: Workload, gradient: Gradient) -> int:
    """Count: it reads the gradient and the rows that it touches, saves those, and writes them."""
    return workload.value_bytes + 3 * len(gradient.occurrences()) * workload.row_bytes


def _turn(
    acc: shmacc.SparseConditionalAccumulator, gradients: Sequence[Any], step: int, calls: int
) -> float:
    begun = time.perf_counter_ns()
    for call in range(calls):
        gradient = gradients[call % len(gradients)]
        acc.apply_grad(gradient.indices, gradient.values, local_step=step)
    return (time.perf_counter_ns() - begun) / calls / 1000


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians: microseconds, and the bytes that a copy reads and writes in a second."""
    return {
        "measured": [
            {"what": same[0]["what"], "bytes": same[0]["bytes"]}
            | {
                key: float(np.median([us for line in same for us in line[key]]))
                for key in ("whole", "dropped", "least")
            }
            for same in zip(*(step["measured"] for step in steps), strict=True)
        ],
        "copy": float(np.median([step["copy"] for step in steps])),
    }
