"""Queues of torch.multiprocessing: model and gradients in shared memory, handles in a queue."""

from typing import Any

import torch
import torch.multiprocessing as mp

from shmacc_bench.compare.model import Judge, Task

TITLE = "queues of torch.multiprocessing"
TOGETHER = False
ranks = range


def share(task: Task, workers: int) -> Any:
    """Return the model, a queue of gradients, and for each worker a queue of steps."""
    context = mp.get_context("spawn")
    return task.model().share_memory(), context.Queue(), [context.Queue() for _ in range(workers)]


def lead(shared: Any, task: Task, workers: int, judge: Judge) -> None:
    """Say that a step begins, wait for the gradient of each worker, update with their mean."""
    model, gradients, turns = shared
    optimizer = task.adagrad(model)
    step = 0
    while not judge.satisfied(model, step):
        for turn in turns:
            turn.put(step)
        given = [gradients.get() for _ in range(workers)]
        for number, parameter in enumerate(model.parameters()):
            rows = torch.cat([one[number][0] for one in given], dim=1)
            values = torch.cat([one[number][1] for one in given]) / workers
            parameter.grad = torch.sparse_coo_tensor(rows, values, parameter.shape)
        optimizer.step()
        step += 1
    for turn in turns:
        turn.put(None)


def work(shared: Any, task: Task, rank: int) -> None:
    """Compute a gradient when a step begins."""
    model, gradients, turns = shared
    while (step := turns[rank].get()) is not None:
        model.zero_grad()
        task.loss(model, step, rank).backward()
        found = [parameter.grad.coalesce() for parameter in model.parameters()]
        gradients.put([(one.indices(), one.values()) for one in found])
