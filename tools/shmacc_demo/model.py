"""The task: word vectors from a text, by skip-gram with negative sampling and Adagrad. No shmacc.

The loss of a center word c beside a target t is -log s(u_c v_t + b_t), with s the logistic
function; beside a noise word it is -log s(-(u_c v_t + b_t)).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TABLES = ("inputs", "outputs", "bias")
STATE = (*TABLES, *(f"{table}.squares" for table in TABLES))  # which Adagrad divides by
Arrays = Mapping[str, NDArray[Any]]
Gradient = Mapping[str, Any]  # of each table `(rows, values)`; "figures": the loss, and the pairs

_WORD = re.compile(r"[^\W\d]+(?:'[^\W\d]+)*")  # with underscores: ``__getitem__`` is one word
_RAREST, _LARGEST = 5, 50_000  # a word that occurs less often is left out; so many words at most
_SUBSAMPLING = 3e-4  # a word that makes up more than this share of the text is thinned out


@dataclass(frozen=True)
class Plan:
    """With these numbers and a text the result is settled, unless there are backups."""

    workers: int = 3
    backup: int = 0  # the chief does not wait for so many gradients of a step
    steps: int = 1000
    seed: int = 1
    width: int = 64
    rate: float = 0.15
    spans: int = 24  # pieces of text in a batch
    span: int = 64  # words in a piece
    window: int = 5  # how far apart the two words of a pair may be
    draws: int = 256  # noise words of a batch; all its pairs share them ...
    negatives: int = 5  # ... and they weigh as so many for each pair

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if not (0 <= self.backup < self.workers and self.steps > 0 <= self.seed):
            raise ValueError("needed are a step, more workers than backups, and no negative number")


class Corpus(NamedTuple):
    """A text as the numbers of its words; number 0 is the most frequent word."""

    words: Sequence[str]
    counts: NDArray[np.int64]
    stream: NDArray[np.int32]


def read(path: Path | None) -> Corpus:
    """Read a text file; without a path the language reference that every CPython carries."""
    if path is None:
        from pydoc_data.topics import topics  # half a megabyte: only if it is wanted

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
    found = _WORD.findall(text.lower())
    common = [(word, n) for word, n in Counter(found).most_common(_LARGEST) if n >= _RAREST]
    numbers = {word: number for number, (word, _) in enumerate(common)}
    stream = np.array([numbers[word] for word in found if word in numbers], np.int32)
    if len(common) < 10 or len(stream) < 200:  # noqa: PLR2004
        raise ValueError(f"the text has {len(common)} words that occur {_RAREST} times or more")
    return Corpus(list(numbers), np.array([n for _, n in common]), stream)


def start(words: int, plan: Plan) -> Arrays:
    """Return the state that training starts from."""
    noise = np.random.default_rng(plan.seed).random((words, plan.width)) - 0.5
    inputs = (noise / np.sqrt(plan.width)).astype(np.float32)
    tables = {"inputs": inputs, "outputs": 0 * inputs, "bias": np.zeros(words, np.float32)}
    return tables | {f"{table}.squares": np.full_like(tables[table], 0.1) for table in TABLES}


class Batches:
    """The batches of a text, and their gradients: a pure function of seed, step, worker, state."""

    def __init__(self, counts: NDArray[np.int64], stream: NDArray[np.int32], plan: Plan) -> None:
        excess, noise = _SUBSAMPLING * counts.sum() / counts, np.cumsum(counts**0.75)
        self._stream, self._plan = stream, plan
        self._kept, self._noise = np.sqrt(excess) + excess, noise / noise[-1]

    def gradient(self, state: Arrays, step: int, worker: int) -> Gradient:
        """Differentiate the loss of a batch."""
        centers, targets, pairs, noise = self._draw(step, worker)
        inputs, outputs = state["inputs"][centers], state["outputs"][targets]
        scores = inputs @ outputs.T + state["bias"][targets]
        np.clip(scores, -30, 30, out=scores)  # exp overflows beyond 88; s is at its limit before
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
        """Return words, words near them or noise, how often they are near, how often noise."""
        plan, dice = self._plan, np.random.default_rng((self._plan.seed, step, worker))
        starts = dice.integers(0, len(self._stream) - plan.span + 1, (plan.spans, 1))
        words = self._stream[starts + np.arange(plan.span)].astype(np.int64)
        kept = dice.random(words.shape) < self._kept[words]
        order = np.argsort(~kept, axis=1, kind="stable")  # the kept ones close up, to the left
        words, kept = np.take_along_axis(words, order, 1), np.take_along_axis(kept, order, 1)
        reach = dice.integers(1, plan.window + 1, words.shape)
        near, others = [], []
        for apart in range(1, plan.window + 1):
            left, right, both = words[:, :-apart], words[:, apart:], kept[:, apart:]
            forward = both & (reach[:, :-apart] >= apart)
            backward = both & (reach[:, apart:] >= apart)
            near += [left[forward], right[backward]]
            others += [right[forward], left[backward]]
        drawn = np.searchsorted(self._noise, dice.random(plan.draws), side="right")
        centers, row = np.unique(np.concatenate(near), return_inverse=True)
        targets, column = np.unique(np.concatenate([*others, drawn]), return_inverse=True)
        width, many = len(targets), len(row)
        pairs = np.bincount(row * width + column[:many], minlength=len(centers) * width)
        pairs = pairs.reshape(-1, width).astype(np.float32)
        noise = np.bincount(column[many:], minlength=width) * (plan.negatives / plan.draws)
        return centers, targets, pairs, pairs.sum(axis=1, keepdims=True) * noise.astype(np.float32)


def _exact(values: NDArray[np.float32]) -> NDArray[np.float64]:
    # Multiples of 2**-30 have exact sums in float64. So in whatever order gradients arrive, the
    # result is that of one process, to the bit.
    return np.rint(values.astype(np.float64) * 2.0**30) / 2.0**30


def mean(gradients: Sequence[Gradient], state: Arrays) -> Mapping[str, Any]:
    """Average gradients with NumPy alone."""
    sums = {table: np.zeros(state[table].shape) for table in TABLES}
    for gradient in gradients:
        for table in TABLES:
            rows, values = gradient[table]
            sums[table][rows] += values
    figures = SimpleNamespace(value=np.sum([one["figures"] for one in gradients], axis=0))
    means = {name: total / len(gradients) for name, total in sums.items()}
    return {"figures": figures} | {
        name: SimpleNamespace(indices=slice(None), values=values) for name, values in means.items()
    }


def update(old: Arrays, new: Arrays, mean: Mapping[str, Any], step: int, plan: Plan) -> float:
    """Write the state of the next step into `new`; return the loss of a pair in the present one."""
    rate = np.float32(plan.rate * (1 - step / plan.steps))
    for name, values in old.items():
        new[name][...] = values
    for table in TABLES:
        rows, slope = mean[table].indices, mean[table].values.astype(np.float32)
        squares = old[f"{table}.squares"][rows] + slope**2
        new[f"{table}.squares"][rows] = squares
        new[table][rows] -= rate * slope / np.sqrt(squares)
    loss, pairs = mean["figures"].value
    return float(loss / pairs)
