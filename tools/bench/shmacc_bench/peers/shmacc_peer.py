"""shmacc itself, through its public API: nothing here that a user would not write."""

from __future__ import annotations

import itertools
import os
from typing import Any, cast

import numpy as np

import shmacc
from shmacc_bench.machine import SHARED_MEMORY, allocated_bytes
from shmacc_bench.peers.base import Peer, Reduced
from shmacc_bench.workload import DTYPE, Gradient, Workload

_NUMBERS = itertools.count(1)
BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own


class ShmaccPeer(Peer):
    """The accumulator under a shared name, applied to with a step that is never stale."""

    how = "one handle on a shared name; apply_grad(indices, values, local_step=NEVER_STALE)"
    blocks_in_take = True

    def __init__(self) -> None:
        self.accumulator: Any = None
        self.dense = False

    def open(self, workload: Workload, *, lanes: int = 1) -> None:
        """Create the accumulator under a name of its own."""
        self.dense = workload.kind == "dense"
        kind = shmacc.ConditionalAccumulator if self.dense else shmacc.SparseConditionalAccumulator
        name = f"bench.{os.getpid()}.{next(_NUMBERS)}"
        more: Any = {"lanes": lanes} if lanes > 1 else {}  # 1.0.0, a peer as well, has none
        self.accumulator = kind(DTYPE, workload.shape, shared_name=name, **more)

    def prepare(self, gradient: Gradient) -> Gradient:
        """Take the arrays as they are."""
        return gradient

    def apply(self, prepared: Gradient) -> None:
        """Add one gradient."""
        if self.dense:
            self.accumulator.apply_grad(prepared.values, shmacc.NEVER_STALE)
        else:
            self.accumulator.apply_grad(
                prepared.indices, prepared.values, local_step=shmacc.NEVER_STALE
            )

    def take(self, num_required: int) -> Reduced:
        """Take the mean."""
        taken = self.accumulator.take_grad(num_required)
        if self.dense:
            return Reduced(np.empty(0, np.int64), taken)
        return Reduced(taken[0], taken[1])

    def close(self) -> None:
        """Remove the segment, then detach."""
        if self.accumulator is not None:
            self.accumulator.unlink()
            self.accumulator.close()
            self.accumulator = None

    def versions(self) -> dict[str, str]:
        """Return shmacc's version and NumPy's."""
        return {"shmacc": shmacc.__version__, "numpy": np.__version__}

    def allocated_bytes(self) -> int:
        """Return the blocks of the segment's own file, wherever the name's prefix has put it."""
        return allocated_bytes(SHARED_MEMORY.glob(f"shmacc.*{self.accumulator.shared_name}*"))

    def recoveries(self) -> int:
        """Return the segment's own count."""
        return int(self.accumulator.stats().recoveries)

    def ticket(self) -> str:
        """Return the shared name."""
        return cast("str", self.accumulator.shared_name)

    @classmethod
    def join(cls, ticket: str) -> ShmaccPeer:
        """Attach by name."""
        peer = cls()
        peer.accumulator = shmacc.attach(ticket)
        peer.dense = isinstance(peer.accumulator, shmacc.ConditionalAccumulator)
        return peer


PeerImplementation = ShmaccPeer
