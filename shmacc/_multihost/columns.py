"""Columns: the sums or results of many members in few arrays, one member's part after the other.

Each array in a message costs time, however small it is. So a message from a host to a shard, or
from a shard to the chief, has only four arrays: the headers of all members, their row numbers, the
rows' counts, and the values. The extension (shmacc/native/values/columns.hpp) writes and reads
these arrays, and checks received ones when it reduces them.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._base.array_types import IndexArray

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

ALIGNED = 64
"""In a column of values, each member's part begins at a multiple of 64 bytes (kPartAlignment)."""


def keep_freed_memory() -> None:
    """Have the C library keep memory that this process frees, up to a limit, for the next round.

    Without this, each column gets new memory from the kernel, which costs more than filling it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc: M_TRIM_THRESHOLD and the greatest M_MMAP_THRESHOLD
        mallopt(-1, 256 << 20)
        mallopt(-3, 32 << 20)


def aligned(size: int) -> int:
    """Return `size`, rounded up to where the next part may begin."""
    return size + -size % ALIGNED


@dataclass(frozen=True, slots=True)
class Rows:
    """The members of a message, and the rows of its sparse members."""

    # One row of `parts` for each member, ascending: the member's number, the count and the weight
    # of its gradients, and how many rows (a dense member: elements) it has.
    parts: IndexArray
    numbers: IndexArray  # the rows' numbers
    counts: IndexArray  # the total weight of each row's gradients

    def lengths(self, members: IndexArray) -> IndexArray:
        """Return how many rows each member has; `members` are ascending member numbers."""
        found = np.zeros(len(members), np.int64)
        mine = np.isin(self.parts[:, 0], members)
        found[np.searchsorted(members, self.parts[mine, 0])] = self.parts[mine, 3]
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """The row numbers and the values of several members, as one message carries them."""

    rows: Rows
    values: Bytes  # of each member in turn, each part at a multiple of `ALIGNED`

    @classmethod
    def of(cls, given: tuple[IndexArray, IndexArray, IndexArray, Bytes]) -> Self:
        """Make the columns from the extension's arrays."""
        *rows, values = given
        return cls(Rows(*rows), values)

    def arrays(self) -> tuple[IndexArray, IndexArray, IndexArray, Bytes]:
        """Return the arrays in the order in which the extension takes them."""
        return self.rows.parts, self.rows.numbers, self.rows.counts, self.values

    @property
    def nbytes(self) -> int:
        """How many bytes the rows and values have."""
        return self.rows.numbers.nbytes + self.rows.counts.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A host's part of a round, for one shard."""

    columns: Columns
    count: int  # how many gradients of the host are in the round
    weight: int  # their total weight
    step: int


class Format:
    """The layout of the members' values in a column. Attributes are indexed by member number.

    Args:
        members: For each member, whether it is sparse, its shape, and its dtype.
    """

    def __init__(self, members: Iterable[tuple[bool, tuple[Any, ...], np.dtype[Any]]]) -> None:
        given = list(members)
        self.sparse: npt.NDArray[np.bool_] = np.array([is_sparse for is_sparse, _, _ in given])
        # A sparse member: the shape of one row. A dense member: the shape of the whole.
        self.dims: list[tuple[Any, ...]] = [
            shape[1:] if is_sparse else shape for is_sparse, shape, _ in given
        ]
        self.dtypes: list[np.dtype[Any]] = [dtype for _, _, dtype in given]
        # A sparse member: the bytes of one row. A dense member: the bytes of one element.
        self.widths: list[int] = [
            dtype.itemsize * (math.prod(shape[1:]) if is_sparse else 1)
            for is_sparse, shape, dtype in given
        ]

    def split(self, columns: Columns) -> list[Array]:
        """Return, as views, the values of each member that has a part in these columns."""
        parts, end = [], 0
        for number, _, _, length in columns.rows.parts.tolist():
            begin = aligned(end)
            end = begin + length * self.widths[number]
            dims = self.dims[number]
            shape = (length, *dims) if self.sparse[number] else dims
            parts.append(columns.values[begin:end].view(self.dtypes[number]).reshape(shape))
        return parts


def join(parts: Sequence[Array]) -> Bytes:
    """Return one column with the values of all parts."""
    column = _core.memory(sum(aligned(part.nbytes) for part in parts))
    end = 0
    for part in parts:
        begin = aligned(end)
        column[end:begin] = 0  # the receiver must not see what this memory held before
        end = begin + part.nbytes
        column[begin:end] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return column[:end]
