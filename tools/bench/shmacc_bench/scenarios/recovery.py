"""What a process that is killed inside an apply costs the next one that applies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shmacc_bench.crew import Crew
from shmacc_bench.samples import Summary, summarise
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

WORKLOAD = Workload("sparse", 50_000, 64)  # most of its apply is spent under the lock
KILLS = {"shmacc": 10}  # the others hang at the first one or two; each hang takes its time
FEW_KILLS = 3
PATIENCE_SECONDS = 1.0
SURVIVOR = 0


class Scenario:
    """One process applies on and on and is killed at some moment; another then applies once."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del quick  # it has no target, and is left out then
        self.kills = KILLS.get(name, FEW_KILLS)
        self.peer = peer
        peer.open(WORKLOAD)
        self.crew = Crew(name, peer, 1)
        self.gradients = [make_gradient(WORKLOAD)]
        self.crew.ask(SURVIVOR, "use", self.gradients)

    def step(self) -> dict[str, Any]:
        """Return the survivor's applies in microseconds: ordinary ones, and those after a kill."""
        ordinary = [self._apply() for _ in range(10)]
        after: list[float] = []
        recoveries = self.peer.recoveries()
        for kill in range(self.kills):
            self.crew.add()
            self.crew.wait_joined()
            victim = len(self.crew.pipes) - 1
            self.crew.ask(victim, "use", self.gradients)
            self.crew.order(victim, "apply_on_and_on")
            time.sleep(0.1 + kill * 0.0017)  # not in step with the applies
            self.crew.kill(victim)
            try:
                after.append(self._apply())
            except TimeoutError:  # blocked: for ever, as far as anyone would wait
                return {"ordinary": ordinary, "after": after, "blocked": True, "undone": None}
        undone = self.peer.recoveries()
        hits = None if recoveries is None or undone is None else undone - recoveries
        return {"ordinary": ordinary, "after": after, "blocked": False, "undone": hits}

    def _apply(self) -> float:
        self.crew.order(SURVIVOR, "apply")
        begun, ended = self.crew.answer(SURVIVOR, PATIENCE_SECONDS)
        return float(ended - begun) / 1000

    def close(self) -> None:
        """End the survivor."""
        self.crew.close()
        self.peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions in microseconds, and whether the survivor was left waiting."""
    after = [sample for step in steps for sample in step["after"]]
    found: Summary | None = summarise(after) if after else None
    return {
        "ordinary": summarise([sample for step in steps for sample in step["ordinary"]]),
        "after_kill": found,
        "worst_after_kill": max(after, default=None),
        "blocked_for_ever": any(step["blocked"] for step in steps),
        "undone": steps[0]["undone"],
    }
