"""How much memory an accumulator holds, against the rows that are in it."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import TYPE_CHECKING, Any

from shmacc_bench.machine import resident_bytes
from shmacc_bench.peers import peer_class
from shmacc_bench.workload import Workload, make_filling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from shmacc_bench.peers.base import Peer

HELD = (1_000, 10_000, 100_000, 1_000_000)
QUICK_HELD = HELD[:3]
WIDTHS = (64, 8, 1)
TABLE_ROWS = 1_000_000
GRADIENT_ROWS = 50_000
INDEX_BYTES = 8
ALLOWED_FACTOR = 1.5
ALLOWED_ROW_BYTES = 16
ALLOWED_BYTES = 2**20
PROBE_SECONDS = 120.0


class Scenario:
    """Holds so many rows of so many numbers, each added to twice, and looks.

    Each size in a process of its own: what a process has freed, it would use again, and a larger
    size after a smaller one would seem to cost nothing.
    """

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del peer  # the probes have their own
        self.name = name
        self.held = QUICK_HELD if quick else HELD

    def step(self) -> dict[str, Any]:
        """Return the bytes of each size."""
        sizes = itertools.product(self.held, WIDTHS)
        return {"measured": [self._probe(held, width) for held, width in sizes]}

    def _probe(self, held: int, width: int) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=probe, args=(self.name, held, width, sender))
        process.start()
        sender.close()
        if not receiver.poll(PROBE_SECONDS):
            process.kill()
        found: dict[str, Any] = (
            receiver.recv()
        )  # EOFError if it failed: its traceback is in the log
        process.join()
        return found

    def close(self) -> None:
        """Nothing is left open."""


def probe(name: str, held: int, width: int, result: Connection) -> None:
    """Hold the rows and send what they take."""
    peer = peer_class(name)()
    gradient_rows = min(held, GRADIENT_ROWS)
    filling = make_filling(Workload("sparse", gradient_rows, width, table_rows=held), gradient_rows)
    workload = Workload("sparse", gradient_rows, width, table_rows=TABLE_ROWS)
    before = resident_bytes()
    peer.open(workload)
    for gradient in filling * 2:  # the second time in place: undo areas count as well
        peer.apply(peer.prepare(gradient))
    resident = resident_bytes() - before
    allocated = peer.allocated_bytes()
    peer.take(1)
    after_take = peer.allocated_bytes()
    peer.close()
    peer.shutdown()
    rows_bytes = held * (workload.row_bytes + ALLOWED_ROW_BYTES)
    gradient_bytes = gradient_rows * (workload.row_bytes + INDEX_BYTES)
    result.send(
        {
            "rows": held,
            "width": width,
            "bytes_of_rows": held * workload.row_bytes,
            "allocated": allocated,
            "allocated_after_take": after_take,
            "resident": resident,
            "allowed": round(ALLOWED_FACTOR * rows_bytes + gradient_bytes + ALLOWED_BYTES),
        }
    )


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one step there is."""
    return steps[0]
