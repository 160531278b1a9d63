"""What one writes by hand: NumPy arrays in multiprocessing.shared_memory behind a Lock.

The base of two peers that differ in the one line that adds. Not crash-safe in any way: a process
that is killed inside `apply` leaves the lock held and the table half changed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from abc import abstractmethod
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.peers.base import Peer, Reduced
from shmacc_bench.workload import DTYPE, Gradient, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NumpySharedPeer(Peer):
    """A table, a count per row and a Lock, all made beforehand.

    The Lock is a Condition's, so that a take can wait; `apply` notifies only when someone waits for
    the number that it reached, and so costs what it costs with a bare Lock otherwise.
    """

    blocks_in_take = True

    def __init__(self) -> None:
        self.memory: list[SharedMemory] = []
        self.owner = True

    def open(self, workload: Workload) -> None:
        """Make the shared arrays: a row, and a count, for each row that there could ever be."""
        counts = 1 if workload.kind == "dense" else workload.table_rows
        table_bytes = int(np.prod(workload.shape)) * DTYPE.itemsize
        sizes = (table_bytes, counts * 4, 16)
        self.memory = [SharedMemory(create=True, size=size) for size in sizes]
        context = multiprocessing.get_context("spawn")  # crews are spawned: theirs must match
        self.condition = context.Condition(context.Lock())
        self._view(workload)

    def _view(self, workload: Workload) -> None:
        self.workload = workload
        table, counts, numbers = self.memory
        self.table = _array(table, DTYPE, workload.shape)
        rows = 1 if workload.kind == "dense" else workload.table_rows
        self.counts = _array(counts, np.dtype(np.int32), (rows,))
        self.numbers = _array(numbers, np.dtype(np.int64), (2,))

    def prepare(self, gradient: Gradient) -> Gradient:
        """Take the arrays as they are."""
        return gradient

    @abstractmethod
    def add(self, prepared: Gradient) -> None:
        """Add the rows and count them, under the lock."""

    def apply(self, prepared: Gradient) -> None:
        """Add one gradient under the lock."""
        with self.condition:
            if self.workload.kind == "dense":
                np.add(self.table, prepared.values, out=self.table)
            else:
                self.add(prepared)
            self.numbers[0] += 1
            if 0 < self.numbers[1] <= self.numbers[0]:
                self.condition.notify()

    def take(self, num_required: int) -> Reduced:
        """Divide the rows that were touched, and set them back to nothing."""
        with self.condition:
            self.numbers[1] = num_required
            self.condition.wait_for(lambda: bool(self.numbers[0] >= num_required))
            self.numbers[1] = 0
            if self.workload.kind == "dense":
                mean = self.table / self.numbers[0]
                self.table[...] = 0
                self.numbers[0] = 0
                return Reduced(np.empty(0, np.int64), mean)
            # The comparison costs less than it saves: NumPy finds True much faster than not-0.
            touched = np.flatnonzero(self.counts != 0)
            values = self.table[touched]
            values = values / self.counts[touched, None]
            self.table[touched] = 0
            self.counts[touched] = 0
            self.numbers[0] = 0
        return Reduced(touched.astype(np.int64, copy=False), values)

    def close(self) -> None:
        """Unmap and, for the one who made them, remove the segments."""
        for attribute in ("table", "counts", "numbers"):
            with contextlib.suppress(AttributeError):
                delattr(self, attribute)  # a view that is left would keep the mapping open
        for memory in self.memory:
            memory.close()
            if self.owner:
                memory.unlink()
        self.memory = []

    def versions(self) -> dict[str, str]:
        """Return NumPy's version."""
        return {"numpy": np.__version__}

    def ticket(self) -> tuple[Workload, list[SharedMemory], Any]:
        """Return the segments and the lock; both pickle while a process is being started."""
        return self.workload, self.memory, self.condition

    @classmethod
    def join(cls, ticket: tuple[Workload, list[SharedMemory], Any]) -> NumpySharedPeer:
        """View the same segments."""
        peer = cls()
        workload, peer.memory, peer.condition = ticket
        peer.owner = False
        peer._view(workload)  # a classmethod is inside its class
        return peer


def _array(memory: SharedMemory, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the segment as an array; the segment itself is rounded up to whole pages."""
    return np.ndarray(shape, dtype, memory.buf)
