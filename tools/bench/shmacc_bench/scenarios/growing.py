"""What several processes that all add new rows cost each other while the table grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.crew import Crew
from shmacc_bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

PROCESSES = (1, 2, 4)
TABLE_ROWS = 1_000_000
QUICK_TABLE_ROWS = 100_000
ROWS = 500
WIDTH = 64


class Scenario:
    """Up to four processes that fill an empty table, each apply with rows of its own.

    They apply in turn: so each finds what the others have grown, and none waits for the lock.
    """

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        self.name = name
        self.peer = peer
        self.processes = PROCESSES[:2] if quick else PROCESSES
        self.table_rows = QUICK_TABLE_ROWS if quick else TABLE_ROWS

    def step(self) -> dict[str, Any]:
        """Return the applies' seconds, and the last ones' over the first ones', of each number."""
        return {"measured": [self._fill(processes) for processes in self.processes]}

    def _fill(self, processes: int) -> dict[str, Any]:
        # A new one each time, since an emptied one has its memory already.
        self.peer.open(Workload("sparse", ROWS, WIDTH, table_rows=self.table_rows))
        crew = Crew(self.name, self.peer, processes)
        try:
            stride = ROWS * processes
            for number in range(processes):
                places = range(number * ROWS, self.table_rows - stride + 1 + number * ROWS, stride)
                crew.ask(number, "use_new_rows", places, ROWS, WIDTH)
            turns = self.table_rows // stride
            taken = np.array(
                [crew.ask(n, "apply_next") for _ in range(turns) for n in range(processes)], float
            )
        finally:
            crew.close()
            self.peer.close()
        quarter = len(taken) // 4
        return {
            "rows": self.table_rows,
            "processes": processes,
            "seconds": float(taken.sum()) / 1e9,
            "last_over_first": float(taken[-quarter:].mean() / taken[:quarter].mean()),
        }

    def close(self) -> None:
        """Nothing is left open."""


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the steps."""
    return {
        "measured": [
            same[0]
            | {
                key: float(np.median([line[key] for line in same]))
                for key in ("seconds", "last_over_first")
            }
            for same in zip(*(step["measured"] for step in steps), strict=True)
        ]
    }
