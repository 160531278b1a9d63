"""A hand-written accumulator: NumPy arrays in multiprocessing.shared_memory behind a Lock.

Not crash-safe: a process that is killed in `apply` leaves the lock held and the table half changed.
"""

from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from shmacc_bench.peers import Peer, Taken
from shmacc_bench.processes import CONTEXT
from shmacc_bench.workload import DTYPE, Gradient, Workload


class NumpyPeer(Peer):
    """A table and a count for each row, all made beforehand.

    It adds by `table[rows] += values` if the rows are distinct, else by `np.add.at`.
    """

    counts_repeats = True

    def open(self, workload: Workload) -> None:
        """Make the arrays, with a row and a count for every row that could occur."""
        self.dense = workload.kind == "dense"
        rows = 1 if self.dense else workload.table_rows
        sizes = (int(np.prod(workload.shape)) * DTYPE.itemsize, rows * 4)
        self.memory = [SharedMemory(create=True, size=size) for size in sizes]
        self.table: Any = np.ndarray(workload.shape, DTYPE, self.memory[0].buf)
        self.counts: Any = np.ndarray(rows, np.int32, self.memory[1].buf)
        self.lock = CONTEXT.Lock()

    def apply(self, prepared: Gradient) -> None:
        """Add one gradient under the lock."""
        with self.lock:
            if self.dense:
                np.add(self.table, prepared.values, out=self.table)
                self.counts += 1
            elif prepared.unique:
                self.table[prepared.indices] += prepared.values
                self.counts[prepared.indices] += 1
            else:
                np.add.at(self.table, prepared.indices, prepared.values)
                np.add.at(self.counts, prepared.indices, 1)

    def take(self, num_required: int) -> Taken:
        """Divide the rows that were touched, and set them back to 0."""
        del num_required
        with self.lock:
            if self.dense:
                mean = self.table / self.counts
                self.table[...] = self.counts[...] = 0
                return None, mean
            # Comparing saves time: NumPy finds True much faster than numbers other than 0.
            touched = np.flatnonzero(self.counts != 0)
            mean = self.table[touched] / self.counts[touched, None]
            self.table[touched] = 0
            self.counts[touched] = 0
        return touched, mean

    def close(self) -> None:
        """Unmap and remove the segments."""
        self.table = self.counts = None  # a view that is left would keep the mapping open
        for memory in self.memory:
            memory.close()
            memory.unlink()


class AddLimit(Peer):
    """`np.add` of the same number of bytes: no shared memory, lock or indices, nothing to take."""

    has_take = False

    def open(self, workload: Workload) -> None:
        """Make an array of the gradient's shape."""
        dense = workload.kind == "dense"
        self.target = np.zeros(workload.shape if dense else (workload.rows, workload.width), DTYPE)

    def apply(self, prepared: Gradient) -> None:
        """Add the values."""
        np.add(self.target, prepared.values, out=self.target)

    def close(self) -> None:
        """Do nothing: nothing is shared."""
