"""How much several processes that apply at once get done together, and how evenly."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.crew import Crew
from shmacc_bench.workload import Gradient, Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

PROCESSES = (1, 2, 4)
ROWS = (1_000, 10_000)
WIDTH = 64
PATTERNS = ("disjoint", "overlapping")
GRADIENTS = 4  # each process applies so many in turn, so that none stays in its cache


class Scenario:
    """Up to four processes, each with its own gradients."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del quick  # it has no target, and is left out then
        self.window_ns = 100_000_000
        self.peer = peer
        peer.open(Workload("sparse", max(ROWS), WIDTH))
        self.crew = Crew(name, peer, max(PROCESSES))

    def step(self) -> dict[str, Any]:
        """Return applies a second, and the smallest process's share of the largest's, of all."""
        measured = []
        for rows, pattern in itertools.product(ROWS, PATTERNS):
            for number in range(max(PROCESSES)):
                self.crew.ask(number, "use", _gradients(rows, pattern, number))
                self.crew.ask(number, "apply")
            for processes in PROCESSES:
                start = self.crew.soon()
                for number in range(processes):
                    self.crew.order(number, "apply_for", start, self.window_ns)
                shares = [self.crew.answer(number) for number in range(processes)]
                counts = [count for count, _ in shares]
                seconds = max(elapsed for _, elapsed in shares) / 1e9
                measured.append(
                    {
                        "rows": rows,
                        "pattern": pattern,
                        "processes": processes,
                        "applies_per_second": sum(counts) / seconds,
                        "fairness": min(counts) / max(counts),
                    }
                )
        return {"measured": measured}

    def close(self) -> None:
        """End the processes."""
        self.crew.close()
        self.peer.close()


def _gradients(rows: int, pattern: str, number: int) -> list[Gradient]:
    """Return one process's gradients: of rows that only it touches, or that all of them touch."""
    workload = Workload("sparse", rows, WIDTH)
    if pattern == "overlapping":
        return [make_gradient(workload, seed) for seed in range(GRADIENTS)]
    share = Workload("sparse", rows, WIDTH, table_rows=workload.table_rows // max(PROCESSES))
    gradients = []
    for seed in range(GRADIENTS):
        gradient = make_gradient(share, seed)
        own = gradient.indices + number * share.table_rows
        gradients.append(Gradient(own, gradient.values, unique=True))
    return gradients


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the steps."""
    lines = []
    for same in zip(*(step["measured"] for step in steps), strict=True):
        rates = [line["applies_per_second"] for line in same]
        lines.append(
            same[0]
            | {
                "applies_per_second": float(np.median(rates)),
                "slowest": min(rates),
                "fastest": max(rates),
                "fairness": float(np.median([line["fairness"] for line in same])),
            }
        )
    return {"measured": lines}
