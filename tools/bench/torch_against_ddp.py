"""Trains handwritten digits with shmacc.torch and with DistributedDataParallel, and compares.

Run it in the environment of `make test-home`:

    .venv-home/bin/python tools/bench/torch_against_ddp.py

The same model, batches and optimizer on both sides, in the same processes, in turns; gloo is DDP's
backend for CPUs. Then a replica that sleeps, and one that is killed. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shmacc.errors import WorkerDiedError
from shmacc.torch import Replica, SyncReplicas

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NAME: Final = "torch-against-ddp"
BATCH: Final = 32
BLOCK: Final = 50  # steps of the one before it is the other's turn
NAP: Final = 0.05
LONG: Final = 120.0
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "sklearn.datasets", "shmacc.torch"])


class Digits(nn.Module):  # type: ignore[misc, unused-ignore]
    """A dense network, or one that begins with rows of a table: one for each pixel's grey."""

    def __init__(self, kind: str) -> None:
        """Make it, always the same."""
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(64 * 17, 64, mode="mean", sparse=True)
        self.table.requires_grad_(kind == "sparse")  # frozen in the other
        self.kind = kind
        width = 512
        self.rest = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, images: torch.Tensor) -> Any:
        """Return logits."""
        if self.kind == "sparse":
            greys = images.long() + 17 * torch.arange(64)
            return self.rest(self.table(greys))
        return self.rest(images / 16)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits that scikit-learn carries: 1,797 images of 8 x 8, and what they are."""
    digits = load_digits()
    return torch.from_numpy(digits.data).float(), torch.from_numpy(digits.target)


def backward(model: nn.Module, digits: Any, rank: int, step: int) -> None:
    """Compute the gradient of a batch that rank and step decide."""
    random = torch.Generator().manual_seed(step * 64 + rank)
    batch = torch.randint(0, len(digits[1]), (BATCH,), generator=random)
    nn.functional.cross_entropy(model(digits[0][batch]), digits[1][batch]).backward()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9
    )


def loss_of(model: nn.Module, digits: Any) -> float:
    """Return the loss over all digits."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(digits[0]), digits[1]))


class Ddp:
    """A rank of DistributedDataParallel."""

    def __init__(self, kind: str, rank: int, world: int, rendezvous: str) -> None:
        """Join the others."""
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world)
        self.model = DistributedDataParallel(Digits(kind))
        self.optimizer = optimizer_of(self.model)
        self.done = 0

    def train(self, digits: Any, rank: int, until: int, nap: float) -> None:
        """Take steps until there are so many."""
        while self.done < until:
            time.sleep(nap)
            self.optimizer.zero_grad()
            backward(self.model, digits, rank, self.done)
            self.optimizer.step()
            self.done += 1


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return milliseconds a step of a block: of the clock, and of this process's processor."""
    wall, busy = time.perf_counter() - began[0], time.process_time() - began[1]
    return 1e3 * wall / BLOCK, 1e3 * busy / BLOCK


def in_turns(
    pipe: Connection,
    kind: str,
    rank: int,
    world: int,
    rendezvous: str,
    blocks: int,
    nap: float,
    first: bool,
) -> None:
    """Train by both in turns; send the seconds of each block, and the losses."""
    torch.set_num_threads(1)
    digits = load()
    if first:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ddp = Ddp(kind, rank, world, rendezvous)
    model = Digits(kind)
    times: dict[str, list[tuple[float, float]]] = {"ddp": [], "shmacc": []}
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        for block in range(1, blocks + 1):
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            ddp.train(digits, rank, block * BLOCK, nap)
            times["ddp"].append(since(began))
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            while replica.global_step < block * BLOCK:
                time.sleep(nap)
                backward(model, digits, rank, replica.global_step)
                replica.step()
            times["shmacc"].append(since(began))
        dist.barrier()
        losses = {"ddp": loss_of(ddp.model, digits), "shmacc": loss_of(model, digits)}
    dist.destroy_process_group()
    pipe.send((times, losses))


@dataclass
class Compared:
    """Milliseconds a step of both sides, and their losses.

    Attributes:
        losses: In the end, over all digits.
        wall: Of the clock, a block each.
        busy: Of processors, of all processes together.
    """

    losses: dict[str, float]
    wall: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)

    def row(self, what: str) -> str:
        """Return the table's row of the clock; the ratio is the median of the pairs'."""
        mine, theirs = self.wall["shmacc"], self.wall["ddp"]
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        return (
            f"| {what}: a step | {statistics.median(mine):.1f} ms "
            f"| {statistics.median(theirs):.1f} ms | {ratio:.2f} |"
        )

    def more_rows(self) -> str:
        """Return those of processor time and losses."""
        mine, theirs = self.busy["shmacc"], self.busy["ddp"]
        return (
            f"| processor time of all processes | {mine:.1f} ms | {theirs:.1f} ms "
            f"| {mine / theirs:.2f} |\n"
            f"| the loss in the end | {self.losses['shmacc']:.8f} | {self.losses['ddp']:.8f} | |"
        )


