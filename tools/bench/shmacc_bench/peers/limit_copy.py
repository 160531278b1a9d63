"""The limit: copying the gradient's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmacc_bench.peers.limit import LimitPeer

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient


class CopyLimit(LimitPeer):
    """`np.copyto(t, v)`: a memcpy."""

    how = "np.copyto(t, v) on two private arrays of the gradient's bytes"

    def apply(self, prepared: Gradient) -> None:
        """Copy the values over as many bytes."""
        np.copyto(self.target, prepared.values)


PeerImplementation = CopyLimit
