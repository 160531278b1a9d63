"""shmacc, in rounds: each makes one update with the mean of all workers' gradients."""

import os

from shmacc import optim
from shmacc.torch import Replica, SyncReplicas
from shmacc_bench.compare.model import RATE, SQUARES, Judge, Task

TITLE = "shmacc, synchronous"
TOGETHER = False
ranks = range


def share(task: Task, workers: int) -> str:  # noqa: ARG001  all ways have this argument
    """Return the name by which the processes find each other."""
    return f"compare-{os.getpid()}"


def lead(name: str, task: Task, workers: int, judge: Judge) -> None:
    """Run rounds; the end of each `with` block makes the update."""
    model, adagrad = task.model(), optim.Adagrad(RATE, SQUARES)
    with SyncReplicas(model, name, total_num_replicas=workers, optimizer=adagrad) as replicas:
        while not judge.satisfied(model, replicas.global_step):
            with replicas.round():
                pass


def work(name: str, task: Task, rank: int) -> None:
    """Compute gradients until the chief has finished."""
    model = task.model()
    with Replica(model, name, rank) as replica:
        while replica.running:
            task.loss(model, replica.global_step, rank).backward()
            replica.step()