def compare(
    kind: str, world: int, blocks: int, *, backups: int = 0, nap: float = 0.0, first: bool = False
) -> Compared:
    """Train by both in turns."""
    model = Digits(kind)
    with (
        tempfile.TemporaryDirectory() as place,
        SyncReplicas(
            model,
            NAME,
            total_num_replicas=world,
            replicas_to_aggregate=world - backups,
            if_exists="replace",
        ) as replicas,
    ):
        optimizer = optimizer_of(model)
        pipes = []
        for rank in range(world):
            pipe, theirs = CONTEXT.Pipe()
            slow = nap if rank == world - 1 else 0.0
            work = (theirs, kind, rank, world, str(Path(place) / "ranks"), blocks, slow, first)
            CONTEXT.Process(target=in_turns, args=work).start()
            pipes.append(pipe)
        if first:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        began = time.process_time()
        while replicas.active:
            with replicas.round(timeout=LONG):
                optimizer.step()
        if first:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        chief = 1e3 * (time.process_time() - began) / (BLOCK * blocks)
        heard = [pipe.recv() for pipe in pipes]
    result = Compared(losses=heard[0][1])
    for side in ("shmacc", "ddp"):
        result.wall[side] = [wall for wall, _ in heard[0][0][side][1:]]  # the first is to warm up
        result.busy[side] = sum(statistics.median(b for _, b in times[side]) for times, _ in heard)
    result.busy["shmacc"] += chief
    return result


def die(rank: int, step: int, victim: int | None, at: int) -> None:
    """Die, if this is the one to be killed."""
    if rank == victim and step == at:
        os.kill(os.getpid(), signal.SIGKILL)


def ddp_until_killed(
    pipe: Connection, rank: int, world: int, rendezvous: str, victim: int | None, steps: int
) -> None:
    """Train by DDP; send what became of it."""
    torch.set_num_threads(1)
    digits = load()
    ddp = Ddp("dense", rank, world, rendezvous)
    try:
        for step in range(steps):
            die(rank, step, victim, steps // 2)
            ddp.train(digits, rank, step + 1, 0.0)
        pipe.send((ddp.done, ""))
    except RuntimeError as error:
        pipe.send((ddp.done, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    os._exit(0)  # gloo waits for the dead otherwise


def replica_until_killed(rank: int, victim: int | None, steps: int) -> None:
    """Train by shmacc."""
    torch.set_num_threads(1)
    digits = load()
    model = Digits("dense")
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        while replica.running:
            die(rank, replica.global_step, victim, steps // 2)
            backward(model, digits, rank, replica.global_step)
            replica.step()


def kill_ddp(world: int, steps: int) -> tuple[int, str]:
    """Return how many steps rank 0 made, and what ended it."""
    with tempfile.TemporaryDirectory() as place:
        pipe, theirs = CONTEXT.Pipe()
        ranks = [
            CONTEXT.Process(
                target=ddp_until_killed,
                args=(theirs, rank, world, str(Path(place) / "ranks"), world - 1, steps),
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        said: tuple[int, str] = pipe.recv() if pipe.poll(LONG) else (-1, "rank 0 hangs")
        for process in ranks:
            process.kill()
            process.join()
        return said


def kill_replica(world: int, steps: int, *, backups: int, killed: bool) -> Any:
    """Return steps made, the loss, and the longest pause between updates in milliseconds."""
    model, digits = Digits("dense"), load()
    with SyncReplicas(
        model,
        NAME,
        total_num_replicas=world,
        replicas_to_aggregate=world - backups,
        if_exists="replace",
    ) as replicas:
        optimizer = optimizer_of(model)
        victim = world - 1
        crew = [
            CONTEXT.Process(
                target=replica_until_killed, args=(r, victim if killed else None, steps)
            )
            for r in range(world)
        ]
        for process in crew:
            process.start()
        moments: list[float] = []
        while replicas.global_step < steps:
            try:
                with replicas.round(timeout=LONG, on_death="raise"):
                    optimizer.step()
                moments.append(time.perf_counter())
            except WorkerDiedError:
                crew[victim].join()
                crew[victim] = CONTEXT.Process(
                    target=replica_until_killed, args=(victim, None, steps)
                )
                crew[victim].start()
        done = replicas.global_step
    for process in crew:
        process.join()
    pauses = [b - a for a, b in itertools.pairwise(moments)][10:]
    return done, loss_of(model, digits), 1e3 * max(pauses)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=12, help=f"of {BLOCK} steps each")
    arguments.add_argument(
        "--realtime", action="store_true", help="ahead of all others on the machine (needs root)"
    )
    given = arguments.parse_args()
    blocks = given.blocks
    torch.set_num_threads(1)  # threads of the chief that spin take the replicas' processors
    print(f"torch {torch.__version__}, {os.cpu_count()} processors, {platform.machine()}\n")
    print("| | shmacc.torch | DDP, gloo | ratio |\n| --- | ---: | ---: | ---: |")
    for kind in ("dense", "sparse"):
        compared = compare(kind, 2, blocks, first=given.realtime)
        print(compared.row(f"{kind}, 2 replicas"), compared.more_rows(), sep="\n", flush=True)
    compared = compare("dense", 3, max(2, blocks // 3), backups=1, nap=NAP)
    print(compared.row(f"3 replicas, one of which sleeps {1e3 * NAP:.0f} ms a step (1 backup)"))
    steps = 4 * blocks * 10
    done, error = kill_ddp(2, steps)
    whole = kill_replica(2, steps, backups=0, killed=False)
    restarted = kill_replica(2, steps, backups=0, killed=True)
    backed = kill_replica(3, steps, backups=1, killed=True)
    print(
        f"| SIGKILL of one of 2 at step {steps // 2} of {steps} | {restarted[0]} steps, the "
        f"longest pause {restarted[2]:.0f} ms; the loss {restarted[1]:.8f} "
        f"({whole[1]:.8f} without it) "
        f"| {done} steps, then {error or 'nothing'} | |"
    )
    print(
        f"| the same of one of 3, 1 backup | {backed[0]} steps, the longest pause "
        f"{backed[2]:.0f} ms | | |"
    )


if __name__ == "__main__":
    main()
