"""How long after the last apply a take that waits in another process returns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shmacc_bench.crew import Crew
from shmacc_bench.peers.base import UnsupportedError
from shmacc_bench.samples import summarise
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

WORKLOAD = Workload("sparse", 10, 64)  # so small that the copy is nothing
TAKER, APPLIER = 0, 1
SETTLE_SECONDS = 0.01  # until the taker surely sleeps; nothing is timed in it


class Scenario:
    """One process waits in a take of two, another applies twice."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        if not peer.blocks_in_take:
            raise UnsupportedError("its take cannot wait")
        self.trials = 5 if quick else 20
        self.has_steps = name == "shmacc"
        self.peer = peer
        peer.open(WORKLOAD)
        self.crew = Crew(name, peer, 2)
        for number in (TAKER, APPLIER):
            self.crew.ask(number, "use", [make_gradient(WORKLOAD)])

    def step(self) -> dict[str, Any]:
        """Return microseconds from the call, and from the return, of the last apply.

        And, as what no waiting process can be faster than here, those that a message through a
        pipe takes to be read by a process that waits for it.
        """
        from_call, from_return, pipe = [], [], []
        for _ in range(self.trials):
            self.crew.order(TAKER, "take", 2)
            self.crew.ask(APPLIER, "apply")
            time.sleep(SETTLE_SECONDS)
            called, returned = self.crew.ask(APPLIER, "apply")
            _, woken = self.crew.answer(TAKER)
            from_call.append((woken - called) / 1000)
            from_return.append((woken - returned) / 1000)
            time.sleep(SETTLE_SECONDS)
            sent = time.perf_counter_ns()
            pipe.append((self.crew.ask(TAKER, "clock") - sent) / 1000)
        measured = {"from_call": from_call, "from_return": from_return, "pipe": pipe}
        return measured | (self._with_steps() if self.has_steps else {})

    def _with_steps(self) -> dict[str, Any]:
        """Have the applier wait in `steps()` between its applies, and no order come between."""
        self.crew.order(TAKER, "take_each", self.trials)
        times = self.crew.ask(APPLIER, "apply_each_step", self.trials, SETTLE_SECONDS)
        taken = self.crew.answer(TAKER)
        returned = [returned for _, returned in times]
        came = [came for came, _ in times]
        return {
            "with_steps": [(t - r) / 1000 for t, r in zip(taken, returned, strict=True)],
            "next_step": [(c - t) / 1000 for c, t in zip(came[1:], taken, strict=False)],
        }

    def close(self) -> None:
        """End both processes."""
        self.crew.close()
        self.peer.close()


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions, in microseconds."""
    return {key: summarise([sample for step in steps for sample in step[key]]) for key in steps[0]}
