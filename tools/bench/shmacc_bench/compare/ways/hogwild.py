"""torch's Hogwild: model and optimizer in shared memory; all workers update them, with no lock."""

import time
from typing import Any

import torch

from shmacc_bench.compare.model import Judge, Task

TITLE = "Hogwild"
TOGETHER = False
ranks = range


def share(task: Task, workers: int) -> Any:
    """Return the model, Adagrad's state and each worker's step, in shared memory."""
    model = task.model().share_memory()
    state = task.adagrad(model)
    state.share_memory()
    sums = [state.state[one]["sum"] for one in model.parameters()]
    return model, sums, torch.zeros(workers, dtype=torch.int64).share_memory_()


def lead(shared: Any, task: Task, workers: int, judge: Judge) -> None:  # noqa: ARG001
    """Only judge: workers update the model themselves."""
    model, _, steps = shared
    seen = 0
    while True:
        if (step := int(steps.min())) > seen:
            seen = step
            if judge.satisfied(model, step):
                return
        time.sleep(0.0005)


def work(shared: Any, task: Task, rank: int) -> None:
    """Compute gradients, and update the model with each, until killed."""
    model, sums, steps = shared
    optimizer = task.adagrad(model)
    for parameter, its in zip(model.parameters(), sums, strict=True):
        optimizer.state[parameter]["sum"] = its
    while True:
        optimizer.zero_grad()
        task.loss(model, int(steps[rank]), rank).backward()
        optimizer.step()
        steps[rank] += 1
