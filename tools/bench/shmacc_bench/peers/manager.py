"""multiprocessing's customised manager: the table lives in a process that is asked to change it."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.peers.base import Peer, Reduced
from shmacc_bench.workload import DTYPE, Gradient, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RowTable:
    """What the manager's process holds. Each client has its thread there, hence the condition."""

    def __init__(self, workload: Workload) -> None:
        self.table: NDArray[Any] = np.zeros(workload.shape, DTYPE)
        rows = 1 if workload.kind == "dense" else workload.table_rows
        self.counts = np.zeros(rows, np.int32)
        self.number = 0
        self.condition = threading.Condition()

    def apply(self, indices: NDArray[np.int64], values: NDArray[Any], *, unique: bool) -> None:
        """Add one gradient."""
        with self.condition:
            if not indices.size:
                np.add(self.table, values, out=self.table)
            elif unique:
                self.table[indices] += values
                self.counts[indices] += 1
            else:
                np.add.at(self.table, indices, values)
                np.add.at(self.counts, indices, 1)
            self.number += 1
            self.condition.notify()

    def take(self, num_required: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Divide the rows that were touched, and set them back to nothing."""
        with self.condition:
            self.condition.wait_for(lambda: self.number >= num_required)
            number, self.number = self.number, 0
            if self.table.ndim == 1:
                mean = self.table / number
                self.table[...] = 0
                return np.empty(0, np.int64), mean
            touched = np.flatnonzero(self.counts != 0)
            mean = self.table[touched] / self.counts[touched, None]
            self.table[touched] = 0
            self.counts[touched] = 0
            return touched.astype(np.int64, copy=False), mean


class TableManager(BaseManager):
    """The process that serves the tables."""


TableManager.register("RowTable", RowTable)


class ManagerPeer(Peer):
    """A proxy of the table: every apply pickles the gradient through a socket."""

    how = (
        "a BaseManager with a registered class (NumPy table, fancy add for distinct indices, "
        "np.add.at otherwise) in its own process, called through its proxy"
    )
    counts_occurrences = True
    blocks_in_take = True

    def __init__(self) -> None:
        """Start with nothing open; the manager's process starts with the first workload."""
        self.manager: TableManager | None = None
        self.table: Any = None

    def open(self, workload: Workload) -> None:
        """Make the table in the manager's process."""
        if self.manager is None:
            self.manager = TableManager(ctx=multiprocessing.get_context("spawn"))
            self.manager.start()
        self.table = self.manager.RowTable(workload)  # type: ignore[attr-defined]

    def prepare(self, gradient: Gradient) -> Gradient:
        """Take the arrays as they are."""
        return gradient

    def apply(self, prepared: Gradient) -> None:
        """Send the gradient to the manager's process."""
        self.table.apply(prepared.indices, prepared.values, unique=prepared.unique)

    def take(self, num_required: int) -> Reduced:
        """Ask the manager's process for the mean."""
        return Reduced(*self.table.take(num_required))

    def close(self) -> None:
        """Drop the table; the manager forgets it with its last proxy."""
        self.table = None

    def shutdown(self) -> None:
        """End the manager's process."""
        if self.manager is not None:
            self.manager.shutdown()

    def versions(self) -> dict[str, str]:
        """Return NumPy's version."""
        return {"numpy": np.__version__}

    def ticket(self) -> Any:
        """Return the proxy itself, which pickles while a process is being started."""
        return self.table

    @classmethod
    def join(cls, ticket: Any) -> ManagerPeer:
        """Use the proxy."""
        peer = cls()
        peer.table = ticket
        return peer


PeerImplementation = ManagerPeer
