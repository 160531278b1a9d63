"""torch: a tensor in shared memory, a Lock, and index_add_. Not crash-safe."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

# Registers how multiprocessing pickles tensors: without it a ticket would copy the table.
import torch.multiprocessing

from shmacc_bench.peers.base import Peer, Reduced

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient, Workload


class TorchSharedPeer(Peer):
    """The whole table as one shared tensor, and a count per row."""

    how = (
        "tensors after share_memory_() + multiprocessing.Lock; table.index_add_(0, indices, values)"
        ", counts.index_add_(0, indices, ones); take: nonzero(counts), index_select and divide, "
        "index_fill_ with 0; torch's own number of threads; the gradient is a tensor already"
    )
    threads: ClassVar[int | None] = None
    """The number of threads to ask torch for; None: its own choice, all cores."""

    counts_occurrences = True

    def __init__(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def open(self, workload: Workload) -> None:
        """Make the shared tensors: a row, and a count, for each row that there could ever be."""
        self.workload = workload
        rows = 1 if workload.kind == "dense" else workload.table_rows
        self.table: Any = _share(torch.zeros(workload.shape))
        self.counts: Any = _share(torch.zeros(rows, dtype=torch.int32))
        # Spawned crews unpickle it; the context must match theirs.
        self.lock: Any = multiprocessing.get_context("spawn").Lock()

    def prepare(self, gradient: Gradient) -> tuple[Any, Any, Any]:
        """Make tensors of the arrays, and the ones that the counts are counted with."""
        ones = torch.ones(len(gradient.indices), dtype=torch.int32)
        return torch.from_numpy(gradient.indices), torch.from_numpy(gradient.values), ones

    def apply(self, prepared: tuple[Any, Any, Any]) -> None:
        """Add one gradient under the lock."""
        indices, values, ones = prepared
        with self.lock:
            if self.workload.kind == "dense":
                self.table.add_(values)
                self.counts.add_(1)
            else:
                self.table.index_add_(0, indices, values)
                self.counts.index_add_(0, indices, ones)

    def take(self, num_required: int) -> Reduced:
        """Divide the rows that were touched, and set them back to 0. It cannot wait."""
        del num_required
        with self.lock:
            if self.workload.kind == "dense":
                mean = self.table / self.counts
                self.table.zero_()
                self.counts.zero_()
                return Reduced(np.empty(0, np.int64), mean.numpy())
            touched = torch.nonzero(self.counts).flatten()
            counts = self.counts.index_select(0, touched).unsqueeze(1)
            rows = self.table.index_select(0, touched)
            mean = rows.div_(counts)
            self.table.index_fill_(0, touched, 0)
            self.counts.index_fill_(0, touched, 0)
        return Reduced(touched.numpy(), mean.numpy())

    def close(self) -> None:
        """Drop the tensors; torch removes their segments with the last reference."""
        self.table = self.counts = None

    def versions(self) -> dict[str, str]:
        """Return torch's version and its number of threads."""
        return {"torch": torch.__version__, "torch threads": str(torch.get_num_threads())}

    def ticket(self) -> tuple[Workload, Any, Any, Any]:
        """Return the tensors and the lock; torch passes the former as open files."""
        return self.workload, self.table, self.counts, self.lock

    @classmethod
    def join(cls, ticket: tuple[Workload, Any, Any, Any]) -> TorchSharedPeer:
        """Use the same tensors."""
        peer = cls()
        peer.workload, peer.table, peer.counts, peer.lock = ticket
        return peer


def _share(tensor: Any) -> Any:
    return tensor.share_memory_()  # untyped, hence the Anys


PeerImplementation = TorchSharedPeer
