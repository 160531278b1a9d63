"""Sums and results of many members on their way: a few columns, one member's part after the other.

An array costs a message more than the bytes of a small one, and each array's checks and views cost
more than to add its rows. So what hosts send to shards, and shards to the chief, is one table of
the members that it has, one column of all their rows, and one of all their values.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._gradients.member import MemberGradient
from shmacc._records.array_types import IndexArray
from shmacc.errors import InvalidArgumentError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_LARGE = 1 << 20  # bytes of a part that stays an array of its own: to copy it would cost more
_ALIGNED = 8
_PADDING = np.zeros(_ALIGNED, np.uint8)
_UNBOUNDED = (1 << 63) - 1


@dataclass(frozen=True)
class Format:
    """How the members of a group, by number, are divided into columns.

    Attributes:
        names: Their names.
        sparse: Whether they have rows.
        limits: Of sparse ones how many rows there may be.
        dims: Of sparse ones the dimensions of a row, of dense ones all.
        dtypes: Of the values: of their sums, or of their results.
    """

    names: tuple[str, ...]
    sparse: npt.NDArray[np.bool_]
    limits: IndexArray
    dims: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, members: Iterable[tuple[str, bool, tuple[Any, ...], np.dtype[Any]]]) -> Self:
        """Make the format of members: of each its name, whether it is sparse, shape, and dtype."""
        names, sparse, shapes, dtypes = zip(*members, strict=True)
        limits = [
            shape[0] if is_sparse and shape and shape[0] is not None else _UNBOUNDED
            for is_sparse, shape in zip(sparse, shapes, strict=True)
        ]
        dims = [
            shape[1:] if is_sparse else shape
            for is_sparse, shape in zip(sparse, shapes, strict=True)
        ]
        return cls(names, np.array(sparse), np.array(limits, np.int64), tuple(dims), dtypes)

    @cached_property
    def widths(self) -> IndexArray:
        """Return how many bytes a row of each member takes, or an element of a dense one."""
        elements = np.where(self.sparse, self.sizes, 1)
        return elements * np.array([dtype.itemsize for dtype in self.dtypes], np.int64)

    @cached_property
    def sizes(self) -> IndexArray:
        """Return how many elements each dense member has, or a row of a sparse one."""
        return np.array([math.prod(dims) for dims in self.dims], np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which members there are, and the rows of all sparse ones.

    Attributes:
        table: int64, a line for each member that is there, in order of number: number, count and
            weight of its gradients, and how many rows it has, or elements if it is dense.
        numbers: int64: of each row its number.
        counts: int64: of each row its weights, added up.
    """

    table: IndexArray
    numbers: IndexArray
    counts: IndexArray

    @classmethod
    def of(
        cls,
        table: Sequence[tuple[int, int, int, int]],
        numbers: Sequence[IndexArray],
        counts: Sequence[IndexArray],
    ) -> Self:
        """Put the parts of members together."""
        none = np.empty(0, np.int64)
        lines = np.array(table, np.int64).reshape(-1, 4)
        return cls(lines, np.concatenate([none, *numbers]), np.concatenate([none, *counts]))

    def lengths(self, members: IndexArray) -> IndexArray:
        """Return how many rows each of these members, given by ascending numbers, has."""
        found = np.zeros(len(members), np.int64)
        mine = np.isin(self.table[:, 0], members)
        found[np.searchsorted(members, self.table[mine, 0])] = self.table[mine, 3]
        return found


