"""Batches of training pairs: a pure function of seed, step and worker.

Every process that cuts a worker's batch of a step cuts the same one, at any time. Therefore a
replacement can repeat the work of a killed worker, and one process can do the work of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Recipe:
    """How batches are cut from the text."""

    spans: int = 24
    """Pieces of text in one batch."""
    span: int = 64
    """Words in one piece."""
    window: int = 5
    """How far apart the two words of a pair may be."""
    draws: int = 256
    """Noise words drawn for one batch; all its pairs share them."""
    negatives: int = 5
    """How much the noise weighs beside the pairs: as this many noise words for each pair."""
    keep: float = 3e-4
    """Subsampling: a word that makes up more than this share of the text is thinned out."""


@dataclass(frozen=True)
class Batch:
    """How often which words stand near each other in some pieces of text, and noise."""

    centers: NDArray[np.int64]
    """The words, each once, ascending."""
    targets: NDArray[np.int64]
    """The words of their company and the noise words, each once, ascending."""
    pairs: NDArray[np.float32]
    """How often each center has each target near it."""
    noise: NDArray[np.float32]
    """The weight of each target as noise, for one pair."""
    words: int
    """Words of text that this batch was cut from."""


class Sampler:
    """Cuts batches from a text."""

    def __init__(
        self, stream: NDArray[np.int32], counts: NDArray[np.int64], recipe: Recipe
    ) -> None:
        """Work out how likely each word is to be kept, and to be drawn as noise."""
        self._stream = stream
        self._recipe = recipe
        excess = recipe.keep * counts.sum() / counts
        self._kept = np.sqrt(excess) + excess
        reach = np.cumsum(counts**0.75)
        self._noise = reach / reach[-1]

    def draw(self, seed: int, step: int, worker: int) -> Batch:
        """Cut the one batch that belongs to these three numbers."""
        random = np.random.default_rng((seed, step, worker))
        words, kept = self._pieces(random)
        found = self._pairs(words, kept, random)
        drawn = np.searchsorted(self._noise, random.random(self._recipe.draws), side="right")
        centers, row = np.unique(found[0], return_inverse=True)
        targets, column = np.unique(np.concatenate([found[1], drawn]), return_inverse=True)
        width, count = len(targets), len(row)
        pairs = np.bincount(row * width + column[:count], minlength=len(centers) * width)
        noise = np.bincount(column[count:], minlength=width)
        share = self._recipe.negatives / self._recipe.draws
        return Batch(
            centers=centers,
            targets=targets,
            pairs=pairs.reshape(-1, width).astype(np.float32),
            noise=(noise * share).astype(np.float32),
            words=words.size,
        )

    def _pieces(self, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        recipe = self._recipe
        starts = random.integers(0, len(self._stream) - recipe.span + 1, (recipe.spans, 1))
        words = self._stream[starts + np.arange(recipe.span)].astype(np.int64)
        kept = random.random(words.shape) < self._kept[words]
        # The kept words move to the left of their row, in their order: so thinning out the
        # commonest words widens the window of the others.
        order = np.argsort(~kept, axis=1, kind="stable")
        return np.take_along_axis(words, order, axis=1), np.take_along_axis(kept, order, axis=1)

    def _pairs(
        self, words: NDArray[np.int64], kept: NDArray[np.bool_], random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        window = self._recipe.window
        reach = random.integers(1, window + 1, words.shape)
        centers, contexts = [], []
        for apart in range(1, window + 1):
            left, right = words[:, :-apart], words[:, apart:]
            both = kept[:, apart:]
            forward = both & (reach[:, :-apart] >= apart)
            backward = both & (reach[:, apart:] >= apart)
            centers += [left[forward], right[backward]]
            contexts += [right[forward], left[backward]]
        return np.concatenate(centers), np.concatenate(contexts)
