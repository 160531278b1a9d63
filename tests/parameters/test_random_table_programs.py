"""Random programs of rounds, removals, exceptions and checkpoints of tables, beside a dict."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import numpy_initial
from helpers.numpy_optimizers import ALL, Reference
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, init

if TYPE_CHECKING:
    import numpy.typing as npt

    from shmacc import optim

# Few, so that they come back; and many at once, so that the index grows.
ids = st.lists(st.sampled_from([0, 1, 2, 3, 5, 2**31, 2**32 + 1, 2**40, 2**63 - 1]), max_size=6)
many = st.integers(0, 60)
numbers = st.integers(-8, 8)
leaves = st.sampled_from(["in order", "in order", "before the update", "after the update"])
rates = st.sampled_from([None, None, 0.25])
MOST = 40


class _Left(Exception):  # noqa: N818  it is no error
    """Leaves a block."""


class Model:
    """A table as a dict from id to row, each with what the optimizer keeps, and its last step."""

    def __init__(self, optimizer: optim.Optimizer, spec: TableSpec) -> None:
        """Begin with no rows."""
        self.optimizer = optimizer
        self.spec = spec
        self.updates = 0
        self.rows: dict[int, tuple[Reference, int]] = {}

    def row(self, number: int) -> Reference:
        """Return the row of an id, or what it has at first."""
        if number in self.rows:
            return self.rows[number][0]
        first = numpy_initial.rows(
            self.spec.initial, [number], self.spec.row_shape, self.spec.dtype
        )
        return Reference(self.optimizer, first)

    def update(self, gradient: dict[int, npt.NDArray[Any]], step: int, rate: float | None) -> None:
        """Apply gradients by id."""
        self.updates += bool(gradient) or getattr(self.optimizer, "as_torch", False)
        for number, values in gradient.items():
            row = self.row(number)
            row.updates = self.updates - 1
            row.update(values[None], np.array([0]), rate)
            self.rows[number] = row, step

    def set(self, number: int, values: npt.NDArray[Any], step: int) -> None:
        """Give a row other contents."""
        row = self.row(number)
        row.array[0] = values
        self.rows[number] = row, step

    def remove(self, numbers: list[int]) -> None:
        """Forget ids."""
        for number in numbers:
            self.rows.pop(number, None)


class Programs(RuleBasedStateMachine):
    """A group and its parameters; gradients are whole numbers, so that every sum is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[list[int], npt.NDArray[Any]]] = []
        self.step = self.params_step = 0
        self.is_in = False
        self.saved: tuple[Any, ...] | None = None

    @initialize(
        optimizer=st.sampled_from(ALL),
        dtype=st.sampled_from(["float32", "float64"]),
        row_shape=st.sampled_from([(3,), (), (2, 2), (16,)]),
        initial=st.sampled_from(
            [init.Constant(0.5), init.Uniform(-1, 1, seed=3), init.Normal(0, 1, seed=4)]
        ),
        limit=st.sampled_from([None, MOST]),
    )
    def begin(
        self,
        optimizer: Any,
        dtype: str,
        row_shape: tuple[int, ...],
        initial: Any,
        limit: int | None,
    ) -> None:
        self.spec = TableSpec(row_shape, dtype, initial=initial, max_rows=limit)
        self.params = Parameters(
            {"fixed": np.zeros(3), "table": self.spec},
            "params",
            optimizer={"table": optimizer},
            unlink_on_close=True,
        )
        specs = {"table": self.params.member_specs()["table"]}
        self.group = AccumulatorGroup(specs, "grads", reduction_type="SUM", unlink_on_close=True)
        self.model = Model(optimizer, self.spec)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.close()
            self.params.close()
            self.folder.cleanup()

    @rule(indices=ids, number=numbers)
    @precondition(lambda self: not self.is_in)
    def apply(self, indices: list[int], number: int) -> None:
        values = np.arange(len(indices) * self._width()) % 5 + number
        values = values.reshape(len(indices), *self.spec.row_shape).astype(self.spec.dtype)
        assert self.group.apply({"table": (np.array(indices, np.int64), values)}, self.step)
        self.pending.append((indices, values))

    @rule(first=many, count=many)
    @precondition(lambda self: not self.is_in)
    def apply_many(self, first: int, count: int) -> None:
        self.apply(list(range(first, first + count)), 1)

    @rule(end=leaves, rate=rates, skip=st.booleans(), removed=ids, stale=st.booleans())
    @precondition(lambda self: self.pending)
    def round(
        self, end: str, rate: float | None, removed: list[int], *, skip: bool, stale: bool
    ) -> None:
        was_in = self.is_in
        if stale:
            removed = self.params["table"].ids(updated_before=self.step - 1).tolist()
        left = self._left(removed) if not skip else set()
        too_many = self.spec.max_rows is not None and len(left) > MOST and not was_in
        with contextlib.suppress(_Left), self.group.round(1) as taken:
            if end == "before the update":
                raise _Left
            if skip:
                assert self.params.skip(taken) == (not was_in)
            elif too_many:
                with pytest.raises(errors.ResourceExhaustedError, match=f"max_rows is {MOST}"):
                    self.params.update(taken, remove={"table": removed})
                raise _Left
            else:
                made = self.params.update(
                    taken, remove={"table": np.array(removed, np.int64)}, learning_rate=rate
                )
                assert made == (not was_in)
            if not was_in:
                self.params_step = self.step + 1
                if not skip:
                    self.model.update(self._sums(), self.step, rate)
                    self.model.remove(removed)
            self.is_in = True
            if end == "after the update":
                raise _Left
        if end == "in order" and not too_many:
            self._next()
        self._check()

    @rule(number=numbers, given=ids, removed=ids)
    @precondition(lambda self: self.pending and not self.is_in)
    def new_rows(self, number: int, given: list[int], removed: list[int]) -> None:
        given = list(dict.fromkeys(given))
        values = np.full((len(given), *self.spec.row_shape), number, self.spec.dtype)
        if self.spec.max_rows and len({*self.model.rows, *given} - {*removed}) > MOST:
            return
        with self.group.round(1) as taken:
            assert self.params.update(taken, {"table": (given, values)}, remove={"table": removed})
        for row in given:
            self.model.set(row, values[0], self.step)
        self.model.remove(removed)
        self.params_step = self.step + 1
        self._next()
        self._check()

    @rule()
    @precondition(lambda self: not self.is_in)
    def save(self) -> None:
        shmacc.save(self._path, {"grads": self.group, "params": self.params})
        self.saved = copy.deepcopy((self.model, self.pending, self.step, self.params_step))

    @rule()
    @precondition(lambda self: self.saved is not None)
    def load(self) -> None:
        shmacc.load(self._path, {"grads": self.group, "params": self.params})
        assert self.saved is not None
        self.model, self.pending, self.step, self.params_step = copy.deepcopy(self.saved)
        self.is_in = False
        self._check()

    @rule()
    def another_process_sees_the_same(self) -> None:
        with Parameters.attach("params") as other:
            self._compare(other)

    @property
    def _path(self) -> Path:
        return Path(self.folder.name) / "saved.npz"

    def _width(self) -> int:
        return int(np.prod(self.spec.row_shape, dtype=np.int64))

    def _left(self, removed: list[int]) -> set[int]:
        return {*self.model.rows, *self._sums()} - {*removed}

    def _sums(self) -> dict[int, npt.NDArray[Any]]:
        table: dict[int, npt.NDArray[Any]] = {}
        for indices, values in self.pending:
            for row, value in zip(indices, values, strict=True):
                table[row] = np.asarray(table.get(row, 0) + value, self.spec.dtype)
        return table

    def _next(self) -> None:
        self.pending, self.is_in, self.step = [], False, self.step + 1

    def _check(self) -> None:
        assert self.params.step == self.params_step
        assert self.group.num_accumulated() == len(self.pending)
        self._compare(self.params)

    def _compare(self, params: Parameters) -> None:
        table, known = params["table"], sorted(self.model.rows)
        asked = np.array([*known, 3, 9, 2**62, *known], np.int64)
        assert len(table) == len(known)
        assert table.ids().tolist() == known
        assert table.contains(asked).tolist() == [number in self.model.rows for number in asked]
        steps = [self.model.rows[n][1] if n in self.model.rows else -1 for n in asked.tolist()]
        assert table.last_updated(asked).tolist() == steps
        expected = [self.model.row(number) for number in asked.tolist()]
        assert table[asked].tobytes() == b"".join(row.array.tobytes() for row in expected)
        for name, slot in params.slots["table"].items():
            made = b"".join(row.slots[name].tobytes() for row in expected)
            assert slot[asked].tobytes() == made, name
        step, copies = params.snapshot()
        assert step == self.params_step
        assert copies["table"].indices.tolist() == known
        rows = b"".join(self.model.row(number).array.tobytes() for number in known)
        assert copies["table"].values.tobytes() == rows


Programs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
test_programs = Programs.TestCase
