"""Random programs of rounds, updates, exceptions and checkpoints, beside a model in plain NumPy."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers.numpy_optimizers import ALL, Reference
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors

if TYPE_CHECKING:
    import numpy.typing as npt

ROWS, WIDTH, SIZE = 12, 3, 5

rows = st.lists(st.integers(0, ROWS - 1), max_size=6)  # an index may occur twice
numbers = st.integers(-8, 8)
# A loss of the chief's: an exception at this point of its block.
leaves = st.sampled_from(["in order", "in order", "before the update", "after the update"])
rates = st.sampled_from([None, None, 0.25])


class _Left(Exception):  # noqa: N818  it is no error
    """Leaves a block."""


class Programs(RuleBasedStateMachine):
    """A group and its parameters; gradients are whole numbers, so that every sum is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[dict[str, Any]] = []
        self.step = 0
        self.params_step = 0
        self.is_in = False  # the open round is in the parameters, and final
        self.saved: tuple[Any, ...] | None = None

    @initialize(
        optimizers=st.tuples(st.sampled_from(ALL), st.sampled_from(ALL)),
        dtype=st.sampled_from(["float32", "float64"]),
        lanes=st.integers(1, 3),
    )
    def begin(self, optimizers: Any, dtype: str, lanes: int) -> None:
        random = np.random.default_rng(0)
        contents = {
            "table": random.standard_normal((ROWS, WIDTH)).astype(dtype),
            "vector": random.standard_normal(SIZE).astype(dtype),
        }
        pair = dict(zip(contents, optimizers, strict=True))
        self.params = Parameters(contents, "params", optimizer=pair, unlink_on_close=True)
        specs = self.params.member_specs(sparse=["table"])
        self.group = AccumulatorGroup(
            specs, "grads", reduction_type="SUM", lanes=lanes, unlink_on_close=True
        )
        self.model = {name: Reference(pair[name], contents[name]) for name in contents}
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.close()
            self.params.close()
            self.folder.cleanup()

    # What is done

    @rule(indices=rows, number=numbers, has=st.sampled_from(["table", "vector", "both"]))
    @precondition(lambda self: not self.is_in)
    def apply(self, indices: list[int], number: int, has: str) -> None:
        gradient: dict[str, Any] = {}
        if has != "vector":
            values = np.arange(len(indices) * WIDTH).reshape(-1, WIDTH) % 5 + number
            gradient["table"] = np.array(indices, np.int64), self._like(values)
        if has != "table":
            gradient["vector"] = self._like(np.arange(SIZE) + number)
        assert self.group.apply(gradient, self.step)
        self.pending.append(gradient)

    @rule(end=leaves, rate=rates, skip=st.booleans())
    @precondition(lambda self: self.pending)
    def round(self, end: str, rate: float | None, *, skip: bool) -> None:
        was_in = self.is_in
        with contextlib.suppress(_Left), self.group.round(1) as taken:
            assert (taken.step, taken.count) == (self.step, len(self.pending))
            if end == "before the update":
                raise _Left
            if skip:
                assert self.params.skip(taken) == (not was_in)
            else:
                assert self.params.update(taken, learning_rate=rate) == (not was_in)
            if not was_in:
                self.params_step = self.step + 1
                if not skip:
                    self._update(rate)
            self.is_in = True
            if end == "after the update":
                raise _Left
        if end == "in order":
            self._next()
        self._check()

    @rule(number=numbers)
    @precondition(lambda self: self.pending and not self.is_in)
    def new_contents(self, number: int) -> None:
        """An optimizer of one's own gives rows of the table, and the slots stay."""
        values = self._like(np.full((2, WIDTH), number))
        with self.group.round(1) as taken:
            only = {name: part for name, part in taken.items() if name == "vector"}
            assert self.params.update(taken, {"table": ([3, 7], values)})
        self.model["table"].array[[3, 7]] = values
        if only:
            self.model["vector"].update(self._like(self._sums()[1]))
        self.params_step = self.step + 1
        self._next()
        self._check()

    @rule()
    def a_take(self) -> None:
        if self.is_in:
            self.group.take(1)
            self._next()
        elif not self.pending:
            assert self.group.snapshot().count == 0
        self._check()

    @rule()
    def advance(self) -> None:
        """Drop what is pending; a final round that is in ends with that."""
        self.group.advance_step(self.step + 1)
        self._next()
        self._check()

    @rule()
    def bad_updates(self) -> None:
        """They change nothing, and make nothing final."""
        if not self.pending or self.is_in:
            return
        wrong: tuple[Any, ...] = ({"table": ([ROWS], np.zeros((1, WIDTH)))}, {"none": 1.0})
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
        kept = self.model, self.pending, self.step, self.params_step
        self.saved = copy.deepcopy(kept)

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
            for name, reference in self.model.items():
                assert other[name].tobytes() == reference.array.tobytes()
        step, copies = self.params.snapshot()
        assert step == self.params_step
        assert all(copies[n].tobytes() == m.array.tobytes() for n, m in self.model.items())

    # What is then there

    @property
    def _path(self) -> Path:
        return Path(self.folder.name) / "saved.npz"

    def _like(self, values: Any) -> npt.NDArray[Any]:
        return np.asarray(values).astype(self.model["vector"].array.dtype)

    def _sums(self) -> tuple[dict[int, npt.NDArray[Any]], npt.NDArray[Any]]:
        table: dict[int, npt.NDArray[Any]] = {}
        for indices, values in (g["table"] for g in self.pending if "table" in g):
            for row, value in zip(indices.tolist(), values, strict=True):
                table[row] = table.get(row, 0) + value
        return table, sum((g["vector"] for g in self.pending if "vector" in g), np.zeros(()))

    def _update(self, rate: float | None) -> None:
        table, vector = self._sums()
        if table:
            touched = np.array(sorted(table))
            self.model["table"].update(np.stack([table[row] for row in touched]), touched, rate)
        if any("vector" in gradient for gradient in self.pending):
            self.model["vector"].update(self._like(vector), rate=rate)

    def _next(self) -> None:
        self.pending, self.is_in, self.step = [], False, self.step + 1

    def _check(self) -> None:
        assert self.params.step == self.params_step
        assert self.group.global_step == self.step
        assert self.group.num_accumulated() == len(self.pending)
        for name, reference in self.model.items():
            assert self.params[name].tobytes() == reference.array.tobytes()
            for slot, expected in reference.slots.items():
                assert self.params.slots[name][slot].tobytes() == expected.tobytes(), slot


Programs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
test_programs = Programs.TestCase
