"""Random programs of rounds, updates, errors and checkpoints give a model's results."""

import contextlib
import copy
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from helpers import numpy_initial
from helpers.numpy_optimizers import ALL, OF_ROWS, Reference, by_name
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, init, optim

ROWS, SIZE, MOST = 12, 5, 40

rows = st.lists(st.integers(0, ROWS - 1), max_size=6)  # an index may occur twice
# There are few ids, so that they repeat. `many` adds many at once, so that the index grows.
ids = st.lists(st.sampled_from([0, 1, 2, 3, 5, 2**31, 2**32 + 1, 2**40, 2**63 - 1]), max_size=6)
many = st.integers(0, 60)
numbers = st.integers(-8, 8)
# An exception ends the chief's block at this point.
leaves = st.sampled_from(["in order", "in order", "before the update", "after the update"])
rates = st.sampled_from([None, None, 0.25])
ages = st.sampled_from([None, 0, 2])  # after this many steps a row is forgotten


class _Left(Exception):  # noqa: N818  it is no error
    """An exception that leaves a block."""


class Rows:
    """A model of a table: a dict from id to the row, its slots and its last step."""

    def __init__(self, optimizer: optim.Optimizer, spec: TableSpec) -> None:
        """Begin with no rows."""
        self.optimizer = optimizer
        self.spec = spec
        self.updates = 0
        self.rows: dict[int, tuple[Reference, int]] = {}

    def row(self, number: int) -> Reference:
        """Return the row of an id, or its initial row."""
        if number in self.rows:
            return self.rows[number][0]
        shape = self.spec.row_shape or (1,)  # for rowwise slots a number is a row, too
        first = numpy_initial.rows(self.spec.initial, [number], shape, self.spec.dtype)
        return Reference(self.optimizer, first)

    def update(self, gradient: dict[int, npt.NDArray[Any]], step: int, rate: float | None) -> None:
        """Update the rows of the ids that have gradients."""
        self.updates += bool(gradient) or getattr(self.optimizer, "as_torch", False)
        for number, values in gradient.items():
            row = self.row(number)
            row.updates = self.updates - 1
            row.update(values.reshape(row.array.shape), np.array([0]), rate)
            self.rows[number] = row, step

    def remove(self, numbers: list[int]) -> None:
        """Forget ids."""
        for number in numbers:
            self.rows.pop(number, None)


