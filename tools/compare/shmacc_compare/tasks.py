"""What is trained: models of sparse embeddings, and a batch for each step and worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from torch import nn

# The demo's text, and how it is read.
sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
from shmacc_demo.model import read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SQUARES: Final = 0.1  # what Adagrad's sums of squares begin with
_JUDGED: Final = 4096  # samples that no worker trains on


class Task(Protocol):
    """A model, its data, and when it has learnt enough."""

    TITLE: str
    rate: float
    target: float  # the loss that is learnt enough

    def model(self) -> nn.Module:
        """Return the model that training starts from, always the same."""

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the summed loss of the batch of a step and a worker."""

    def judge(self, model: nn.Module) -> float:
        """Return the mean loss of samples that no worker trains on."""


class Pairs(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two tables, and the products of their rows."""

    def __init__(self, sizes: Sequence[int], width: int, seed: int = 1) -> None:
        """Make it, always the same."""
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.left, self.right = (nn.Embedding(size, width, sparse=True) for size in sizes)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=width**-0.5, generator=random)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the product of each row of the left with each of the right beside it."""
        products = self.left(left).unsqueeze(1) * self.right(right)
        summed: torch.Tensor = products.sum(dim=2)
        return summed


class Factorisation:
    """Ratings of items by users, both drawn by Zipf's law, as products of rows that are hidden."""

    TITLE = "factorisation"
    sizes: Final = 50_000, 10_000
    width: Final = 32
    batch: Final = 2048
    rate = 0.1
    target = 0.1

    def __init__(self) -> None:
        """Draw what is to be found."""
        self._hidden = Pairs(self.sizes, 8, seed=7).requires_grad_(requires_grad=False)
        self._shares = [np.cumsum(1 / np.arange(1, size + 1)) for size in self.sizes]

    def model(self) -> nn.Module:
        """Return two tables."""
        return Pairs(self.sizes, self.width)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the square of what is missed."""
        return self.batch * self._mean(model, np.random.default_rng((step, rank)), self.batch)

    def judge(self, model: nn.Module) -> float:
        """Return it for ratings of their own."""
        with torch.no_grad():
            return float(self._mean(model, np.random.default_rng(0), _JUDGED))

    def _mean(self, model: nn.Module, random: np.random.Generator, samples: int) -> torch.Tensor:
        user, item = (_drawn(random, shares, samples) for shares in self._shares)
        # The hidden products are of about 1 / sqrt(8): ratings of about 1.
        ratings = 8**0.5 * self._hidden(user, item.unsqueeze(1))
        return nn.functional.mse_loss(model(user, item.unsqueeze(1)), ratings)


class Words:
    """Word vectors of Python's language reference: skip-gram with negative samples."""

    TITLE = "word vectors"
    width: Final = 64
    batch: Final = 1024
    negatives: Final = 5
    window: Final = 5
    rate = 0.2
    target = 2.22

    def __init__(self) -> None:
        """Read the text that each Python carries."""
        _, text = read(None)
        self.stream = torch.from_numpy(text["stream"].astype(np.int64))
        self._shares = np.cumsum(text["counts"] ** 0.75)

    def model(self) -> nn.Module:
        """Return a table of words and one of their neighbours."""
        return Pairs([len(self._shares)] * 2, self.width)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the loss of words beside a neighbour and others that are none."""
        return self.batch * self._mean(model, np.random.default_rng((step, rank)), self.batch)

    def judge(self, model: nn.Module) -> float:
        """Return it for pairs of their own."""
        with torch.no_grad():
            return float(self._mean(model, np.random.default_rng(0), _JUDGED))

    def _mean(self, model: nn.Module, random: np.random.Generator, samples: int) -> torch.Tensor:
        at = random.integers(self.window, len(self.stream) - self.window, samples)
        apart = random.integers(1, self.window + 1, samples) * random.choice([-1, 1], samples)
        word, near = self.stream[at], self.stream[at + apart]
        noise = _drawn(random, self._shares, samples * self.negatives).view(samples, -1)
        products = model(word, torch.cat([near.unsqueeze(1), noise], dim=1))
        signs = torch.ones_like(products)
        signs[:, 1:] = -1
        return -nn.functional.logsigmoid(signs * products).sum(dim=1).mean()


TASKS: Final[dict[str, type[Task]]] = {"factorisation": Factorisation, "words": Words}


def _drawn(random: np.random.Generator, shares: NDArray[np.float64], samples: int) -> torch.Tensor:
    return torch.from_numpy(np.searchsorted(shares, random.random(samples) * shares[-1]))
