"""How much memory an accumulator holds, beside the rows that are in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_bench.parts.many_tensors import kib_held
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table, figure
from shmacc_bench.workload import Workload, make_filling

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE_ROWS: Final = 1_000_000
GRADIENT_ROWS: Final = 50_000
_MIB: Final = 2**20


class Probe:
    """Holds rows in a process of its own: what a process has freed, it would use again."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.peer = ShmaccPeer()

    def hold(self, held: int, width: int) -> tuple[float, float]:
        """Add to so many rows twice; return the MiB of the segment then and after a take."""
        rows = min(held, GRADIENT_ROWS)
        self.peer.open(Workload("sparse", rows, width, table_rows=TABLE_ROWS))
        for gradient in make_filling(Workload("sparse", rows, width, table_rows=held), rows) * 2:
            self.peer.apply(gradient)  # the second time in place: undo areas count as well
        name = self.peer.accumulator.shared_name
        full = kib_held(name)
        self.peer.take(1)
        return full / 1024, kib_held(name) / 1024

    def close(self) -> None:
        """Remove the segment."""
        self.peer.close()


def measure(quick: bool) -> Iterator[Table]:
    """Yield the memory of each size.

    The goal is 1.5 times the rows and 16 bytes a row, plus a gradient, plus 1 MiB.
    """
    table = Table("Memory (MiB)", ("rows held", "the rows' own", "segment", "after a take"))
    for held in (1_000, 10_000, 100_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        for width in (64, 8, 1):
            probe = Apart(Probe)
            full, after = probe.ask("hold", held, width)
            probe.end()
            what = f"{held:,} x {width}"
            goal = 1.5 * held * (4 * width + 16) + min(held, GRADIENT_ROWS) * (4 * width + 8)
            cell = table.judged(what, full, goal / _MIB + 1)
            table.rows.append((what, figure(held * width * 4 / _MIB), cell, figure(after)))
    yield table
