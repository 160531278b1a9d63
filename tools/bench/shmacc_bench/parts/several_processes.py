"""One and two processes that apply: to one accumulator of one or two lanes, or to one each."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import shmacc
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table, figure
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROWS: Final = (10, 1_000, 10_000, 50_000)
WIDTH: Final = 64
PLAIN, OTHER, LANED = range(3)  # accumulators; the last has two lanes
ALONE: Final = "1 process"
TWO_LANES: Final = "2, two lanes"
VARIANTS: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    ALONE: ((PLAIN, 0),),
    "1, two lanes": ((LANED, 0),),
    "2, one lane": ((PLAIN, 0), (PLAIN, 1)),
    TWO_LANES: ((LANED, 0), (LANED, 1)),
    "2, an accumulator each": ((PLAIN, 0), (OTHER, 0)),
}
"""For each variant: accumulators, each with the number of a process that applies to it."""

GOALS: Final = {1_000: 1.7, 10_000: 1.5}  # least gain of two processes with two lanes
_GRADIENTS: Final = 4  # each process applies this many in turn, so that none stays in its cache
_LEAD: Final = 20_000_000  # ns, until all have read their orders


class Applier:
    """A process that applies to an accumulator of another."""

    def __init__(self, name: str) -> None:
        self.accumulator: Any = shmacc.attach(name)

    def use(self, rows: int, first: int) -> None:
        """Make gradients of `rows` rows, with seeds from `first` on, and apply one."""
        workload = Workload("sparse", rows, WIDTH)
        made = [make_gradient(workload, first + number) for number in range(_GRADIENTS)]
        self.gradients = [(one.indices, one.values, None, shmacc.NEVER_STALE) for one in made]
        self.accumulator.apply_grad(*self.gradients[0])

    def apply_for(self, start: int, duration: int) -> float:
        """Apply from a moment on, at least once; return applies a second.

        The moment is of the clock that all processes of a machine share.
        """
        apply, gradients = self.accumulator.apply_grad, self.gradients
        while time.perf_counter_ns() < start:
            pass
        begun = now = time.perf_counter_ns()
        count = 0
        while count == 0 or now < start + duration:
            apply(*gradients[count % _GRADIENTS])
            count += 1
            now = time.perf_counter_ns()
        return count * 1e9 / (now - begun)

    def close(self) -> None:
        """Detach."""
        self.accumulator.close()


def measure(quick: bool) -> Iterator[Table]:
    """Yield the applies a second of all processes together."""
    table = Table("Applies a second, all processes together", ("rows", *VARIANTS))
    with ExitStack() as stack:
        crews: dict[tuple[int, int], Apart] = {}
        peers = []
        for number in (PLAIN, OTHER, LANED):
            peer = ShmaccPeer()
            stack.callback(peer.close)
            peer.open(Workload("sparse", max(ROWS), WIDTH), lanes=1 + (number == LANED))
            peers.append(peer)
            for member in range(1 + (number != OTHER)):
                applier = Apart(Applier, peer.accumulator.shared_name)
                stack.callback(applier.end)
                crews[number, member] = applier
        for rows in ROWS:
            for first, applier in enumerate(crews.values()):
                applier.ask("use", rows, first * _GRADIENTS)
            turns = [
                {how: _rate([crews[place] for place in places], 30 if quick else 50)
                 for how, places in VARIANTS.items()}
                for _ in range(3 if quick else 20)
            ]  # fmt: skip
            for peer in peers:
                peer.take(1)
            cells = [figure(statistics.median(turn[how] for turn in turns)) for how in VARIANTS]
            table.rows.append([f"{rows:,} x {WIDTH}", *cells])
            if rows in GOALS:
                took = statistics.median(turn[ALONE] / turn[TWO_LANES] for turn in turns)
                table.judged(f"{rows:,}: time by two lanes over one", took, 1 / GOALS[rows])
    yield table


def _rate(appliers: Sequence[Apart], milliseconds: int) -> float:
    start = time.perf_counter_ns() + _LEAD
    for applier in appliers:
        applier.order("apply_for", start, milliseconds * 1_000_000)
    return float(sum(applier.answer() for applier in appliers))
