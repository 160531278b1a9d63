"""A public program, ported as a user would, equals torch in one process, whoever is killed.

It is facebookresearch/dlrm. docs/examples/torch/digits.py is a port of mnist_hogwild.
"""

import os
import signal
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from helpers.apart import Apart
from helpers.support import LONG
from other_packages.torch_training import NAME
from torch import nn
from torch.nn import functional

from shmacc.torch import Replica, SyncReplicas, clip_grad_norm_, optimizer_of

RANKS: Final = 2  # the sum of two gradients is the same to the bit in either order
STEPS: Final = 24


class Dlrm(nn.Module):
    """A model of clicks: bags of ids in three tables, one with padding, and dense features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(size, 4, mode=mode, sparse=True, padding_idx=padding)
            for size, mode, padding in [(50, "sum", None), (20, "mean", None), (9, "sum", 0)]
        )
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, bags: list[Any]) -> Any:
        x = self.bot_l(dense)
        rows = [table(ids, offsets) for table, (ids, offsets) in zip(self.emb_l, bags, strict=True)]
        stacked = torch.stack([x, *rows], dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        one, two = torch.triu_indices(4, 4, offset=1)
        return self.top_l(torch.cat([x, pairs[:, one, two]], dim=1)).squeeze(1)


def backward(model: nn.Module, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(RANKS * step + rank)
    bags = []
    for size in (50, 20, 9):
        lengths = torch.randint(0, 4, (6,), generator=random)
        ids = torch.randint(0, size, (int(lengths.sum()),), generator=random)
        bags.append((ids, lengths.cumsum(0) - lengths))
    clicked = torch.randint(0, 2, (6,), generator=random).float()
    found = model(torch.rand(6, 5, generator=random), bags)
    functional.binary_cross_entropy_with_logits(found, clicked).backward()


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(model.emb_l.parameters()),
        torch.optim.AdamW([*model.bot_l.parameters(), *model.top_l.parameters()]),
    ]


def rates(step: int) -> dict[str, float]:
    return {"emb_l*": 0.05 / (1 + step), "*": 0.01 * min(1, (step + 1) / 8)}


def compute(rank: int) -> None:
    """Be a replica, from the start of its data to the end."""
    model = Dlrm()
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        for _ in range(STEPS):
            backward(model, replica.global_step, rank)
            assert replica.step()


def lead(dies_at: int) -> dict[str, Any]:
    """Be a chief until all have left, or until it kills itself in the block of step `dies_at`."""
    model = Dlrm()
    optimizer = optimizer_of(*optimizers_of(model))
    with SyncReplicas(
        model, NAME, total_num_replicas=RANKS, optimizer=optimizer, schedule=rates
    ) as replicas:
        while replicas.active:
            with replicas.round(timeout=LONG) as update:
                clip_grad_norm_(model.parameters(), 0.5)
                if update.step == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        assert replicas.global_step == STEPS
    return {key: value.numpy() for key, value in model.state_dict().items()}


def alone() -> dict[str, Any]:
    model = Dlrm()
    optimizers = optimizers_of(model)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(RANKS):
            backward(model, step, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad / RANKS
        clip_grad_norm_(model.parameters(), 0.5)  # torch's own takes no sparse gradients
        for optimizer, rate in zip(optimizers, rates(step).values(), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return {key: value.numpy() for key, value in model.state_dict().items()}


def test_a_port_equals_torch_alone_and_survives_its_chief(start: Callable[..., Apart]) -> None:
    ends = []
    for deaths in ((), (0, 7)):
        children = [start(compute, rank) for rank in range(RANKS)]
        for step in deaths:
            assert start(lead, step).wait() == signal.SIGKILL
        ends.append(start(lead, -1).result())
        for child in children:
            child.result()
    expected, before = alone(), Dlrm().state_dict()
    for key, value in ends[0].items():
        assert ends[1][key].tobytes() == value.tobytes(), f"{key}: a death has changed it"
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5, err_msg=key)
        assert not np.allclose(value, before[key], atol=1e-3), f"{key} was not trained"
