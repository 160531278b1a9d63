"""The compared model, which factorises users' ratings of items, and the judge of its loss."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import torch
from torch import nn

SIZES: Final = 50_000, 10_000  # users and items
WIDTH: Final = 32
BATCH: Final = 2048
RATE: Final = 0.1
SQUARES: Final = 0.1  # where Adagrad's sums of squares begin
TARGET: Final = 0.1  # the loss at which training ends
EVERY: Final = 20  # steps from one judgement to the next
_JUDGED: Final = 4096  # samples that no worker trains on


class Pairs(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two tables, and the products of their rows."""

    def __init__(self, sizes: Sequence[int], width: int, seed: int = 1) -> None:
        """Make the model; the same seed gives the same model."""
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.left, self.right = (nn.Embedding(size, width, sparse=True) for size in sizes)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=width**-0.5, generator=random)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the products."""
        summed: torch.Tensor = (self.left(left) * self.right(right)).sum(dim=1)
        return summed


class Task:
    """The model, its data (users and items are drawn by Zipf's law), and its loss."""

    def __init__(self) -> None:
        """Draw the hidden tables from which ratings are made, and which training has to find."""
        self._hidden = Pairs(SIZES, 8, seed=7).requires_grad_(requires_grad=False)
        self._shares = [np.cumsum(1 / np.arange(1, size + 1)) for size in SIZES]

    def model(self) -> nn.Module:
        """Return the model from which training starts; it is always the same."""
        return Pairs(SIZES, WIDTH)

    def adagrad(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return torch's optimizer of a model."""
        return torch.optim.Adagrad(model.parameters(), RATE, initial_accumulator_value=SQUARES)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the summed loss of a worker's batch in a step."""
        return BATCH * self._mean(model, np.random.default_rng((step, rank)), BATCH)

    def judge(self, model: nn.Module) -> float:
        """Return the mean loss of samples that no worker trains on."""
        with torch.no_grad():
            return float(self._mean(model, np.random.default_rng(0), _JUDGED))

    def _mean(self, model: nn.Module, random: np.random.Generator, samples: int) -> torch.Tensor:
        user, item = (
            torch.from_numpy(np.searchsorted(shares, random.random(samples) * shares[-1]))
            for shares in self._shares
        )
        # The hidden products are about 1 / sqrt(8), so the ratings are about 1.
        return nn.functional.mse_loss(model(user, item), 8**0.5 * self._hidden(user, item))


class Judge:
    """Measures and reports the loss, in the process that has the model."""

    def __init__(self, task: Task, target: float, pipe: Connection) -> None:
        self._task, self._target, self._pipe = task, target, pipe

    def satisfied(self, model: torch.nn.Module, step: int) -> bool:
        """Return whether the model has learnt enough; judge it only every `EVERY` steps."""
        if step == 0 or step % EVERY:
            return False
        loss = self._task.judge(model)
        self._pipe.send((time.monotonic(), step, loss))
        return loss <= self._target
