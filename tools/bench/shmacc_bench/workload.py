"""Workloads: the shape and order of one gradient, and the gradient itself."""

import dataclasses
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["sparse", "dense"]
Order = Literal["sorted", "shuffled", "zipf", "zipf-sorted"]

ZIPF_EXPONENT = 1.2  # as word frequencies have; most rows of a gradient are repeats of a few
USUAL_TABLE_ROWS = 1_000_000
DTYPE = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One gradient's shape, and the table that it goes to. A dense gradient has `rows` numbers."""

    kind: Kind
    rows: int
    width: int = 1
    table_rows: int = USUAL_TABLE_ROWS
    order: Order = "sorted"

    @property
    def label(self) -> str:
        """The workload in a few words, as tables and file names show it."""
        if self.kind == "dense":
            return f"dense {self.rows * DTYPE.itemsize / 1e6:g} MB"
        order = "" if self.order == "sorted" else f" {self.order}"
        table = "" if self.table_rows == USUAL_TABLE_ROWS else f" into {self.table_rows:,}"
        return f"{self.rows:,} x {self.width}{order}{table}"

    @property
    def repeats(self) -> bool:
        """Whether indices occur more than once."""
        return self.order in {"zipf", "zipf-sorted"}

    @property
    def shape(self) -> tuple[int, ...]:
        """The accumulator's shape."""
        return (self.rows,) if self.kind == "dense" else (self.table_rows, self.width)


IDS = Workload("sparse", 50_000, 64, order="zipf")
"""A realistic batch of ids: they repeat, and are not sorted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient; if it is dense, `indices` is None, and `values` have one dimension."""

    indices: Any
    values: NDArray[Any]
    unique: bool

    def merged(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return ascending distinct rows, the sum of each, and how often each occurs."""
        rows, inverse, repeats = np.unique(self.indices, return_inverse=True, return_counts=True)
        sums = np.zeros((rows.size, self.values.shape[1]))
        np.add.at(sums, inverse, self.values)
        return rows, sums, repeats


def make_values(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return values of a few bits each, so that two of them add exactly."""
    return rng.integers(-64, 64, size=shape).astype(DTYPE)


def make_gradient(workload: Workload, seed: int = 0) -> Gradient:
    """Return a gradient of this workload; the same seed gives the same gradient."""
    rng = np.random.default_rng(seed)
    if workload.kind == "dense":
        return Gradient(None, make_values((workload.rows,), rng), unique=True)
    if workload.repeats:
        ranks = np.arange(1, workload.table_rows + 1, dtype=np.float64)
        weights = np.cumsum(ranks**-ZIPF_EXPONENT)
        drawn = np.searchsorted(weights, rng.random(workload.rows) * weights[-1])
        # As in a real table, the frequent rows lie anywhere, but are always the same rows.
        places = np.random.default_rng(workload.table_rows).permutation(workload.table_rows)
        indices = places[drawn].astype(np.int64)
        if workload.order == "zipf-sorted":
            indices.sort()
    else:
        indices = rng.choice(workload.table_rows, workload.rows, replace=False).astype(np.int64)
        if workload.order == "sorted":
            indices.sort()
    values = make_values((workload.rows, workload.width), rng)
    return Gradient(indices, values, unique=not workload.repeats)


def make_filling(workload: Workload) -> list[Gradient]:
    """Return ten gradients that together touch every row of the table once, in a mixed order."""
    rng = np.random.default_rng(1)
    rows = rng.permutation(workload.table_rows).astype(np.int64)
    filling = []
    for indices in map(np.sort, np.array_split(rows, 10)):
        values = make_values((indices.size, workload.width), rng)
        filling.append(Gradient(indices, values, unique=True))
    return filling
