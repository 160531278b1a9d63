"""A chief that is cut short in an update of a table, and what readers and the next chief find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from helpers import numpy_initial
from helpers.killing_updates import GROUP, PARAMS, UpdateScene

from shmacc import AccumulatorGroup, Parameters, TableSpec, init

if TYPE_CHECKING:
    from helpers.killing_updates import Gradient, State

WIDTH = 3
_SPEC = TableSpec((WIDTH,), initial=init.Uniform(-1, 1, seed=5))


@dataclass(frozen=True)
class TableScene(UpdateScene):
    """An update of a table that is cut short.

    Attributes:
        there: The ids of the first round.
        gone: The ids that the first round removes.
        changed: The ids of the second round, which is cut short.
        removed: The ids that the second round removes.
    """

    there: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()

    def make(self) -> tuple[Parameters, AccumulatorGroup]:
        """Parameters after a first round, and a group with a gradient in it."""
        params = Parameters({"t": _SPEC}, PARAMS, optimizer=self.optimizer)
        group = AccumulatorGroup(params.member_specs(), GROUP, lanes=self.lanes)
        assert group.apply({"t": _rows(self.there, 1)}, 0)
        with group.round(1) as taken:
            params.update(taken, remove={"t": self.gone})
        assert group.apply(self.gradient(2), 1)
        return params, group

    def gradient(self, seed: int) -> Gradient:
        """Rows of the ids that are changed."""
        return {"t": _rows(self.changed, seed)}

    def update(self, params: Parameters, taken: Any) -> bool:
        """Make the update."""
        if self.skips:
            return params.skip(taken)
        return params.update(taken, self.values, remove={"t": self.removed})

    def is_touched(self, known: tuple[State, State, State]) -> bool:
        """Check each row that a reader gets; return whether any differs from before."""
        before, after = (_rows_of(state) for state in known[:2])
        with Parameters.attach(PARAMS) as params:
            table = params["t"]
            old, new = (np.array(sorted(rows), np.int64) for rows in (before, after))
            certain = np.intersect1d(old, new)
            assert table.contains(certain).all()
            ids = np.union1d(old, new)
            assert np.isin(certain, table.ids()).all()
            assert np.isin(table.ids(), ids).all()
            found, rows = table.contains(ids), table[ids]
        first = numpy_rows(ids)
        for number, row, is_there, initial in zip(ids.tolist(), rows, found, first, strict=True):
            allowed = [rows[number] for rows in (before, after) if number in rows]
            assert is_there or number not in certain
            if number not in certain:
                allowed.append(initial)
            assert all(any(x == one[k] for one in allowed) for k, x in enumerate(row)), number
        expected = [
            before.get(number, initial) for number, initial in zip(ids.tolist(), first, strict=True)
        ]
        return bool(rows.tobytes() != np.array(expected).tobytes())


def numpy_rows(ids: Any) -> Any:
    """Return the first contents of the scenes' table."""
    return numpy_initial.rows(_SPEC.initial, ids, _SPEC.row_shape)


def _rows(ids: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((len(ids), WIDTH))
    return np.array(ids, np.int64), values.astype(np.float32)


def _rows_of(state: State) -> dict[int, Any]:
    saved = dict(state)
    ids = np.frombuffer(saved["0.ids"], np.int64)
    rows = np.frombuffer(saved["0.rows"], np.float32).reshape(-1, WIDTH)
    return dict(zip(ids.tolist(), rows, strict=True))
