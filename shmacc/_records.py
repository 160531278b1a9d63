"""The records of the public API: slices, takes, partials."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]


class IndexedSlices:
    """Some rows of a tensor, like ``tf.IndexedSlices``.

    Args:
        values: Shape ``(n, ...)``: the rows.
        indices: Shape ``(n,)``: which rows they are.
        dense_shape: The shape of the whole tensor, or None.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = dense_shape

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )


class SparseGradient(NamedTuple):
    """The result of a sparse ``take_grad``, like that of TensorFlow's op.

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
    """The result of a take from a sparse accumulator.

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
    """The result of a take from a dense accumulator.

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
