"""Whole rounds with an optimizer's update, of ids as real ones are: repeated, and not sorted.

Beside torch as one writes it by hand: each worker copies its gradient into shared tensors of its
own, the chief makes one sparse tensor of them, coalesces it, and lets `torch.optim.Adagrad` update.
Each has one thread a process. A worker does both in turns, so that both have the same neighbours.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc import AccumulatorGroup, IndexedSlicesSpec, Parameters, optim
from shmacc_bench.cases import IDS
from shmacc_bench.peers.base import UnsupportedError
from shmacc_bench.samples import paired_ratio, summarise
from shmacc_bench.workload import Workload, make_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from shmacc_bench.peers.base import Peer

RATE, BEGIN = 0.05, 0.1
TURNS, FEW_TURNS = 4, 2  # in a step
WARM_UP = 2
START_SECONDS, STOP_SECONDS = 120.0, 10.0
ROUNDS: Sequence[tuple[Workload, int, float]] = (
    (dataclasses.replace(IDS, rows=100_000, width=1), 2, 0.33),
    (IDS, 2, 0.25),
    (dataclasses.replace(IDS, width=16), 2, 0.25),
    (dataclasses.replace(IDS, table_rows=100_000), 2, 0.25),
    (IDS, 4, 0.25),
)
"""A worker's gradient and the table, the number of workers, and the target: times torch's."""


class Scenario:
    """All rounds have their workers from the beginning; those that have no order sleep."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del name, peer  # an accumulator alone has no parameters
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise UnsupportedError(str(error)) from error
        torch.set_num_threads(1)
        self.turns = FEW_TURNS if quick else TURNS
        self.jobs = [Job(torch, workload, workers) for workload, workers, _ in ROUNDS]
        for job in self.jobs:
            job.wait()
        for job in self.jobs * WARM_UP:
            job.turn()

    def step(self) -> dict[str, Any]:
        """Return the milliseconds of shmacc's rounds and of torch's, in pairs."""
        return {"turns": [[job.turn() for _ in range(self.turns)] for job in self.jobs]}

    def close(self) -> None:
        """End the processes."""
        for job in self.jobs:
            job.close()


class Job:
    """The chief of both, in this process, and its workers."""

    def __init__(self, torch: Any, workload: Workload, workers: int) -> None:
        self.torch, self.shape = torch, workload.shape
        self.group = AccumulatorGroup(
            {"table": IndexedSlicesSpec(self.shape, "float32")}, reduction_type="SUM"
        )
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
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for number, shared in enumerate(self.shared):
            pipe, other = context.Pipe()
            arguments = (number, workload, other, self.group, shared)
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)

    def wait(self) -> None:
        """Wait until all workers have done what they were asked to."""
        for pipe in self.pipes:
            if not pipe.poll(START_SECONDS):
                raise TimeoutError("a worker did not answer")
            pipe.recv()

    def turn(self) -> tuple[float, float]:
        """Return the milliseconds of a round of each."""
        return _timed(self._by_shmacc), _timed(self._by_torch)

    def _order(self, whose: str) -> None:
        for pipe in self.pipes:
            pipe.send(whose)

    def _by_shmacc(self) -> None:
        self._order("shmacc")
        with self.group.round(len(self.pipes)) as taken:
            self.params.update(taken)
        self.wait()

    def _by_torch(self) -> None:
        self._order("torch")
        self.wait()
        torch = self.torch
        ids = torch.cat([ids for ids, _ in self.shared])
        values = torch.cat([values for _, values in self.shared])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            self.weights.grad = torch.sparse_coo_tensor(ids[None], values, self.shape).coalesce()
            self.optimizer.step()

    def close(self) -> None:
        """End the workers, and remove both segments."""
        self._order("")
        for process in self.processes:
            process.join(STOP_SECONDS)
        self.params.close()
        self.group.close()


def work(
    number: int, workload: Workload, pipe: Connection, group: AccumulatorGroup, shared: Any
) -> None:
    """Be a worker of both: apply, or copy, when asked to."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    given = make_gradient(workload, number)
    gradient = {"table": (given.indices, given.values)}
    tensors = torch.from_numpy(given.indices), torch.from_numpy(given.values)
    pipe.send(None)
    while asked := pipe.recv():
        if asked == "shmacc":
            group.apply(gradient, group.global_step, contributor=number)
        else:
            for to, of in zip(shared, tensors, strict=True):
                to.copy_(of)
        pipe.send(None)


def _timed(call: Callable[[], None]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e6


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions in milliseconds, and the paired ratio."""
    measured = []
    for at, (workload, workers, limit) in enumerate(ROUNDS):
        turns = list(itertools.chain.from_iterable(step["turns"][at] for step in steps))
        mine, theirs = ([turn[side] for turn in turns] for side in (0, 1))
        usual = "" if "into" in workload.label else f" into {workload.table_rows:,}"
        measured.append(
            {
                "what": f"{workload.label}{usual}, {workers} workers",
                "limit": limit,
                "shmacc": summarise(mine),
                "torch": summarise(theirs),
                "ratio": paired_ratio([[ms] for ms in mine], [[ms] for ms in theirs]),
            }
        )
    return {"measured": measured}
