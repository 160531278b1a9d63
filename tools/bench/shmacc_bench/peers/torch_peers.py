"""torch: a tensor in shared memory, a Lock, and index_add_. Not crash-safe."""

from typing import Any

import torch

from shmacc_bench.peers import Peer, Taken
from shmacc_bench.processes import CONTEXT
from shmacc_bench.workload import Gradient, Workload


class TorchPeer(Peer):
    """One shared tensor holds the whole table, another a count for each row.

    torch chooses the number of threads. A take cannot wait for gradients.
    """

    counts_repeats = True

    def open(self, workload: Workload) -> None:
        """Make the tensors, with a row and a count for every row that could occur."""
        self.dense = workload.kind == "dense"
        rows = 1 if self.dense else workload.table_rows
        self.table: Any = torch.zeros(workload.shape).share_memory_()
        self.counts: Any = torch.zeros(rows, dtype=torch.int32).share_memory_()
        self.lock: Any = CONTEXT.Lock()

    def prepare(self, gradient: Gradient) -> tuple[Any, Any, Any]:
        """Make tensors of the arrays, and a tensor of ones to count rows with."""
        values = torch.from_numpy(gradient.values)
        if gradient.indices is None:
            return None, values, None
        ones = torch.ones(len(gradient.indices), dtype=torch.int32)
        return torch.from_numpy(gradient.indices), values, ones

    def apply(self, prepared: tuple[Any, Any, Any]) -> None:
        """Add one gradient under the lock."""
        indices, values, ones = prepared
        with self.lock:
            if self.dense:
                self.table.add_(values)
                self.counts.add_(1)
            else:
                self.table.index_add_(0, indices, values)
                self.counts.index_add_(0, indices, ones)

    def take(self, num_required: int) -> Taken:
        """Divide the rows that were touched, and set them back to 0."""
        del num_required
        with self.lock:
            if self.dense:
                mean = self.table / self.counts
                self.table.zero_()
                self.counts.zero_()
                return None, mean.numpy()
            touched = torch.nonzero(self.counts).flatten()
            counts = self.counts.index_select(0, touched).unsqueeze(1)
            mean = self.table.index_select(0, touched).div_(counts)
            self.table.index_fill_(0, touched, 0)
            self.counts.index_fill_(0, touched, 0)
        return touched.numpy(), mean.numpy()

    def close(self) -> None:
        """Drop the tensors; torch removes their segments with the last reference."""
        self.table = self.counts = None


class OneThreadPeer(TorchPeer):
    """torch with one thread, as its notes on multiprocessing advise if processes share cores."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
