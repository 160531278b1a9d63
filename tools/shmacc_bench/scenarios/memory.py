"""How much memory an accumulator holds, against the rows that are in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shmacc_bench.machine import resident_bytes
from shmacc_bench.workload import Workload, make_filling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

HELD = (1_000, 10_000, 100_000, 1_000_000)
WIDTHS = (64, 8, 1)
TABLE_ROWS = 1_000_000
GRADIENT_ROWS = 50_000
INDEX_BYTES = 8
ALLOWED_FACTOR = 1.5
ALLOWED_ROW_BYTES = 16
ALLOWED_BYTES = 2**20


class Scenario:
    """Holds so many rows of so many numbers, each added to twice, and looks."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        """Choose the sizes."""
        self.name = name
        self.peer = peer
        self.held = HELD[:3] if quick else HELD

    def step(self) -> dict[str, Any]:
        """Return the bytes of each size."""
        return {"measured": [self._hold(h, w) for h, w in itertools.product(self.held, WIDTHS)]}

    def _hold(self, held: int, width: int) -> dict[str, Any]:
        before = resident_bytes()
        gradient_rows = min(held, GRADIENT_ROWS)
        filling = make_filling(
            Workload("sparse", gradient_rows, width, table_rows=held), gradient_rows
        )
        workload = Workload("sparse", gradient_rows, width, table_rows=TABLE_ROWS)
        self.peer.open(workload)
        for gradient in filling * 2:  # the second time in place: undo areas count as well
            self.peer.apply(self.peer.prepare(gradient))
        of_gradients = sum(g.values.nbytes + g.indices.nbytes for g in filling)
        resident = resident_bytes() - before - of_gradients
        allocated = self.peer.allocated_bytes()
        self.peer.take(1)
        after_take = self.peer.allocated_bytes()
        self.peer.close()
        rows_bytes = held * (workload.row_bytes + ALLOWED_ROW_BYTES)
        gradient_bytes = gradient_rows * (workload.row_bytes + INDEX_BYTES)
        return {
            "rows": held,
            "width": width,
            "bytes_of_rows": held * workload.row_bytes,
            "allocated": allocated,
            "allocated_after_take": after_take,
            "resident": resident,
            "allowed": round(ALLOWED_FACTOR * rows_bytes + gradient_bytes + ALLOWED_BYTES),
        }

    def close(self) -> None:
        """Nothing is left open."""


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one step there is."""
    return steps[0]
