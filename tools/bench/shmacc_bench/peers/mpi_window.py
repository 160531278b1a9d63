"""MPI: a window of shared memory on one rank, changed with MPI_Accumulate.

This worker is rank 0 of its own `mpiexec` (see `fleet`), and the window's memory is its own: MPICH
grants a lock on another rank's window only when that rank itself calls into MPI, so that an apply
takes as long as the owner is busy elsewhere (measured: 40 ms with an owner that looks in every
20 ms, against 6 us). The second rank makes the window a really shared one, and sleeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from shmacc_bench.peers.base import Peer, Reduced
from shmacc_bench.peers.mpi_idle import tell_idlers
from shmacc_bench.workload import DTYPE, Gradient, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

OWNER = 0


class MpiWindowPeer(Peer):
    """Two windows (rows and counts); an apply is one epoch of two Accumulates."""

    how = (
        "mpiexec -n 2; Win.Allocate_shared on the applying rank, exclusive Win.Lock; Accumulate "
        "(SUM) of values and of ones with an indexed-block datatype of the rows (repeats are "
        "not allowed there, so they are summed by NumPy first); take: through Shared_query"
    )

    def open(self, workload: Workload) -> None:
        """Make the windows, together with the rank that only owns them."""
        self.workload = workload
        rows = 1 if workload.kind == "dense" else workload.table_rows
        sizes = (int(np.prod(workload.shape)) * DTYPE.itemsize, rows * 4)
        tell_idlers(("open", len(sizes)))
        self.windows = [MPI.Win.Allocate_shared(size, 1, comm=MPI.COMM_WORLD) for size in sizes]
        table: Any
        counts: Any
        table, counts = (window.Shared_query(OWNER)[0] for window in self.windows)
        self.table: NDArray[Any] = np.frombuffer(table, DTYPE).reshape(workload.shape)
        self.counts: NDArray[np.int32] = np.frombuffer(counts, np.int32)
        self.table[...] = 0  # a new window's bytes are whatever they are
        self.counts[...] = 0

    def prepare(self, gradient: Gradient) -> Gradient:
        """Take the arrays as they are."""
        return gradient

    def apply(self, prepared: Gradient) -> None:
        """Accumulate the rows and their counts."""
        rows, numbers = self.windows
        if self.workload.kind == "dense":
            one = np.ones(1, np.int32)
            rows.Lock(OWNER, MPI.LOCK_EXCLUSIVE)
            rows.Accumulate(prepared.values, OWNER, op=MPI.SUM)
            numbers.Lock(OWNER, MPI.LOCK_EXCLUSIVE)
            numbers.Accumulate(one, OWNER, op=MPI.SUM)
            numbers.Unlock(OWNER)
            rows.Unlock(OWNER)
            return
        indices, values = prepared.indices, prepared.values
        if not prepared.unique:
            order = np.argsort(indices, kind="stable")
            indices, starts = np.unique(indices[order], return_index=True)
            values = np.add.reduceat(values[order], starts)
        row = MPI.FLOAT.Create_contiguous(self.workload.width)
        places = row.Create_indexed_block(1, indices.tolist()).Commit()
        count_places = MPI.INT.Create_indexed_block(1, indices.tolist()).Commit()
        ones = np.ones(indices.size, np.int32)
        rows.Lock(OWNER, MPI.LOCK_EXCLUSIVE)
        rows.Accumulate(values, OWNER, target=(0, 1, places), op=MPI.SUM)
        numbers.Lock(OWNER, MPI.LOCK_EXCLUSIVE)
        numbers.Accumulate(ones, OWNER, target=(0, 1, count_places), op=MPI.SUM)
        numbers.Unlock(OWNER)
        rows.Unlock(OWNER)
        for datatype in (places, count_places, row):
            datatype.Free()

    def take(self, num_required: int) -> Reduced:
        """Divide the rows that were touched and zero them, in the shared memory itself."""
        del num_required  # nothing in MPI waits for a number of accumulates
        rows = self.windows[0]
        rows.Lock(OWNER, MPI.LOCK_EXCLUSIVE)
        rows.Sync()
        if self.workload.kind == "dense":
            indices, mean = np.empty(0, np.int64), self.table / self.counts[0]
            self.table[...] = 0
            self.counts[0] = 0
        else:
            indices = np.flatnonzero(self.counts != 0).astype(np.int64, copy=False)
            mean = self.table[indices] / self.counts[indices, None]
            self.table[indices] = 0
            self.counts[indices] = 0
        rows.Sync()
        rows.Unlock(OWNER)
        return Reduced(indices, mean)

    def close(self) -> None:
        """Free the windows, together with their owner."""
        del self.table, self.counts
        tell_idlers(("close",))
        for window in self.windows:
            window.Free()

    def shutdown(self) -> None:
        """Let the other rank go; MPI is finalised at exit, by both."""
        tell_idlers(("stop",))

    def versions(self) -> dict[str, str]:
        """Return the MPI library's version."""
        library = MPI.Get_library_version().split("\n")[0].split()
        return {"mpi": " ".join(library)}


PeerImplementation = MpiWindowPeer
