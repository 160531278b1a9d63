"""What no accumulator can beat: the base of the two peers that only move the gradient's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.peers.base import Peer, Reduced, UnsupportedError
from shmacc_bench.workload import DTYPE, Gradient, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LimitPeer(Peer):
    """A private array of the gradient's shape: no shared memory, no lock, nothing to take."""

    has_take = False

    def open(self, workload: Workload) -> None:
        """Make the array."""
        shape = (workload.rows, workload.width) if workload.kind == "sparse" else workload.shape
        self.target: NDArray[Any] = np.zeros(shape, DTYPE)

    def prepare(self, gradient: Gradient) -> Gradient:
        """Take the arrays as they are."""
        return gradient

    def take(self, num_required: int) -> Reduced:
        """Refuse: there is nothing to take."""
        raise UnsupportedError(f"a limit has nothing to take ({num_required} asked)")

    def close(self) -> None:
        """Nothing is shared."""

    def versions(self) -> dict[str, str]:
        """Return NumPy's version."""
        return {"numpy": np.__version__}
