"""shmacc, by its public API: nothing here that a user would not write."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import shmacc
from shmacc_bench.peers.base import Peer
from shmacc_bench.workload import DTYPE, Gradient, Workload

if TYPE_CHECKING:
    from shmacc_bench.peers.base import Taken

_NUMBERS = itertools.count(1)


class ShmaccPeer(Peer):
    """An accumulator under a shared name, applied to with a step that is never stale."""

    accumulator: Any = None

    def open(self, workload: Workload, *, lanes: int = 1) -> None:
        """Create the accumulator under a name of its own."""
        dense = workload.kind == "dense"
        kind = shmacc.ConditionalAccumulator if dense else shmacc.SparseConditionalAccumulator
        name = f"bench.{os.getpid()}.{next(_NUMBERS)}"
        self.accumulator = kind(DTYPE, workload.shape, shared_name=name, lanes=lanes)

    def apply(self, prepared: Gradient) -> None:
        """Add one gradient."""
        if prepared.indices is None:
            self.accumulator.apply_grad(prepared.values, shmacc.NEVER_STALE)
        else:
            self.accumulator.apply_grad(
                prepared.indices, prepared.values, local_step=shmacc.NEVER_STALE
            )

    def take(self, num_required: int) -> Taken:
        """Take the mean."""
        taken = self.accumulator.take_grad(num_required)
        return (taken[0], taken[1]) if isinstance(taken, tuple) else (None, taken)

    def close(self) -> None:
        """Remove the segment, then detach."""
        if self.accumulator is not None:
            self.accumulator.unlink()
            self.accumulator.close()
            self.accumulator = None
