"""Trains by each way until the judge is satisfied, and makes a table of the results."""

import dataclasses
import importlib
import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from shmacc_bench.compare.model import TARGET, Judge, Task
from shmacc_bench.compare.restarted import CHIEF, Restarted
from shmacc_bench.processes import CONTEXT
from shmacc_bench.tables import Table

WAYS: Final = ("shmacc_synchronous", "shmacc_asynchronous", "hogwild", "ddp", "queues", "ray_actor")
VICTIM: Final = 1
_WORKERS: Final = 2
_POLL: Final = 0.05  # seconds
_PATIENCE: Final = 60.0  # seconds without a judgement


@dataclasses.dataclass
class Run:
    """The result of a run."""

    target: float  # the loss to reach
    # Seconds since the first judgement, steps, and the loss then:
    losses: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)
    stopped: str | None = None  # why it did not reach the target
    killed: float | None = None  # seconds at which a process was killed

    @property
    def seconds(self) -> float:
        """How long it took from the first judgement to the last."""
        return self.losses[-1][0] if self.losses else 0.0

    @property
    def half_way(self) -> float:
        """The loss half-way between the first judged loss and the target."""
        return (self.losses[0][2] + self.target) / 2

    @property
    def began_again(self) -> bool:
        """Whether the first model judged after the death had lost much of what was learnt."""
        after = [loss for moment, _, loss in self.losses if moment > (self.killed or 0)]
        return self.killed is not None and bool(after) and after[0] > self.half_way * 1.1


def compare(ways: Sequence[str], turns: int) -> Table:
    """Train by each way, undisturbed and with each victim killed; return the table of medians."""
    head = ("", "lines", "seconds", "a worker is killed", "the chief is killed")
    table = Table("One model, by each way", head)
    for name in ways:
        cells = [_several(name, turns, victim=who) for who in (None, VICTIM, CHIEF)]
        print(name, *cells, sep="; ", file=sys.stderr)
        table.rows.append((_way(name).TITLE, str(lines(name)), *cells))
    return table


def _several(name: str, turns: int, victim: int | None) -> str:
    """Train several times; return a cell: what a death led to, and the median seconds."""
    runs: list[Run] = []
    while len(runs) < turns:
        runs.append(train(name, victim=victim))
        if runs[-1].stopped is not None:
            return runs[-1].stopped
    again = sum(run.began_again for run in runs)
    how = "" if victim is None else "goes on, " if not again else "begins again, "
    seldom = f" ({again} of {turns} times)" if 0 < again < turns else ""
    return f"{how}{statistics.median(run.seconds for run in runs):.1f} s{seldom}"


def lines(name: str) -> int:
    """Return how many lines of code a way's functions have, without docstrings."""
    count = 0
    for one in vars(_way(name)).values():
        if getattr(one, "__module__", "").startswith("shmacc_bench.compare.ways"):
            text = inspect.getsource(one).splitlines()
            count += sum(bool(line.strip()) and '"""' not in line for line in text)
    return count


def _way(name: str) -> Any:
    return importlib.import_module(f"shmacc_bench.compare.ways.{name}")


def train(name: str, *, victim: int | None = None, target: float = TARGET) -> Run:
    """Train until the target is reached; kill the victim (`CHIEF` or a rank) half-way.

    A process that ends unasked is restarted, a few times. The run also ends after a minute without
    a judgement.
    """
    way, run = _way(name), Run(target)
    receiving, sending = CONTEXT.Pipe(duplex=False)
    processes = Restarted(
        [CHIEF, *way.ranks(_WORKERS)], _play,
        name, way.share(Task(), _WORKERS), target, sending,
        together=way.TOGETHER,
    )  # fmt: skip
    try:
        _follow(run, processes, receiving, victim)
    finally:
        processes.end(patient=run.stopped is None)
    return run


def _follow(run: Run, processes: Restarted, pipe: Connection, victim: int | None) -> None:
    """Record the judge's reports until the run ends."""
    first = 0.0
    heard = time.monotonic()
    while not run.losses or run.losses[-1][2] > run.target:
        if not pipe.poll(_POLL):
            run.stopped = processes.start_again()
            if time.monotonic() - heard > _PATIENCE:
                run.stopped = f"stands still, {_PATIENCE:.0f} s and longer"
            if run.stopped:
                return
            continue
        moment, step, loss = pipe.recv()
        heard = time.monotonic()
        if not run.losses:
            first = moment
        run.losses.append((moment - first, step, loss))
        if victim is not None and run.killed is None and run.target < loss <= run.half_way:
            processes.kill(victim)
            run.killed = time.monotonic() - first


def _play(role: int, name: str, shared: Any, target: float, pipe: Connection) -> None:
    # At the first sparse tensor, torch warns that it does not check invariants.
    warnings.filterwarnings("ignore", category=UserWarning, message="Sparse invariant")
    torch.set_num_threads(1)
    way, task = _way(name), Task()
    if role == CHIEF:
        way.lead(shared, task, _WORKERS, Judge(task, target, pipe))
    else:
        way.work(shared, task, role)
