"""The task: word vectors from a text, by skip-gram with negative sampling and Adagrad. No shmacc.

The loss of a center word c beside a target t is -log s(u_c v_t + b_t), with s the logistic
function; beside a noise word it is -log s(-(u_c v_t + b_t)).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TABLES = ("inputs", "outputs", "bias")
SQUARES = 0.1  # where Adagrad's sums of squares begin
Arrays = Mapping[str, NDArray[Any]]

_WORD = re.compile(r"[^\W\d]+(?:'[^\W\d]+)*")  # with underscores: ``__getitem__`` is one word
_RAREST, _MOST = 5, 50_000  # rarer words are left out; at most this many are kept
_FREQUENT = 3e-4  # a word that makes up more than this share of the text is thinned out


@dataclass(frozen=True)
class Plan:
    """The settings. Without backups, they and the text determine the result."""

    workers: int = 3
    backup: int = 0  # how many gradients of a step the chief does not wait for
    steps: int = 1000
    seed: int = 1
    width: int = 64
    rate: float = 0.15
    spans: int = 24  # pieces of text in a batch
    span: int = 64  # words in a piece
    window: int = 5  # how far apart the two words of a pair may be
    draws: int = 256  # noise words of a batch, shared by its pairs
    negatives: int = 5  # all noise words weigh as much as this many per pair

    def __post_init__(self) -> None:
        if not (0 <= self.backup < self.workers and self.steps > 0 <= self.seed):
            raise ValueError("needed are a step, more workers than backups, and no negative number")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step; it falls linearly to 0."""
        return self.rate * (1 - step / self.steps)


def read(path: Path | None) -> tuple[list[str], Arrays]:
    """Read a text, or the language reference; return its words, their counts, and the text."""
    from pydoc_data.topics import topics  # of the language reference, which every CPython carries

    text = path.read_text("utf-8", "replace") if path else "\n".join(topics.values())
    found = _WORD.findall(text.lower())
    counts = {word: n for word, n in Counter(found).most_common(_MOST) if n >= _RAREST}
    numbers = {word: number for number, word in enumerate(counts)}
    stream = np.array([numbers[word] for word in found if word in numbers], np.int32)
    if len(counts) < 10 or len(stream) < 200:  # noqa: PLR2004
        raise ValueError(f"the text has {len(counts)} words that occur {_RAREST} times or more")
    return list(counts), {"counts": np.array([*counts.values()]), "stream": stream}


def start(words: int, plan: Plan) -> dict[str, NDArray[Any]]:
    """Return the tables with which training starts."""
    noise = np.random.default_rng(plan.seed).random((words, plan.width)) - 0.5
    inputs = noise / np.sqrt(plan.width)
    return {"inputs": inputs, "outputs": 0 * inputs, "bias": 0 * inputs[:, 0]}


class Batches:
    """The batches of a text, and their gradients: a pure function of seed, step, worker, state."""

    def __init__(self, text: Arrays, plan: Plan) -> None:
        counts, self._stream, self._plan = text["counts"], text["stream"], plan
        excess, noise = _FREQUENT * counts.sum() / counts, np.cumsum(counts**0.75)
        self._kept, self._noise = np.sqrt(excess) + excess, noise / noise[-1]

    def gradient(self, state: Arrays, step: int, worker: int) -> dict[str, Any]:
        """Return `(rows, values)` for each table; "figures" are the loss and the count of pairs."""
        centers, targets, pairs, noise = self._draw(step, worker)
        inputs, outputs = state["inputs"][centers], state["outputs"][targets]
        inputs, outputs = inputs.astype(np.float32), outputs.astype(np.float32)  # float32 is faster
        scores = inputs @ outputs.T + state["bias"][targets].astype(np.float32)
        np.clip(scores, -30, 30, out=scores)  # exp overflows beyond 88; s saturates earlier
        inverse = 1 + np.exp(-scores)  # 1 / s(score)
        slope = (pairs + noise) / inverse - pairs
        loss = np.vdot(pairs + noise, np.log(inverse)) + np.vdot(noise, scores)
        return {
            "inputs": (centers, _exact(slope @ outputs)),
            "outputs": (targets, _exact(slope.T @ inputs)),
            "bias": (targets, _exact(slope.sum(axis=0))),
            "figures": _exact(np.array([loss, pairs.sum()])),
        }

    def _draw(self, step: int, worker: int) -> tuple[NDArray[Any], ...]:
        """Return centers, targets, how often each center is near each target, and noise weights."""
        plan, dice = self._plan, np.random.default_rng((self._plan.seed, step, worker))
        starts = dice.integers(0, len(self._stream) - plan.span + 1, (plan.spans, 1))
        words = self._stream[starts + np.arange(plan.span)].astype(np.int64)
        kept = dice.random(words.shape) < self._kept[words]
        order = np.argsort(~kept, axis=1, kind="stable")  # moves the kept words to the left
        words, kept = np.take_along_axis(words, order, 1), np.take_along_axis(kept, order, 1)
        reach = dice.integers(1, plan.window + 1, words.shape)
        near: list[Any] = []
        others: list[Any] = []
        for apart in range(1, plan.window + 1):
            both = kept[:, apart:] & (reach[:, apart:] >= apart)
            left, right = words[:, :-apart][both], words[:, apart:][both]
            near, others = [*near, left, right], [*others, right, left]
        drawn = np.searchsorted(self._noise, dice.random(plan.draws), side="right")
        centers, row = np.unique(np.concatenate(near), return_inverse=True)
        targets, column = np.unique(np.concatenate([*others, drawn]), return_inverse=True)
        width, many = len(targets), len(row)
        counted = np.bincount(row * width + column[:many], minlength=len(centers) * width)
        pairs = counted.reshape(-1, width).astype(np.float32)
        noise = np.bincount(column[many:], minlength=width) * (plan.negatives / plan.draws)
        return centers, targets, pairs, pairs.sum(axis=1, keepdims=True) * noise.astype(np.float32)


def _exact(values: NDArray[np.float32]) -> NDArray[np.float64]:
    # Sums of multiples of 2**-30 are exact in float64, so the order of arrival changes no bit.
    return np.rint(values.astype(np.float64) * 2.0**30) / 2.0**30