class Programs(RuleBasedStateMachine):
    """A group, its parameters and their models. Gradients are whole numbers: sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[dict[str, Any]] = []
        self.step = self.params_step = 0
        self.is_in = False  # whether the pending round is final: the parameters have its update
        self.saved: tuple[Any, ...] | None = None

    @initialize(
        optimizers=st.tuples(*3 * [st.sampled_from([*ALL, *OF_ROWS])]),
        dtype=st.sampled_from(["float32", "float64"]),
        row_shape=st.sampled_from([(3,), (), (2, 2), (16,)]),
        initial=st.sampled_from(
            [init.Constant(0.5), init.Uniform(-1, 1, seed=3), init.Normal(0, 1, seed=4)]
        ),
        limit=st.sampled_from([None, MOST]),
        lanes=st.integers(1, 3),
    )
    def begin(
        self,
        optimizers: Any,
        dtype: str,
        row_shape: tuple[int, ...],
        initial: Any,
        limit: int | None,
        lanes: int,
    ) -> None:
        random = np.random.default_rng(0)
        self.spec = TableSpec(row_shape, dtype, initial=initial, max_rows=limit)
        arrays = {
            "rows": random.standard_normal((ROWS, 3)).astype(dtype),
            "vector": random.standard_normal(SIZE).astype(dtype),
        }
        contents = {**arrays, "table": self.spec}
        by = {
            name: by_name(optimizer, contents)[name]
            for name, optimizer in zip(contents, optimizers, strict=True)
        }
        self.params = Parameters(contents, "params", optimizer=by, unlink_on_close=True)
        specs = self.params.member_specs(sparse=["rows"])
        self.group = AccumulatorGroup(
            specs, "grads", reduction_type="SUM", lanes=lanes, unlink_on_close=True
        )
        self.arrays = {name: Reference(by[name], arrays[name]) for name in arrays}
        self.table = Rows(by["table"], self.spec)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.close()
            self.params.close()
            self.folder.cleanup()

    # Operations

    @rule(given=ids, indices=rows, number=numbers, has=st.sets(st.sampled_from("rvt"), min_size=1))
    @precondition(lambda self: not self.is_in)
    def apply(self, given: list[int], indices: list[int], number: int, has: set[str]) -> None:
        gradient = self._gradient(given, indices, number, has)
        assert self.group.apply(gradient, self.step)
        self.pending.append(gradient)

    def _gradient(
        self, given: list[int], indices: list[int], number: int, has: set[str]
    ) -> dict[str, Any]:
        gradient: dict[str, Any] = {}
        if "r" in has:
            gradient["rows"] = np.array(indices, np.int64), self._whole(number, len(indices), 3)
        if "v" in has:
            gradient["vector"] = self._whole(number, SIZE)
        if "t" in has:
            values = self._whole(number, len(given), *self.spec.row_shape)
            gradient["table"] = np.array(given, np.int64), values
        return gradient

    @rule(first=many, count=many)
    @precondition(lambda self: not self.is_in)
    def apply_many(self, first: int, count: int) -> None:
        self.apply(list(range(first, first + count)), [], 1, {"t"})

    @rule(end=leaves, rate=rates, skip=st.booleans(), removed=ids, age=ages)
    @precondition(lambda self: self.pending)
    def round(
        self, end: str, rate: float | None, removed: list[int], age: int | None, *, skip: bool
    ) -> None:
        was_in = self.is_in
        forget = {} if age is None else {"table": age}
        gone = [*removed, *self._old(age, self._sums("table"))]
        left = {*self.table.rows, *self._sums("table")} - {*gone}
        too_many = not skip and not was_in and self.spec.max_rows is not None and len(left) > MOST
        with contextlib.suppress(_Left), self.group.round(1) as taken:
            assert (taken.step, taken.count) == (self.step, len(self.pending))
            if end == "before the update":
                raise _Left
            if skip:
                assert self.params.skip(taken) == (not was_in)
            elif too_many:
                with pytest.raises(errors.ResourceExhaustedError, match=f"max_rows is {MOST}"):
                    self.params.update(taken, remove={"table": removed}, forget=forget)
                raise _Left
            else:
                remove = {"table": np.array(removed, np.int64)}
                made = self.params.update(taken, remove=remove, forget=forget, learning_rate=rate)
                assert made == (not was_in)
            if not was_in:
                self.params_step = self.step + 1
                if not skip:
                    self._update(rate, {"rows", "vector", "table"})
                    self.table.remove(gone)
            self.is_in = True
            if end == "after the update":
                raise _Left
        if end == "in order" and not too_many:
            self._next()
        self._check()

    @rule(
        given=ids,
        indices=rows,
        number=numbers,
        has=st.sets(st.sampled_from("rvt"), min_size=1),
        age=ages,
    )
    @precondition(lambda self: self.pending and not self.is_in)
    def given_gradients(
        self, given: list[int], indices: list[int], number: int, has: set[str], age: int | None
    ) -> None:
        """Replace gradients of the round in the update; repeated rows are added up."""
        gradient = self._gradient(given, indices, number, has)
        in_round, kept = self._sums("table"), self.pending
        others = [{n: v for n, v in each.items() if n not in gradient} for each in kept]
        self.pending = [*others, gradient]
        gone = self._old(age, {**in_round, **self._sums("table")})
        if self.spec.max_rows and len({*self.table.rows, *self._sums("table")} - {*gone}) > MOST:
            self.pending = kept
            return
        forget = None if age is None else {"table": age}
        with self.group.round(1) as taken:
            assert self.params.update(taken, gradients=gradient, forget=forget)
        self._update(None, {"rows", "vector", "table"})
        self.table.remove(gone)
        self.params_step = self.step + 1
        self._next()
        self._check()

    @rule(number=numbers, given=ids, removed=ids)
    @precondition(lambda self: self.pending and not self.is_in)
    def new_contents(self, number: int, given: list[int], removed: list[int]) -> None:
        """Set rows to new contents without the optimizer; slots stay."""
        given = list(dict.fromkeys(given))
        if self.spec.max_rows and len({*self.table.rows, *given} - {*removed}) > MOST:
            return
        dtype = self.spec.dtype
        of_table = np.full((len(given), *self.spec.row_shape), number, dtype)
        of_rows = np.full((2, 3), number, dtype)
        values = {"table": (given, of_table), "rows": ([3, 7], of_rows)}
        with self.group.round(1) as taken:
            assert self.params.update(taken, values, remove={"table": removed})
        self._update(None, {"vector"})
        self.arrays["rows"].array[[3, 7]] = of_rows
        for one in given:
            row = self.table.row(one)
            row.array[0] = number
            self.table.rows[one] = row, self.step
        self.table.remove(removed)
        self.params_step = self.step + 1
        self._next()
        self._check()

    @rule()
    @precondition(lambda self: self.is_in)
    def a_take(self) -> None:
        self.group.take(1)
        self._next()
        self._check()

    @rule()
    def advance(self) -> None:
        """Advance the step, which drops pending gradients or ends a final round."""
        self.group.advance_step(self.step + 1)
        self._next()
        self._check()

    @rule()
    @precondition(lambda self: self.pending and not self.is_in)
    def bad_updates(self) -> None:
        """Try bad updates, which must change nothing and make no round final."""
        wrong: tuple[Any, ...] = ({"rows": ([ROWS], np.zeros((1, 3)))}, {"none": 1.0})
        with contextlib.suppress(_Left), self.group.round(1) as taken:
            for values in wrong:
                with pytest.raises(errors.InvalidArgumentError):
                    self.params.update(taken, values)
            raise _Left
        self._check()

    @rule()
    @precondition(lambda self: not self.is_in)
    def save(self) -> None:
        shmacc.save(self._path, {"grads": self.group, "params": self.params})
        kept = self.arrays, self.table, self.pending, self.step, self.params_step
        self.saved = copy.deepcopy(kept)

    @rule()
    @precondition(lambda self: self.saved is not None)
    def load(self) -> None:
        shmacc.load(self._path, {"grads": self.group, "params": self.params})
        kept: Any = copy.deepcopy(self.saved)
        self.arrays, self.table, self.pending, self.step, self.params_step = kept
        self.is_in = False
        self._check()

    @rule()
    def another_process_sees_the_same(self) -> None:
        with Parameters.attach("params") as other:
            self._compare(other)

    # Observations

    @property
    def _path(self) -> Path:
        return Path(self.folder.name) / "saved.npz"

    def _whole(self, number: int, *shape: int) -> npt.NDArray[Any]:
        size = int(np.prod(shape, dtype=np.int64))
        return (np.arange(size) % 5 + number).reshape(shape).astype(self.spec.dtype)

    def _old(self, age: int | None, kept: Container[int]) -> list[int]:
        """Return the ids that an update forgets."""
        if age is None:
            return []
        last = {number: step for number, (_, step) in self.table.rows.items()}
        return [n for n, step in last.items() if step < self.step - age and n not in kept]

    def _sums(self, name: str) -> dict[int, npt.NDArray[Any]]:
        sums: dict[int, npt.NDArray[Any]] = {}
        for indices, values in (g[name] for g in self.pending if name in g):
            for row, value in zip(indices.tolist(), values, strict=True):
                sums[row] = np.asarray(sums.get(row, 0) + value, self.spec.dtype)
        return sums

    def _update(self, rate: float | None, members: set[str]) -> None:
        given = {name for gradient in self.pending for name in gradient} & members
        if "rows" in given:
            sums = self._sums("rows")
            touched = np.array(sorted(sums), np.int64)
            values = np.array([sums[row] for row in touched], self.spec.dtype).reshape(-1, 3)
            self.arrays["rows"].update(values, touched, rate)
        if "vector" in given:
            total = np.sum([g["vector"] for g in self.pending if "vector" in g], axis=0)
            self.arrays["vector"].update(total, rate=rate)
        if "table" in given:
            self.table.update(self._sums("table"), self.step, rate)

    def _next(self) -> None:
        self.pending, self.is_in, self.step = [], False, self.step + 1

    def _check(self) -> None:
        assert self.params.step == self.params_step
        assert self.group.global_step == self.step
        assert self.group.num_accumulated() == len(self.pending)
        self._compare(self.params)

    def _compare(self, params: Parameters) -> None:
        step, copies = params.snapshot()
        assert step == self.params_step
        assert type(copies["table"]) is shmacc.IndexedSlices
        for name, reference in self.arrays.items():
            assert params[name].tobytes() == copies[name].tobytes() == reference.array.tobytes()
            for slot, expected in reference.slots.items():
                assert params.slots[name][slot].tobytes() == expected.tobytes(), slot
        table, known = params["table"], sorted(self.table.rows)
        asked = np.array([*known, 3, 9, 2**62, *known], np.int64)
        assert len(table) == len(known)
        assert table.ids().tolist() == copies["table"].indices.tolist() == known
        assert table.contains(asked).tolist() == [one in self.table.rows for one in asked]
        steps = [self.table.rows[n][1] if n in self.table.rows else -1 for n in asked.tolist()]
        assert table.last_updated(asked).tolist() == steps
        rows = [self.table.row(number) for number in asked.tolist()]
        in_bytes = [row.array.tobytes() for row in rows]
        assert table[asked].tobytes() == b"".join(in_bytes)
        assert copies["table"].values.tobytes() == b"".join(in_bytes[: len(known)])
        for name, slot in params.slots["table"].items():
            made = b"".join(row.slots[name].tobytes() for row in rows)
            assert slot[asked].tobytes() == made, name


Programs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
test_programs = Programs.TestCase
