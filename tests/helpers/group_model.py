"""A plain NumPy model of a group computes the expected results of rounds of gradients.

All values are whole numbers, so that every sum is exact in any order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from helpers.numpy_model import Array
from hypothesis import strategies as st

import shmacc
from shmacc import IndexedSlicesSpec, TensorSpec
from shmacc._base import layout

MEMBERS: Final[dict[str, TensorSpec]] = {
    **{of: IndexedSlicesSpec((10, 2), "float64", reduction_type=of) for of in layout.REDUCTIONS},
    **{f"dense {of}": TensorSpec((2,), "float64", reduction_type=of) for of in layout.REDUCTIONS},
    "any rows": IndexedSlicesSpec((None, 2), "float64"),
    "integers": TensorSpec((3,), "int32", reduction_type="SUM"),
    "scalar": TensorSpec((), "float64"),
}
SPARSE: Final = tuple(name for name, spec in MEMBERS.items() if isinstance(spec, IndexedSlicesSpec))

_numbers: Final = st.integers(-9, 9)
_rows: Final = st.lists(st.tuples(st.integers(0, 9), _numbers, _numbers), max_size=4).map(
    lambda rows: (
        np.array([row for row, *_ in rows], np.int64),
        np.array([values for _, *values in rows], np.float64).reshape(-1, 2),
    )
)


def _size(spec: TensorSpec) -> int:
    return math.prod(dim or 0 for dim in spec.shape or ())


def _array_of(spec: TensorSpec) -> Callable[[list[int]], Array]:
    shape: Any = spec.shape
    return lambda numbers: np.array(numbers, np.int32).reshape(shape)


gradients: Final[st.SearchStrategy[dict[str, Any]]] = st.fixed_dictionaries(
    {},
    optional={
        name: _rows
        if name in SPARSE
        else st.lists(_numbers, min_size=_size(spec), max_size=_size(spec)).map(_array_of(spec))
        for name, spec in MEMBERS.items()
    },
)


@dataclass
class Part:
    """The sums of one member's gradients: rows with their weights, or an array."""

    count: int
    weight: int
    rows: dict[int, tuple[Array, int]] = field(default_factory=dict)
    array: Any = 0

    def add(self, other: "Part") -> None:
        self.count += other.count
        self.weight += other.weight
        self.array = self.array + other.array
        for row, (values, weight) in other.rows.items():
            before, touched = self.rows.get(row, (np.zeros(2), 0))
            self.rows[row] = (before + values, touched + weight)


@dataclass
class Sums:
    """The sums of several gradients of a group."""

    count: int = 0
    weight: int = 0
    contributors: set[int] = field(default_factory=set)
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def of(cls, gradient: dict[str, Any], weight: int, contributor: int | None) -> "Sums":
        sums = cls(1, weight, set() if contributor is None else {contributor})
        for name, value in gradient.items():
            part = sums.parts[name] = Part(1, weight)
            if name not in SPARSE:
                part.array = value.astype(np.float64) * weight
                continue
            for row, values in zip(*value, strict=True):
                before, _ = part.rows.get(int(row), (np.zeros(2), 0))
                part.rows[int(row)] = (before + values * weight, weight)
        return sums

    def add(self, other: "Sums") -> None:
        self.count += other.count
        self.weight += other.weight
        self.contributors |= other.contributors
        for name, part in other.parts.items():
            self.parts.setdefault(name, Part(0, 0)).add(part)

    def check(self, taken: Any, step: int, *, divided: bool) -> None:
        assert (taken.count, taken.weight, taken.step) == (self.count, self.weight, step)
        assert taken.contributors.tolist() == sorted(self.contributors)
        assert taken.contributors.dtype == np.int64
        assert set(taken) == set(self.parts)
        for name, part in self.parts.items():
            got = taken[name]
            assert (got.count, got.weight, got.step) == (part.count, part.weight, step)
            assert got.contributors.tolist() == sorted(self.contributors)
            each: Any = part.weight
            if name in SPARSE:
                rows = sorted(part.rows)
                assert got.indices.tolist() == rows
                assert got.row_counts.tolist() == [part.rows[row][1] for row in rows]
                each = got.row_counts[:, None]
                sums = np.array([part.rows[row][0] for row in rows]).reshape(-1, 2)
            else:
                sums = part.array
            reduction = MEMBERS[name].reduction_type or "MEAN"
            by = {"SUM": 1, "MEAN": each, "CMEAN": self.weight}[reduction] if divided else 1
            values = got.values if name in SPARSE else got.value
            np.testing.assert_array_equal(values, sums / by)


class ModelledGroup:
    """A group and its model, compared after every call."""

    def __init__(self, lanes: int, shared_name: str | None = None) -> None:
        self.group = shmacc.AccumulatorGroup(MEMBERS, shared_name, lanes=lanes)
        self.sums = Sums()
        self.step = 0

    def apply(
        self, gradient: dict[str, Any], offset: int, contributor: int | None, weight: int
    ) -> None:
        fresh = offset >= 0
        got = self.group.apply(
            gradient, self.step + offset, contributor=contributor, weight=weight, timeout=0
        )
        assert got is fresh
        if fresh and contributor not in self.sums.contributors:
            self.sums.add(Sums.of(gradient, weight, contributor))
        self.agree()

    def apply_partial(self, partial: Any, sums: Sums) -> None:
        if sums.contributors & self.sums.contributors:
            try:
                self.group.apply_partial(partial, shmacc.NEVER_STALE, timeout=0)
            except shmacc.errors.AlreadyExistsError:
                self.agree()
                return
            raise AssertionError("a contributor is in twice")
        assert self.group.apply_partial(partial, shmacc.NEVER_STALE, timeout=0)
        self.sums.add(sums)
        self.agree()

    def take(self) -> None:
        if self.sums.count:
            taken = self.group.take(self.sums.count, timeout=0)
            self.sums.check(taken, self.step, divided=True)
            self.sums, self.step = Sums(), self.step + 1
        self.agree()

    def take_partial(self) -> tuple[Any, Sums]:
        partial, sums = self.group.take_partial(0, timeout=0), self.sums
        sums.check(partial, self.step, divided=False)
        self.sums = Sums()
        self.agree()
        return partial, sums

    def round(self, *, raises: bool) -> None:
        """Open a round, and leave its block by an exception or normally."""
        if not self.sums.count:
            return
        try:
            with self.group.round(1, timeout=0) as taken:
                self.sums.check(taken, self.step, divided=True)
                if raises:
                    raise LookupError  # noqa: TRY301 - to leave the block by an exception
        except LookupError:
            self.agree()
        else:
            self.sums, self.step = Sums(), self.step + 1
            self.agree()

    def advance(self, steps: int) -> None:
        assert self.group.advance_step(self.step + steps) == (self.sums.count if steps else 0)
        if steps:
            self.sums, self.step = Sums(), self.step + steps
        self.agree()

    def agree(self) -> None:
        """Compare everything that can be read from the group without a change to the group."""
        assert self.group.num_accumulated() == self.sums.count
        assert self.group.global_step == self.step
        assert self.group.contributors().tolist() == sorted(self.sums.contributors)
        self.sums.check(self.group.snapshot(), self.step, divided=True)
