"""What lanes are for: one or two processes apply to one accumulator of one or two lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.crew import Crew
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.samples import paired_ratio
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

ROWS = (1_000, 10_000)
WIDTH = 64
ALONE = (1, 1)
VARIANTS = (ALONE, (1, 2), (2, 1), (2, 2))  # lanes, processes
GRADIENTS = 4  # each process applies so many in turn, so that none stays in its cache


class Scenario:
    """All variants have their turns one after the other, many times."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del peer  # there are two, which differ in their lanes
        self.window_ns = 50_000_000 if quick else 100_000_000
        self.turns = 2 if quick else 15
        self.peers = [ShmaccPeer(), ShmaccPeer()]
        self.crews = []
        for lanes, of_lanes in enumerate(self.peers, start=1):
            of_lanes.open(Workload("sparse", max(ROWS), WIDTH), lanes=lanes)
            self.crews.append(Crew(name, of_lanes, 2))

    def step(self) -> dict[str, Any]:
        """Return the applies a second of each variant in each turn."""
        rates: dict[tuple[int, int, int], list[float]] = {}
        for rows in ROWS:
            workload = Workload("sparse", rows, WIDTH)
            for crew in self.crews:
                for number in range(2):
                    seeds = range(number * GRADIENTS, (number + 1) * GRADIENTS)
                    crew.ask(number, "use", [make_gradient(workload, seed) for seed in seeds])
            for _ in range(self.turns):
                for lanes, processes in VARIANTS:
                    rate = self._rate(self.crews[lanes - 1], processes)
                    rates.setdefault((rows, lanes, processes), []).append(rate)
            for of_lanes in self.peers:
                of_lanes.take(1)
        return {"rates": [(*variant, of) for variant, of in rates.items()]}

    def _rate(self, crew: Crew, processes: int) -> float:
        start = crew.soon()
        for number in range(processes):
            crew.order(number, "apply_for", start, self.window_ns)
        shares = [crew.answer(number) for number in range(processes)]
        return float(sum(count / elapsed for count, elapsed in shares) * 1e9)

    def close(self) -> None:
        """End the processes."""
        for crew, peer in zip(self.crews, self.peers, strict=True):
            crew.close()
            peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median rates, and how often as many they are as of one process and one lane."""
    rates: dict[tuple[int, int, int], list[float]] = {}
    for step in steps:
        for rows, lanes, processes, of in step["rates"]:
            rates.setdefault((rows, lanes, processes), []).extend(of)
    return {
        "measured": [
            {
                "rows": rows,
                "lanes": lanes,
                "processes": processes,
                "applies_per_second": float(np.median(of)),
                "times_alone": paired_ratio(
                    [[rate] for rate in of], [[rate] for rate in rates[rows, *ALONE]]
                ),
            }
            for (rows, lanes, processes), of in rates.items()
        ]
    }
