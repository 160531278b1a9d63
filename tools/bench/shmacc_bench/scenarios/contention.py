"""Takes while applies go on: what each costs the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.crew import Crew
from shmacc_bench.samples import summarise
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

WORKLOAD = Workload("sparse", 1_000, 64)
GRADIENTS = 8
PAUSE_SECONDS = 0.002
WRITER, TAKER = 0, 1


class Scenario:
    """One process applies without a pause, another takes every other millisecond."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        self.window_ns = 100_000_000 if quick else 400_000_000
        self.peer = peer
        peer.open(WORKLOAD)
        self.crew = Crew(name, peer, 2)
        gradients = [make_gradient(WORKLOAD, seed) for seed in range(GRADIENTS)]
        self.crew.ask(WRITER, "use", gradients)

    def step(self) -> dict[str, Any]:
        """Return the writer's rate without and with the taker, and the takes' microseconds."""
        alone, alone_ns = self.crew.ask(WRITER, "apply_for", self.crew.soon(), self.window_ns)
        start = self.crew.soon()
        # The taker stops first: a take that waits must find a writer that still applies.
        self.crew.order(WRITER, "apply_for", start, self.window_ns)
        self.crew.order(TAKER, "take_every", start, self.window_ns * 3 // 4, PAUSE_SECONDS)
        takes = self.crew.answer(TAKER)
        beside, beside_ns = self.crew.answer(WRITER)
        return {
            "alone": alone / alone_ns * 1e9,
            "beside": beside / beside_ns * 1e9,
            "takes": [take / 1000 for take in takes],
        }

    def close(self) -> None:
        """End both processes."""
        self.crew.close()
        self.peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median rates, and the distribution of the takes in microseconds."""
    return {
        "applies_per_second_alone": float(np.median([step["alone"] for step in steps])),
        "applies_per_second_beside_takes": float(np.median([step["beside"] for step in steps])),
        "take": summarise([take for step in steps for take in step["takes"]]),
    }
