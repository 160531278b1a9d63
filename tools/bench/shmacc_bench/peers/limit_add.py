"""The limit: NumPy adding arrays of the gradient's bytes, with no indices, lock or counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmacc_bench.peers.limit import LimitPeer

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient


class AddLimit(LimitPeer):
    """`np.add(t, v, out=t)`."""

    how = "np.add(t, v, out=t) on two private arrays of the gradient's bytes"

    def apply(self, prepared: Gradient) -> None:
        """Add the values into as many bytes."""
        np.add(self.target, prepared.values, out=self.target)


PeerImplementation = AddLimit
