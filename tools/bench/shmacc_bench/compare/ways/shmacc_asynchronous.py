"""shmacc, where no worker waits for another: a round takes the gradients that have come."""

from shmacc import optim
from shmacc.torch import AsyncReplicas
from shmacc_bench.compare.model import RATE, SQUARES, Judge, Task

# Only the chief differs from the synchronous way.
from shmacc_bench.compare.ways.shmacc_synchronous import TOGETHER, ranks, share, work

TITLE = "shmacc, asynchronous"
__all__ = ["TITLE", "TOGETHER", "lead", "ranks", "share", "work"]


def lead(name: str, task: Task, workers: int, judge: Judge) -> None:
    """Run rounds; the end of each `with` block makes the update."""
    model, adagrad = task.model(), optim.Adagrad(RATE, SQUARES)
    with AsyncReplicas(
        model, name, total_num_replicas=workers, optimizer=adagrad, capacity=workers
    ) as replicas:
        while not judge.satisfied(model, replicas.global_step):
            with replicas.round():
                pass
