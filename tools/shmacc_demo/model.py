"""The model: skip-gram with negative sampling, its gradient, and the step that Adagrad takes.

The loss of a center word c beside a target t is -log s(u_c v_t + b_t), with s the logistic
function; beside a noise word it is -log s(-(u_c v_t + b_t)). A batch is one small matrix of centers
by targets, so its gradient is three matrix products; its rows are the few words of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmacc_demo.batches import Batch

FIGURES = 3
"""At the end of ``Gradient.rest``, after the biases: loss, pairs and words of the batch."""


@dataclass(frozen=True)
class Parameters:
    """What is learnt."""

    inputs: NDArray[np.float32]
    outputs: NDArray[np.float32]
    bias: NDArray[np.float32]

    def fill(self, seed: int) -> None:
        """Set the values that training starts from."""
        words, width = self.inputs.shape
        random = np.random.default_rng(seed)
        self.inputs[:] = (random.random((words, width)) - 0.5) / np.sqrt(width)
        self.outputs[:] = 0
        self.bias[:] = 0

    @classmethod
    def new(cls, words: int, width: int) -> Parameters:
        """Make parameters in this process's own memory."""
        return cls(
            np.zeros((words, width), np.float32),
            np.zeros((words, width), np.float32),
            np.zeros(words, np.float32),
        )


@dataclass(frozen=True)
class Rows:
    """The gradient of a table: rows that are not zero, each named once."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one batch, or the mean of several."""

    inputs: Rows
    outputs: Rows
    rest: NDArray[np.float32]
    """The gradient of every bias, then loss, pairs and words."""

    @property
    def loss(self) -> float:
        """The loss of one pair with its noise."""
        loss, pairs, _ = self.rest[-FIGURES:].tolist()
        return float(loss / max(pairs, 1.0))

    @property
    def words(self) -> float:
        """How many words of text went in."""
        return float(self.rest[-1])


def gradient(parameters: Parameters, batch: Batch) -> Gradient:
    """Differentiate the batch's loss."""
    inputs, outputs = parameters.inputs[batch.centers], parameters.outputs[batch.targets]
    scores = inputs @ outputs.T + parameters.bias[batch.targets]
    # exp overflows float32 beyond 88; at 30 the logistic function has long reached its limit.
    np.clip(scores, -30, 30, out=scores)
    inverse = 1 + np.exp(-scores)  # 1 / s(score)
    noise = batch.pairs.sum(axis=1, keepdims=True) * batch.noise
    all_of_them = batch.pairs + noise
    slope = all_of_them / inverse - batch.pairs
    loss = np.vdot(all_of_them, np.log(inverse)) + np.vdot(noise, scores)

    rest = np.zeros(len(parameters.bias) + FIGURES, np.float32)
    rest[batch.targets] = slope.sum(axis=0)
    rest[-FIGURES:] = loss, batch.pairs.sum(), batch.words
    return Gradient(
        inputs=Rows(batch.centers, slope @ outputs),
        outputs=Rows(batch.targets, slope.T @ inputs),
        rest=rest,
    )


class Adagrad:
    """Steps along a gradient, the shorter in each direction the more was gone in it before."""

    def __init__(self, parameters: Parameters, rate: float, steps: int) -> None:
        """Start with a first square of 0.1, so that rounding errors are not blown up to steps."""
        self._parameters = parameters
        self._rate = rate
        self._steps = steps
        words, width = parameters.inputs.shape
        self._squares = Parameters.new(words, width)
        for squares in (self._squares.inputs, self._squares.outputs, self._squares.bias):
            squares[:] = 0.1

    def follow(self, mean: Gradient, step: int) -> None:
        """Change the parameters in place; the rate falls to nothing towards the last step."""
        rate = np.float32(self._rate * (1 - step / self._steps))
        old, squares = self._parameters, self._squares
        for table, seen, rows in (
            (old.inputs, squares.inputs, mean.inputs),
            (old.outputs, squares.outputs, mean.outputs),
        ):
            sums = seen[rows.indices] + rows.values**2
            seen[rows.indices] = sums
            table[rows.indices] -= rate * rows.values / np.sqrt(sums)
        bias = mean.rest[:-FIGURES]
        squares.bias[:] += bias**2
        old.bias[:] -= rate * bias / np.sqrt(squares.bias)


def mean(gradients: list[Gradient]) -> Gradient:
    """Average gradients by plain NumPy: what the accumulators do, without them."""
    return Gradient(
        inputs=_mean_rows([one.inputs for one in gradients]),
        outputs=_mean_rows([one.outputs for one in gradients]),
        rest=np.mean([one.rest for one in gradients], axis=0, dtype=np.float32),
    )


def _mean_rows(parts: list[Rows]) -> Rows:
    indices, place = np.unique(
        np.concatenate([part.indices for part in parts]), return_inverse=True
    )
    values = np.zeros((len(indices), parts[0].values.shape[1]), np.float32)
    np.add.at(values, place, np.concatenate([part.values for part in parts]))
    return Rows(indices, values / np.float32(len(parts)))


def neighbours(
    parameters: Parameters, word: int, candidates: NDArray[np.int64], wanted: int
) -> list[tuple[int, float]]:
    """Find the candidates whose vectors point most nearly where the word's does (cosine)."""
    table = parameters.inputs[candidates]
    vector = parameters.inputs[word]
    lengths = np.linalg.norm(table, axis=1) * np.linalg.norm(vector)
    cosine = table @ vector / np.maximum(lengths, 1e-12)
    best = [at for at in np.argsort(-cosine) if candidates[at] != word][:wanted]
    return [(int(candidates[at]), float(cosine[at])) for at in best]
