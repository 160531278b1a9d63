"""Whole rounds with an optimizer's update. As in real batches, ids repeat and are not sorted.

They are timed beside torch code as a user would write it: each worker copies its gradient into its
own shared tensors, the chief makes one sparse tensor of all of them, coalesces it, and lets
`torch.optim.Adagrad` update. Every process has one thread, and works for both sides in turns.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from shmacc import AccumulatorGroup, IndexedSlicesSpec, Parameters, optim
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table
from shmacc_bench.timing import microseconds
from shmacc_bench.workload import IDS, Workload, make_gradient

RATE, BEGIN = 0.05, 0.1
ROUNDS: Final = (
    (dataclasses.replace(IDS, rows=100_000, width=1), 2, 0.33),
    (dataclasses.replace(IDS, width=16), 2, 0.25),
    (IDS, 2, 0.25),
    (dataclasses.replace(IDS, table_rows=100_000), 2, 0.25),
    (IDS, 4, 0.25),
)
"""The workload of each worker, the number of workers, and the goal: the ratio to torch's time."""


def measure(quick: bool) -> Iterator[Table]:
    """Yield the milliseconds of rounds."""
    torch.set_num_threads(1)
    table = Table("Rounds: applies, take, Adagrad (ms)", ("", "shmacc", "torch by hand", "ratio"))
    for workload, workers, goal in ROUNDS:
        job = Job(workload, workers)
        turns = [job.turn() for _ in range(2 + (6 if quick else 20))][2:]
        job.close()
        table.compare(f"{workload.label}, {workers} workers", turns, goal)
    yield table


class Job:
    """The chief, in this process, and its workers."""

    def __init__(self, workload: Workload, workers: int) -> None:
        self.shape = workload.shape
        spec = IndexedSlicesSpec(self.shape, "float32")
        self.group = AccumulatorGroup({"table": spec}, reduction_type="SUM")
        table = np.ones(self.shape, np.float32)
        self.params = Parameters({"table": table}, optimizer=optim.Adagrad(RATE, BEGIN))
        self.weights = torch.nn.Parameter(torch.ones(self.shape))
        self.optimizer = torch.optim.Adagrad(
            [self.weights], lr=RATE, initial_accumulator_value=BEGIN
        )
        rows, width = workload.rows, workload.width
        self.shared = [
            (
                torch.empty(rows, dtype=torch.int64).share_memory_(),
                torch.empty(rows, width).share_memory_(),
            )
            for _ in range(workers)
        ]
        self.workers = [
            Apart(Worker, number, workload, self.group, shared)
            for number, shared in enumerate(self.shared)
        ]

    def turn(self) -> tuple[float, float]:
        """Return the milliseconds of a round by each side."""
        return microseconds(self._by_shmacc) / 1000, microseconds(self._by_torch) / 1000

    def _by_shmacc(self) -> None:
        for worker in self.workers:
            worker.order("apply")
        with self.group.round(len(self.workers)) as taken:
            self.params.update(taken)
        for worker in self.workers:
            worker.answer()

    def _by_torch(self) -> None:
        for worker in self.workers:
            worker.order("copy")
        for worker in self.workers:
            worker.answer()
        ids = torch.cat([ids for ids, _ in self.shared])
        values = torch.cat([values for _, values in self.shared])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            self.weights.grad = torch.sparse_coo_tensor(ids[None], values, self.shape).coalesce()
            self.optimizer.step()

    def close(self) -> None:
        """End the workers, and remove both segments."""
        for worker in self.workers:
            worker.end()
        self.params.close()
        self.group.close()


class Worker:
    """Hands a gradient to shmacc's group, or to torch's shared tensors."""

    def __init__(
        self, number: int, workload: Workload, group: AccumulatorGroup, shared: Any
    ) -> None:
        torch.set_num_threads(1)
        given = make_gradient(workload, number)
        self.number, self.group, self.shared = number, group, shared
        self.gradient = {"table": (given.indices, given.values)}
        self.tensors = torch.from_numpy(given.indices), torch.from_numpy(given.values)

    def apply(self) -> None:
        """Apply the gradient to the group."""
        self.group.apply(self.gradient, self.group.global_step, contributor=self.number)

    def copy(self) -> None:
        """Copy the gradient to the shared tensors."""
        for to, of in zip(self.shared, self.tensors, strict=True):
            to.copy_(of)

    def close(self) -> None:
        """Detach."""
        self.group.close()
