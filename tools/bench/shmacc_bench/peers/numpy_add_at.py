"""NumPy by hand, adding with `np.add.at`: right for any indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmacc_bench.peers.numpy_shared import NumpySharedPeer

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient


class NumpyAddAtPeer(NumpySharedPeer):
    """`np.add.at(table, indices, values)`."""

    how = (
        "multiprocessing.shared_memory + Lock; np.add.at(table, indices, values), "
        "np.add.at(counts, indices, 1); take: divide and zero the rows whose count is not 0"
    )
    counts_occurrences = True

    def add(self, prepared: Gradient) -> None:
        """Add the rows and count them, repeats included."""
        np.add.at(self.table, prepared.indices, prepared.values)
        np.add.at(self.counts, prepared.indices, 1)


PeerImplementation = NumpyAddAtPeer
