"""One or two processes apply: to one accumulator of one or two lanes, or to one each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.crew import Crew
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.samples import paired_ratio
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shmacc_bench.peers.base import Peer

ROWS = (10, 1_000, 10_000, 50_000)
WIDTH = 64
GRADIENTS = 4  # each process applies so many in turn, so that none stays in its cache
PLAIN, OTHER, LANED = range(3)  # accumulators; the last has two lanes
ALONE = "1 process, 1 lane"
VARIANTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    ALONE: ((PLAIN, 0),),
    "1 process, 2 lanes": ((LANED, 0),),
    "2 processes, 1 lane": ((PLAIN, 0), (PLAIN, 1)),
    "2 processes, 2 lanes": ((LANED, 0), (LANED, 1)),
    "2 processes, an accumulator each": ((PLAIN, 0), (OTHER, 0)),
}
"""Accumulators, and each one's process that applies to it."""


class Scenario:
    """All variants have their turns one after the other, many times."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del peer  # there are several, which differ in their lanes
        self.window_ns = 30_000_000 if quick else 50_000_000
        self.turns = 1 if quick else 4
        self.peers = [ShmaccPeer() for _ in (PLAIN, OTHER, LANED)]
        self.crews = []
        for number, of in enumerate(self.peers):
            of.open(Workload("sparse", max(ROWS), WIDTH), lanes=1 + (number == LANED))
            self.crews.append(Crew(name, of, 1 + (number != OTHER)))

    def step(self) -> dict[str, Any]:
        """Return the applies a second of each variant in each turn."""
        rates: dict[tuple[int, str], list[float]] = {}
        for rows in ROWS:
            workload = Workload("sparse", rows, WIDTH)
            for crew in self.crews:
                for number in range(len(crew.pipes)):
                    seeds = range(number * GRADIENTS, (number + 1) * GRADIENTS)
                    crew.ask(number, "use", [make_gradient(workload, seed) for seed in seeds])
                    crew.ask(number, "apply")
            for _ in range(self.turns):
                for how, places in VARIANTS.items():
                    rates.setdefault((rows, how), []).append(self._rate(places))
            for of in self.peers:
                of.take(1)
        return {"rates": [(*variant, of) for variant, of in rates.items()]}

    def _rate(self, places: Sequence[tuple[int, int]]) -> float:
        chosen = [(self.crews[accumulator], number) for accumulator, number in places]
        start = chosen[0][0].soon()
        for crew, number in chosen:
            crew.order(number, "apply_for", start, self.window_ns)
        shares = [crew.answer(number) for crew, number in chosen]
        return float(sum(count / elapsed for count, elapsed in shares) * 1e9)

    def close(self) -> None:
        """End the processes."""
        for crew, peer in zip(self.crews, self.peers, strict=True):
            crew.close()
            peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median rates, and how often as many they are as of one process and one lane."""
    rates: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for rows, how, of in step["rates"]:
            rates.setdefault((rows, how), []).extend(of)
    return {
        "measured": [
            {
                "rows": rows,
                "how": how,
                "applies_per_second": float(np.median(of)),
                "times_alone": paired_ratio(
                    [[rate] for rate in of], [[rate] for rate in rates[rows, ALONE]]
                ),
            }
            for (rows, how), of in rates.items()
        ]
    }