@dataclass(frozen=True, slots=True)
class Values:
    """The values of members, one after the other.

    Attributes:
        column: Of all but large ones, each at a multiple of eight bytes.
        large: The others, by which ones they are.
    """

    column: Bytes
    large: dict[int, Bytes]

    @classmethod
    def of(cls, parts: Sequence[Array]) -> Self:
        """Put contiguous arrays together; large ones are not copied."""
        small, large = [_PADDING[:0]], {}
        for i, part in enumerate(parts):
            flat = part.reshape(-1).view(np.uint8)
            if flat.size >= _LARGE:
                large[i] = flat
            else:
                small += flat, _PADDING[: -flat.size % _ALIGNED]
        column = _core.memory(sum(part.size for part in small))
        return cls(np.concatenate(small, out=column), large)

    def split(self, sizes: Iterable[int]) -> list[Bytes]:
        """Return the parts, which have these sizes in bytes.

        Raises:
            InvalidArgumentError: They have not.
        """
        parts, begin = [], 0
        for i, size in enumerate(sizes):
            if (part := self.large.get(i)) is None:
                part = self.column[begin : begin + size]
                begin += size + -size % _ALIGNED
            if part.size != size:
                break
            parts.append(part)
        else:
            if begin == self.column.size:
                return parts
        raise InvalidArgumentError("A piece has more or fewer values than its rows need")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a host has of a round for one shard.

    Attributes:
        rows: Which members and rows.
        values: Their sums.
        count: Of all the host's gradients in the round.
        weight: Of these.
        step: The round's.
    """

    rows: Rows
    values: Values
    count: int
    weight: int
    step: int

    @property
    def nbytes(self) -> int:
        """How many bytes its columns have."""
        large = sum(part.size for part in self.values.large.values())
        return self.rows.numbers.nbytes + self.rows.counts.nbytes + self.values.column.size + large

    def copy(self) -> Self:
        """Return one that shares no memory with what it was made of."""
        large = {i: part.copy() for i, part in self.values.large.items()}
        return replace(self, values=replace(self.values, large=large))

    def gradients(self, form: Format) -> list[MemberGradient]:
        """Return what the extension takes of each member, checked.

        Args:
            form: Of the sums of the group's members.

        Raises:
            InvalidArgumentError: It does not fit the group, or itself.
        """
        table, numbers, counts = self.rows.table, self.rows.numbers, self.rows.counts
        self._check_table(form)
        member, lengths = table[:, 0], table[:, 3]
        sparse = form.sparse[member]
        own = lengths[sparse].copy(), form.limits[member[sparse]], table[sparse, 2].copy()
        if (wrong := _core.wrong_member(numbers, counts, *own)) >= 0:
            name = form.names[member[sparse][wrong]]
            raise InvalidArgumentError(
                f"Member {name!r}: the numbers of a piece's rows must ascend from 0 to below "
                f"{own[1][wrong]}, and their counts be from 1 to {own[2][wrong]}"
            )
        parts = self.values.split((lengths * form.widths[member]).tolist())
        made: list[MemberGradient] = []
        begin = 0
        for (number, count, weight, length), part in zip(table.tolist(), parts, strict=True):
            values, dims = part.view(form.dtypes[number]), form.dims[number]
            if form.sparse[number]:
                rows = slice(begin, begin := begin + length)
                own_rows = numbers[rows], values.reshape(length, *dims), counts[rows], True
                made.append((number, count, weight, *own_rows))
            else:
                made.append((number, count, weight, None, values.reshape(dims), None, False))
        return made

    def _check_table(self, form: Format) -> None:
        table, columns = self.rows.table, (self.rows.numbers, self.rows.counts, self.values.column)
        if any(column.ndim != 1 for column in columns) or table.ndim != 2:  # noqa: PLR2004
            raise InvalidArgumentError("A piece's columns have one dimension, and its table two")
        number, count, weight, length = table.T
        if (
            np.any(np.diff(number) <= 0)
            or np.any((number < 0) | (number >= len(form.names)))
            or np.any((count < 1) | (count > self.count))
            or np.any((weight < count) | (weight > self.weight))
            or np.any(np.where(form.sparse[number], length < 1, length != form.sizes[number]))
        ):
            raise InvalidArgumentError(
                "A piece's table must have ascending numbers of the group's members, counts from "
                f"1 to {self.count}, weights from these to {self.weight}, and members' lengths"
            )
