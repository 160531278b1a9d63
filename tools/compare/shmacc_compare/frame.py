"""What all ways have in common: a judge of the model, and a run until it is satisfied."""

from __future__ import annotations

import dataclasses
import importlib
import time
import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from shmacc_compare.crew import CHIEF, CONTEXT, Crew
from shmacc_compare.tasks import TASKS, Task

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

EVERY: Final = 20  # steps from one judgement to the next
_POLL: Final = 0.05  # seconds


class Judge:
    """Tells the frame of the loss, from the process that has the model."""

    def __init__(self, task: Task, target: float, pipe: Connection) -> None:
        """Judge this task's model."""
        self._task, self._target, self._pipe = task, target, pipe

    def satisfied(self, model: torch.nn.Module, step: int) -> bool:
        """Return whether the model has learnt enough; it is looked at once in EVERY steps."""
        if step == 0 or step % EVERY:
            return False
        loss = self._task.judge(model)
        self._pipe.send((time.monotonic(), step, loss))
        return loss <= self._target


class Way(Protocol):
    """A module of `ways`: how gradients get to the model, and the model to the workers."""

    TITLE: str
    TOGETHER: bool  # whether one's death ends all, which are started again together

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
        target: The loss that was to be reached.
        losses: Seconds since the first judgement, steps, and the loss then.
        busy: Seconds of processors, of all processes that lived to the end, from the first
            judgement to the last.
        stopped: What stood in the way of the target.
        killed: The seconds at which somebody was killed.
    """

    target: float
    losses: list[tuple[float, int, float]] = dataclasses.field(default_factory=list)
    busy: float = 0.0
    stopped: str | None = None
    killed: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took from the first judgement to the last."""
        return self.losses[-1][0] if self.losses else 0.0

    @property
    def half_way(self) -> float:
        """The loss in the middle between the first that was judged and the target."""
        return (self.losses[0][2] + self.target) / 2

    @property
    def began_again(self) -> bool:
        """Whether the first model that was judged after the death had learnt less than before."""
        after = [loss for moment, _, loss in self.losses if moment > (self.killed or 0)]
        return self.killed is not None and bool(after) and after[0] > self.half_way * 1.1


def way_of(name: str) -> Way:
    """Return the module of this name."""
    found: Way = importlib.import_module(f"shmacc_compare.ways.{name}")
    return found


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
    run = Run(task.target if target is None else target)
    receiving, sending = CONTEXT.Pipe(duplex=False)
    crew = Crew(
        [CHIEF, *way.ranks(workers)], _play,
        name, task_name, workers, way.share(task, workers), run.target, sending,
        together=way.TOGETHER,
    )  # fmt: skip
    try:
        _follow(run, crew, receiving, victim, patience)
    finally:
        crew.end(patient=run.stopped is None)
    return run


def _follow(run: Run, crew: Crew, pipe: Connection, victim: int | None, patience: float) -> None:
    """Fill in what the judge says."""
    first = busy = 0.0
    heard = time.monotonic()
    while not run.losses or run.losses[-1][2] > run.target:
        if not pipe.poll(_POLL):
            run.stopped = crew.start_again()
            if time.monotonic() - heard > patience:
                run.stopped = f"stands still, {patience:.0f} s and longer"
            if run.stopped:
                return
            continue
        moment, step, loss = pipe.recv()
        heard = time.monotonic()
        if not run.losses:
            first, busy = moment, crew.processor_seconds()
        run.losses.append((moment - first, step, loss))
        if victim is not None and run.killed is None and run.target < loss <= run.half_way:
            crew.kill(victim)
            run.killed = time.monotonic() - first
    run.busy = crew.processor_seconds() - busy


def _play(
    role: int,
    name: str,
    task_name: str,
    workers: int,
    shared: Any,
    target: float,
    pipe: Connection,
) -> None:
    # The first sparse tensor has torch say that it will not check them all.
    warnings.filterwarnings("ignore", category=UserWarning, message="Sparse invariant")
    torch.set_num_threads(1)
    way, task = way_of(name), TASKS[task_name]()
    if role == CHIEF:
        way.lead(shared, task, workers, Judge(task, target, pipe))
    else:
        way.work(shared, task, role)
