"""Whole rounds of several processes, with ids as real ones are: they repeat, and are not sorted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shmacc_bench.cases import IDS
from shmacc_bench.crew import Crew
from shmacc_bench.samples import summarise
from shmacc_bench.workload import make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

PROCESSES = (1, 2, 4)
WARM_UP = 2


class Scenario:
    """Each worker has a gradient of its own; frequent ids are in all of them."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        self.processes = PROCESSES[:2] if quick else PROCESSES
        self.rounds = 3 if quick else 15
        self.peer = peer
        peer.open(IDS)
        self.crew = Crew(name, peer, max(self.processes))
        for number in range(max(self.processes)):
            self.crew.ask(number, "use", [make_gradient(IDS, number)])

    def step(self) -> dict[str, Any]:
        """Return the milliseconds of the rounds of each number of processes."""
        measured = []
        for processes in self.processes:
            taken = [self._round(processes) for _ in range(WARM_UP + self.rounds)]
            measured.append({"processes": processes, "rounds": taken[WARM_UP:]})
        return {"measured": measured}

    def _round(self, processes: int) -> float:
        """Have all apply at once, take here; who has no take that waits learns by the answers."""
        begun = time.perf_counter_ns()
        for number in range(processes):
            self.crew.order(number, "apply")
        for number in range(processes):
            self.crew.answer(number)
        self.peer.take(processes)
        return (time.perf_counter_ns() - begun) / 1e6

    def close(self) -> None:
        """End the processes."""
        self.crew.close()
        self.peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions over all steps, in milliseconds."""
    return {
        "measured": [
            {
                "processes": same[0]["processes"],
                "round": summarise([ms for line in same for ms in line["rounds"]]),
            }
            for same in zip(*(step["measured"] for step in steps), strict=True)
        ]
    }
