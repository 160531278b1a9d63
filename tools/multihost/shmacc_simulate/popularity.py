"""How many rows several gradients touch together: expected values, in closed form.

A gradient draws rows, by popularity and with repeats, until it has the wanted number of different
ones. That takes m draws, so row i is in it with probability 1 - (1 - q_i)^m, and in at least one of
n gradients with probability 1 - (1 - q_i)^(m n).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_EXACT = 10_000  # this many of the most popular rows have a bin each
_BINS = 10_000


@dataclass(frozen=True)
class Table:
    """A table, and how a gradient chooses its rows."""

    rows: int
    exponent: float | None = 1.0  # of Zipf's law; 0: all rows are equally popular; None: dense
    touched: int = 50_000  # different rows of a gradient

    @property
    def dense(self) -> bool:
        """Whether every gradient has every row."""
        return self.exponent is None

    @property
    def popularity(self) -> str:
        """How popular the rows are, in words."""
        if self.exponent is None:
            return "dense"
        return f"Zipf {self.exponent}" if self.exponent else "uniform"

    def union(self, gradients: int) -> float:
        """Return how many different rows this number of gradients is expected to touch."""
        if gradients <= 0:
            return 0.0
        return float(self.rows) if self.dense else _union(self, gradients)


@cache
def _bins(table: Table) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return how many rows each bin has, and the probability that a draw hits one given row."""
    ends = np.arange(1, min(_EXACT, table.rows) + 1, dtype=np.float64)
    if table.rows > _EXACT:
        ends = np.concatenate(
            [ends, np.unique(np.geomspace(_EXACT, table.rows, _BINS).round())[1:]]
        )
    sizes = np.diff(ends, prepend=0.0)
    middles = np.sqrt((ends - sizes + 1) * ends)
    weights = middles ** -(table.exponent or 0.0)
    return sizes, weights / float(np.dot(sizes, weights))


@cache
def _draws(table: Table) -> float:
    """Return how many draws give a gradient its number of different rows, by bisection."""
    low, high = float(table.touched), float(table.touched)
    while _different(table, high) < table.touched:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _different(table, middle) < table.touched:
            low = middle
        else:
            high = middle
    return high


@cache
def _union(table: Table, gradients: int) -> float:
    return _different(table, _draws(table) * gradients)


def _different(table: Table, draws: float) -> float:
    sizes, chances = _bins(table)
    return float(np.dot(sizes, -np.expm1(draws * np.log1p(-chances))))
