"""Trains a torch model of digits by shmacc.torch and by DistributedDataParallel, in turns.

Both sides have the same network, batches and optimizer, in the same processes. `make compare` shows
what happens to both when a process is killed.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shmacc.torch import Replica, SyncReplicas
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table, figure, paired

BATCH: Final = 32
BLOCK: Final = 50  # steps of one side, then the other has its turn
_NAP: Final = 0.05
_LONG: Final = 120.0


def measure(quick: bool) -> Iterator[Table]:
    """Yield the milliseconds of a step, and the losses that both sides reach."""
    torch.set_num_threads(1)
    blocks = 4 if quick else 12
    table = Table("A torch model", ("", "shmacc.torch", "DDP, gloo", "ratio"))
    for what, kind, world, backups, nap in (
        ("dense, 2 replicas", "dense", 2, 0, 0.0),
        ("sparse, 2 replicas", "sparse", 2, 0, 0.0),
        (f"3 replicas, one sleeps {1e3 * _NAP:.0f} ms a step (1 backup)", "dense", 3, 1, _NAP),
    ):
        turns, busy, losses = _train(kind, world, blocks, backups, nap)
        mine, theirs = (statistics.median(turn[side] for turn in turns) for side in (0, 1))
        cells = f"{mine:.1f} ms", f"{theirs:.1f} ms", figure(paired(turns))
        table.rows.append((f"{what}: a step", *cells))
        if not backups:
            cells = f"{busy[0]:.1f} ms", f"{busy[1]:.1f} ms", figure(busy[0] / busy[1])
            table.rows.append(("processor time of all processes", *cells))
            table.rows.append(("the loss in the end", *(f"{loss:.8f}" for loss in losses), ""))
    yield table


def _train(
    kind: str, world: int, blocks: int, backups: int, nap: float
) -> tuple[list[tuple[float, float]], list[float], list[float]]:
    """Train by both sides; return each block's milliseconds a step, processor times, and losses."""
    model, name = Digits(kind), f"bench.{os.getpid()}.ddp"
    with (
        tempfile.TemporaryDirectory() as place,
        SyncReplicas(
            model, name, total_num_replicas=world, replicas_to_aggregate=world - backups
        ) as replicas,
    ):
        optimizer = _optimizer(model)
        meeting = f"file://{Path(place) / 'ranks'}"
        ranks = [Apart(Rank, kind, rank) for rank in range(world)]
        for rank in ranks:
            rank.order("train", name, meeting, world, blocks, nap if rank is ranks[-1] else 0.0)
        began = time.process_time()
        while replicas.active:
            with replicas.round(timeout=_LONG):
                optimizer.step()
        chief = 1e3 * (time.process_time() - began) / (BLOCK * blocks)
        told = [rank.answer() for rank in ranks]
        for rank in ranks:
            rank.end()
    walls, _, losses = told[0]
    busy = [sum(one[1][side] for one in told) for side in (0, 1)]
    return walls[1:], [busy[0] + chief, busy[1]], losses  # the first block is to warm up


class Digits(nn.Module):  # type: ignore[misc, unused-ignore]
    """A dense network; if `kind` is sparse, its input is the mean of one table row per pixel."""

    def __init__(self, kind: str) -> None:
        """Make the model, with the same weights each time."""
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(64 * 17, 64, mode="mean", sparse=True)
        self.table.requires_grad_(kind == "sparse")  # frozen in the dense network
        self.kind = kind
        self.rest = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, images: torch.Tensor) -> Any:
        """Return logits."""
        if self.kind == "sparse":
            return self.rest(self.table(images.long() + 17 * torch.arange(64)))
        return self.rest(images / 16)


class Rank:
    """A process that is a rank of DDP and a replica of shmacc, in turns."""

    def __init__(self, kind: str, rank: int) -> None:
        """Load the digits that scikit-learn carries: 1,797 images of 8 x 8."""
        torch.set_num_threads(1)
        digits = load_digits()
        self.images = torch.from_numpy(digits.data).float()
        self.labels = torch.from_numpy(digits.target)
        self.kind, self.rank = kind, rank

    def train(self, name: str, meeting: str, world: int, blocks: int, nap: float) -> Any:
        """Train by both sides in turns; return milliseconds a step, median CPU times and losses."""
        dist.init_process_group("gloo", meeting, rank=self.rank, world_size=world)
        ddp, model = DistributedDataParallel(Digits(self.kind)), Digits(self.kind)
        optimizer = _optimizer(ddp)
        walls, busy = [], []
        with Replica(model, name, self.rank, timeout=_LONG) as replica:
            for block in range(blocks):
                moments = [self._moments()]
                for step in range(block * BLOCK, (block + 1) * BLOCK):
                    time.sleep(nap)
                    optimizer.zero_grad()
                    self._loss(ddp, step).backward()
                    optimizer.step()
                moments.append(self._moments())
                while replica.global_step < (block + 1) * BLOCK:
                    time.sleep(nap)
                    self._loss(model, replica.global_step).backward()
                    replica.step()
                moments.append(self._moments())
                (at, its), (then, then_its), (end, end_its) = moments
                walls.append(((end - then) / BLOCK, (then - at) / BLOCK))
                busy.append(((end_its - then_its) / BLOCK, (then_its - its) / BLOCK))
            dist.barrier()
            losses = [self._whole_loss(model), self._whole_loss(ddp)]
        medians = [statistics.median(each[side] for each in busy) for side in (0, 1)]
        return walls, medians, losses

    def close(self) -> None:
        """Leave the other ranks."""
        dist.destroy_process_group()

    def _moments(self) -> tuple[float, float]:
        """Wait for all ranks; return milliseconds of the clock and of this process's CPU time."""
        dist.barrier()
        return 1e3 * time.perf_counter(), 1e3 * time.process_time()

    def _loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of a batch; rank and step determine the batch."""
        random = torch.Generator().manual_seed(step * 64 + self.rank)
        batch = torch.randint(0, len(self.labels), (BATCH,), generator=random)
        return nn.functional.cross_entropy(model(self.images[batch]), self.labels[batch])

    def _whole_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self.images), self.labels))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9
    )
