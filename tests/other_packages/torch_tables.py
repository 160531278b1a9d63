"""A model of clicks with embeddings of ids, its batches and its chief, for several tests."""

from typing import Any, Final

import pytest
import torch
from other_packages.torch_training import NAME, make_round
from torch import nn

from shmacc import init, optim
from shmacc.torch import AsyncReplicas, Replica, SyncReplicas, TableEmbedding

USERS: Final = init.Normal(0.0, 0.5, seed=11)
BOTH: Final = {"users*": optim.Adagrad(0.1), "*": optim.Adam(0.05)}
SPREAD: Final = 2**61 // 100  # between ids of users
kinds = pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])


class Clicks(nn.Module):
    """A model with users by hashes, bags of tags, and a dense layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.users = TableEmbedding(4, initial=USERS, **options)
        self.tags = TableEmbedding(4, initial=init.Uniform(-1, 1), mode="mean", padding_idx=-1)
        self.layer = nn.Linear(8, 2)

    def forward(self, users: torch.Tensor, tags: torch.Tensor) -> Any:
        return self.layer(torch.cat([self.users(users), self.tags(tags)], dim=1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return users, some of them new, and tags, some of which are padding."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    users = torch.randint(0, 6 + step, (8,), generator=random) * SPREAD
    tags = torch.randint(-1, 20, (8, 3), generator=random)
    return users, tags


def backward(model: nn.Module, rank: int, step: int) -> None:
    users, tags = batch(rank, step)
    nn.functional.cross_entropy(model(users, tags), users % 2).backward()


def make_rounds(replicas: Any, replica: Replica, model: nn.Module, count: int) -> None:
    """Make `count` rounds with the replica of this process."""
    for _ in range(count):
        backward(model, replica.rank, replica.global_step)
        make_round(replicas, replica)


def chief_of(model: nn.Module, total: int = 1, optimizer: Any = BOTH) -> Any:
    return SyncReplicas(model, NAME, total_num_replicas=total, optimizer=optimizer)
