"""What all ways have in common: processes, a supervisor that starts dead ones again, and a judge."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import psutil
import torch

from shmacc_compare.tasks import TASKS, Task

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

CHIEF: Final = -1
EVERY: Final = 20  # steps from one judgement to the next
_CONTEXT: Final = multiprocessing.get_context("spawn")
_POLL: Final = 0.05
_RESTARTS: Final = 3


class Judge:
    """Tells the frame of the loss, from the process that has the model."""

    def __init__(self, task: Task, pipe: Connection) -> None:
        """Judge this task's model."""
        self._task, self._pipe = task, pipe

    def satisfied(self, model: torch.nn.Module, step: int) -> bool:
        """Return whether the model has learnt enough; it is looked at once in EVERY steps."""
        if step == 0 or step % EVERY:
            return False
        loss = self._task.judge(model)
        self._pipe.send((time.monotonic(), step, loss))
        return loss <= self._task.target


class Way(Protocol):
    """A module of `ways`: how gradients get to the model, and the model to the workers."""

    def ranks(self, workers: int) -> range:
        """Return those of the workers that are processes beside the chief."""

    def share(self, task: Task, workers: int) -> Any:
        """Return what all processes are given."""

    def lead(self, shared: Any, task: Task, workers: int, judge: Judge) -> None:
        """Be the process that judges, until it is satisfied."""

    def work(self, shared: Any, task: Task, rank: int) -> None:
        """Be a worker, until the chief has finished."""


@dataclasses.dataclass
class Run:
    """What became of a run.

    Attributes:
        losses: Seconds since the first judgement, steps, and the loss then.
        busy: Seconds of processors, of all processes, from the first judgement to the last.
        ended: How: "reached", or what stood in the way.
        killed: The seconds at which somebody was killed.
    """

    losses: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)
    busy: float = 0.0
    ended: str = "reached"
    killed: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took from the first judgement to the last."""
        return self.losses[-1][0] if self.losses else 0.0


def way_of(name: str) -> Way:
    """Return the module of this name."""
    found: Any = importlib.import_module(f"shmacc_compare.ways.{name}")
    return found  # type: ignore[no-any-return]


def train(
    name: str,
    task_name: str,
    workers: int = 2,
    *,
    victim: int | None = None,
    target: float | None = None,
    patience: float = 60.0,
) -> Run:
    """Train until the target is reached; kill the victim (`CHIEF`, a rank) half-way.

    A process that ends without having been asked to is started again, a few times. No judgement
    for `patience` seconds is the end.
    """
    way, task = way_of(name), TASKS[task_name]()
    target = task.target if target is None else target
    shared = way.share(task, workers)
    pipe, its = _CONTEXT.Pipe(duplex=False)
    roles = [CHIEF, *way.ranks(workers)]

    def started(role: int) -> BaseProcess:
        process = _CONTEXT.Process(
            target=_play, args=(name, task_name, workers, role, shared, its, target)
        )
        process.start()
        return process

    crew = {role: started(role) for role in roles}
    run, restarts, first, heard, busy = Run(), 0, 0.0, time.monotonic() + patience, 0.0
    half = None  # the loss at which somebody is killed
    try:
        while True:
            if pipe.poll(_POLL):
                moment, step, loss = pipe.recv()
                heard = time.monotonic()
                if not run.losses:
                    first, busy = moment, _busy()
                    half = (loss + target) / 2
                run.losses.append((moment - first, step, loss))
                if loss <= target:
                    run.busy = _busy() - busy
                    return run
                if victim is not None and run.killed is None and half and loss <= half:
                    os.kill(_pid_of(crew, victim), signal.SIGKILL)
                    run.killed = time.monotonic() - first
                continue
            if time.monotonic() - heard > patience:
                run.ended = f"stands still: nothing for {patience:.0f} s"
                return run
            for role, process in crew.items():
                if process.exitcode is not None:
                    if restarts == _RESTARTS:
                        run.ended = f"ends: {'chief' if role == CHIEF else 'worker'} {process.exitcode}"
                        return run
                    restarts += 1
                    crew[role] = started(role)
    finally:
        for process in crew.values():
            process.join(2 if run.ended == "reached" else 0)
            process.kill()
            process.join()
        for child in _children():
            child.kill()


def _play(
    name: str, task_name: str, workers: int, role: int, shared: Any, pipe: Connection, target: float
) -> None:
    torch.set_num_threads(1)
    way, task = way_of(name), TASKS[task_name]()
    task.target = target
    if role == CHIEF:
        way.lead(shared, task, workers, Judge(task, pipe))
    else:
        way.work(shared, task, role)


def _pid_of(crew: dict[int, BaseProcess], victim: int) -> int:
    if victim in crew:
        return crew[victim].pid or 0
    # Of a way that has processes of its own: those that have computed most are its workers.
    return max(_children(), key=_seconds_of).pid


def _busy() -> float:
    """Return the processor time of all processes that this one has started."""
    return sum(map(_seconds_of, _children()))


def _children() -> list[psutil.Process]:
    """Return all processes that come from this one, but that of multiprocessing's own."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "resource_tracker" not in " ".join(_line_of(one))]


def _line_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
