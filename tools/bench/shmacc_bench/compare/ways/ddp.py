"""DistributedDataParallel over gloo: each rank has a model; they exchange gradients."""

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shmacc_bench.compare.model import EVERY, Judge, Task

TITLE = "DistributedDataParallel over gloo"
TOGETHER = True
World = tuple[str, int]  # the address at which the ranks meet, and their number


def ranks(workers: int) -> range:
    """Return all ranks except the first, which is the chief and also judges."""
    return range(1, workers)


def share(task: Task, workers: int) -> World:  # noqa: ARG001
    """Return a free port, at which the ranks meet."""
    with socket.create_server(("localhost", 0)) as free:
        return f"tcp://localhost:{free.getsockname()[1]}", workers


def lead(world: World, task: Task, workers: int, judge: Judge) -> None:  # noqa: ARG001
    """Act as the first rank, which decides when to end."""
    train(world, task, 0, judge.satisfied)


def work(world: World, task: Task, rank: int) -> None:
    """Act as another rank."""
    train(world, task, rank, lambda *_: False)


def train(world: World, task: Task, rank: int, over: Callable[[nn.Module, int], bool]) -> None:
    """Compute, exchange and update, until the first rank announces the end."""
    dist.init_process_group("gloo", world[0], rank=rank, world_size=world[1])
    model = DistributedDataParallel(task.model())
    optimizer = task.adagrad(model)
    step, end = 0, torch.zeros(1)
    while not end:
        optimizer.zero_grad()
        task.loss(model, step, rank).backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            end[0] = over(model, step)
            dist.broadcast(end, 0)
    dist.destroy_process_group()
