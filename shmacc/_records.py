"""What goes in and comes out: slices, takes, partials."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]
RawRound = tuple[int, int, IndexArray, Any, Any, IndexArray]
"""What the extension takes: count, step, indices, sums or means in the type of sums, shape (both
None if nothing was accumulated), and row counts."""


class IndexedSlices:
    """Some rows of a tensor, as ``tf.IndexedSlices``.

    Args:
        values: Shape ``(n, ...)``: the rows.
        indices: Shape ``(n,)``: which rows they are.
        dense_shape: The shape of the whole tensor, or None.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        """Keeps the three as they are."""
        self.values = values
        self.indices = indices
        self.dense_shape = dense_shape

    def __repr__(self) -> str:
        """Says the three."""
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )


class SparseGradient(NamedTuple):
    """What a sparse ``take_grad`` returns, as TensorFlow's op does.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: The accumulator's dtype, shape ``(n, ...)``.
        shape: int64: the declared first dimension (-1 if unknown), then those of ``values``.
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray


@dataclass(frozen=True, slots=True, eq=False)
class SparseTaken:
    """A take of a sparse accumulator.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: Shape ``(n, ...)``: reduced; in a partial, sums (float32 for the half types, 64
            bits for integers).
        shape: int64: the declared first dimension (-1 if unknown), then those of ``values``.
        row_counts: int64, shape ``(n,)``: how many gradients touched each row.
        count: How many gradients were reduced.
        step: The global step that this take closed (a partial: the step it belongs to).
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray
    row_counts: IndexArray
    count: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class DenseTaken:
    """A take of a dense accumulator.

    Attributes:
        value: The round's shape: reduced; in a partial, sums (float32 for the half types, 64 bits
            for integers).
        count: How many gradients were reduced.
        step: The global step that this take closed (a partial: the step it belongs to).
    """

    value: ValueArray
    count: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class SparsePartial(SparseTaken):
    """Sums of a sparse accumulator, not divided, to be applied to another one."""


@dataclass(frozen=True, slots=True, eq=False)
class DensePartial(DenseTaken):
    """Sums of a dense accumulator, not divided, to be applied to another one."""
