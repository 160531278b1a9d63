"""How soon a take that waits in another process returns after the last apply."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import shmacc
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table, spread
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKLOAD: Final = Workload("sparse", 10, 64)
_SETTLED: Final = 0.01  # seconds, until the taker surely sleeps; nothing is timed in it


class Side:
    """The taker, or the applier; both return times of a clock that they share."""

    def __init__(self, name: str) -> None:
        self.accumulator: Any = shmacc.attach(name)
        gradient = make_gradient(WORKLOAD)
        self.gradient = gradient.indices, gradient.values, None, shmacc.NEVER_STALE

    def clock(self) -> int:
        """Return when this order was read."""
        return time.perf_counter_ns()

    def apply(self) -> int:
        """Apply; return when it returned."""
        self.accumulator.apply_grad(*self.gradient)
        return time.perf_counter_ns()

    def take(self, required: int, count: int) -> list[int]:
        """Take `count` times; return when each take returned."""
        moments = []
        for _ in range(count):
            self.accumulator.take_grad(required)
            moments.append(time.perf_counter_ns())
        return moments

    def apply_each_step(self, count: int) -> list[int]:
        """Apply once in each of `count` steps, after a pause; return when each apply returned."""
        steps = self.accumulator.steps()
        moments = []
        for _ in range(count):
            next(steps)
            time.sleep(_SETTLED)
            moments.append(self.apply())
        return moments

    def close(self) -> None:
        """Detach."""
        self.accumulator.close()


def measure(quick: bool) -> Iterator[Table]:
    """Yield the microseconds of such a wait, and of a message through a pipe."""
    trials = 15 if quick else 200
    peer = ShmaccPeer()
    peer.open(WORKLOAD)
    taker, applier = (Apart(Side, peer.accumulator.shared_name) for _ in range(2))
    woken, pipe = [], []
    for _ in range(trials):
        taker.order("take", 2, 1)
        applier.ask("apply")
        time.sleep(_SETTLED)
        returned = applier.ask("apply")
        woken.append((taker.answer()[0] - returned) / 1000)
        time.sleep(_SETTLED)
        sent = time.perf_counter_ns()
        pipe.append((taker.ask("clock") - sent) / 1000)
    taker.order("take", 1, trials)
    applied = applier.ask("apply_each_step", trials)
    in_steps = [(b - a) / 1000 for a, b in zip(applied, taker.answer(), strict=True)]
    for side in (taker, applier):
        side.end()
    peer.close()
    table = Table("A waiting take returns after the last apply (us)", ("", "median [p10-p90]"))
    table.rows += [
        ("in another process", spread(woken)),
        ("where workers loop over steps()", spread(in_steps)),
        ("a message through a pipe", spread(pipe)),
    ]
    yield table
