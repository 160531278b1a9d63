"""Measures tables with a row for each id, beside NumPy, pandas, and arrays in `Parameters`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmacc import AccumulatorGroup, Parameters, TableSpec, init, optim
from shmacc_bench.tables import Table, figure
from shmacc_bench.timing import microseconds

Ids = npt.NDArray[np.int64]
Pair = tuple[float, float]

_ROWS: Final = 1_000_000
_WIDTH: Final = 64
_READ, _NUMBERS_READ, _UPDATED = 50_000, 100_000, 30_000  # ids at a time
_GOALS: Final = {
    "read": 1.5, "number": 0.5, "update": 1.4, "new": 2.5, "grow": 3.0, "bytes": 190,
    "constrained": 1.25,
}  # fmt: skip


class _Trained:
    """Parameters with one member, and the group of its gradients; both private."""

    def __init__(
        self, stack: ExitStack, contents: Any, constraint: optim.Constraint | None = None
    ) -> None:
        optimizer = optim.Adagrad(0.05, constraint=constraint)
        self.params = stack.enter_context(Parameters({"it": contents}, optimizer=optimizer))
        specs = self.params.member_specs(["it"])
        self.group = stack.enter_context(AccumulatorGroup(specs))
        self.width = contents.row_shape if isinstance(contents, TableSpec) else contents.shape[1:]

    def update(self, ids: Ids) -> float:
        """Return the microseconds of an update of these rows."""
        gradient = np.ones((len(ids), *self.width), np.float32)
        self.group.apply({"it": (ids, gradient)}, self.group.global_step)
        with self.group.round(1) as taken:
            return microseconds(lambda: self.params.update(taken))

    def fill(self, ids: Ids) -> float:
        """Update all rows, a part of the ids at a time; return the microseconds in all."""
        parts = range(0, len(ids), _UPDATED)
        return sum(self.update(ids[first : first + _UPDATED]) for first in parts)


def measure(quick: bool) -> Iterator[Table]:
    """Yield the microseconds of reads and updates, and the bytes of a row."""
    turns = 9 if quick else 25
    random = np.random.default_rng(0)
    ids = random.permutation(np.unique(random.integers(0, 2**62, _ROWS + 1000))[:_ROWS])
    heads = ("of a million rows", "time", "beside", "time", "ratio")
    table = Table(f"Tables of ids, {_WIDTH} float32 a row (us)", heads)
    for key, what, against, pairs in _measured(ids, random, turns):
        table.compare(what, pairs, _GOALS[key], against)
    yield table
    yield _growing(1 if quick else 3)
    yield _memory(ids)


def _measured(
    ids: Ids, random: np.random.Generator, turns: int
) -> Iterator[tuple[str, str, str, list[Pair]]]:
    ascending = np.sort(ids)
    with ExitStack() as stack:
        spec = TableSpec((_WIDTH,), initial=init.Uniform(-0.05, 0.05, seed=1))
        mine = _Trained(stack, spec)
        mine.fill(ids)
        array = random.standard_normal((_ROWS, _WIDTH), np.float32)
        drawn = random.zipf(1.2, 10 * _READ)
        positions = random.permutation(_ROWS)[drawn[drawn <= _ROWS][:_READ] - 1]
        rows, wanted = mine.params["it"], ascending[positions]
        pairs = _pairs(turns, lambda: rows[wanted], lambda: array[positions])
        yield "read", f"table[ids], {_READ:,} by Zipf's law", "array[positions] of NumPy", pairs

        theirs = _Trained(stack, array)
        there = []
        for _ in range(turns):
            at = np.sort(random.choice(_ROWS, _UPDATED, replace=False))
            there.append((mine.update(ascending[at]), theirs.update(at)))
        what = f"Adagrad's update of {_UPDATED:,} ids"
        yield "update", what, "the same of an array's rows", there
        fresh = 2**62 + np.arange(turns * _UPDATED).reshape(turns, -1)
        new = [(mine.update(some), pair[0]) for some, pair in zip(fresh, there, strict=True)]
        yield "new", f"the same of {_UPDATED:,} new ids", "of ids that are there", new

        for constraint in optim.UnitNorm(), optim.MaxNorm(1.0), optim.Clip(-0.1, 0.1):
            bound = _Trained(stack, array, constraint)
            pairs = []
            for _ in range(turns):
                at = np.sort(random.choice(_ROWS, _UPDATED, replace=False))
                pairs.append((bound.update(at), theirs.update(at)))
            what = f"Adagrad's update of an array's {_UPDATED:,} rows, {constraint}"
            yield "constrained", what, "without", pairs
    try:
        import pandas as pd
    except ImportError:
        return
    with ExitStack() as stack:
        mine = _Trained(stack, TableSpec(()))
        mine.fill(ids)
        index, numbers = pd.Index(ids), np.ones(_ROWS, np.float32)
        wanted, rows = ids[random.integers(0, _ROWS, _NUMBERS_READ)], mine.params["it"]
        pairs = _pairs(turns, lambda: rows[wanted], lambda: numbers.take(index.get_indexer(wanted)))
        what = f"table[ids], {_NUMBERS_READ:,}, rows of one number"
        yield "number", what, "pandas' get_indexer, and take", pairs


def _growing(turns: int) -> Table:
    ids = np.random.default_rng(1).permutation(4 * _ROWS) * np.int64(2**40)
    pairs = []
    for _ in range(turns):
        with ExitStack() as stack:
            mine = _Trained(stack, TableSpec((_WIDTH,)))
            pairs.append((mine.fill(ids) / 1e6, mine.fill(ids) / 1e6))
    table = Table("A table that grows (s)", ("", "time", "once all are there", "ratio"))
    table.compare(f"4 million rows by {_UPDATED:,} a round", pairs, _GOALS["grow"])
    return table


def _memory(ids: Ids) -> Table:
    with ExitStack() as stack:
        mine = _Trained(stack, TableSpec((16,)))
        mine.fill(ids)
        each = mine.params["it"].nbytes / len(ids)
    table = Table("Bytes of a row, of a million", ("16 float32 with Adagrad", "bytes"))
    table.rows.append(("all of it", table.judged("bytes", each, _GOALS["bytes"])))
    table.rows.append(("of these rows and slots", figure(2 * 16 * 4)))
    return table


def _pairs(turns: int, mine: Callable[[], object], theirs: Callable[[], object]) -> list[Pair]:
    mine(), theirs()
    return [(microseconds(mine), microseconds(theirs)) for _ in range(turns)]
