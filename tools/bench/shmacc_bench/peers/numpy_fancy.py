"""NumPy by hand, adding with fancy indexing: fast, and wrong where an index is repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmacc_bench.peers.base import UnsupportedError
from shmacc_bench.peers.numpy_shared import NumpySharedPeer

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient, Workload


class NumpyFancyPeer(NumpySharedPeer):
    """`table[indices] += values`, which is only right for distinct indices."""

    how = (
        "multiprocessing.shared_memory + Lock; table[indices] += values, counts[indices] += 1 "
        "(right for distinct indices only); take: divide and zero the rows whose count is not 0"
    )

    def open(self, workload: Workload) -> None:
        """Refuse repeats, which `+=` with an index array would lose."""
        if workload.repeats:
            raise UnsupportedError("loses repeated indices")
        super().open(workload)

    def add(self, prepared: Gradient) -> None:
        """Add the rows and count them."""
        self.table[prepared.indices] += prepared.values
        self.counts[prepared.indices] += 1


PeerImplementation = NumpyFancyPeer
