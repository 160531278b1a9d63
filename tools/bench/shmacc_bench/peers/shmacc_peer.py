"""shmacc, through its public API, as a user would call it."""

import os
from typing import Any

import shmacc
from shmacc_bench.peers import Peer, Taken
from shmacc_bench.workload import DTYPE, Gradient, Workload


class ShmaccPeer(Peer):
    """An accumulator under a shared name; gradients are applied with a step that is never stale."""

    def open(self, workload: Workload) -> None:
        """Create the accumulator under a name that has this process's pid."""
        dense = workload.kind == "dense"
        kind = shmacc.ConditionalAccumulator if dense else shmacc.SparseConditionalAccumulator
        self.accumulator: Any = kind(
            DTYPE, workload.shape, shared_name=f"bench.{os.getpid()}", unlink_on_close=True
        )

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
        """Detach, and remove the segment."""
        self.accumulator.close()
