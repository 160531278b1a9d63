"""Many arrays as few buffers: each one costs a message more than the bytes of a small array."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc._records.taken import DensePartial, GroupPartial, SparsePartial

Array = npt.NDArray[Any]

_LARGE = 1 << 20  # bytes of an array that is a buffer of its own: to copy it would cost more
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """Arrays, most of them in one buffer.

    Attributes:
        layout: Of each array its dtype and shape, and where it is in the buffer; None: it is the
            next one of `large`.
        buffer: uint8, of one dimension.
        large: Arrays that are not in the buffer.
    """

    layout: tuple[tuple[np.dtype[Any], tuple[int, ...], int | None], ...]
    buffer: npt.NDArray[np.uint8]
    large: tuple[Array, ...]

    @classmethod
    def of(cls, arrays: Iterable[Array], *, copy: bool = False) -> "Packed":
        """Pack arrays.

        Args:
            arrays: Contiguous ones.
            copy: Whether large ones are copied, too, so that nothing is shared with `arrays`.
        """
        layout: list[tuple[np.dtype[Any], tuple[int, ...], int | None]] = []
        small, large, end = [], [], 0
        for array in arrays:
            if array.nbytes >= _LARGE and not copy:
                layout.append((array.dtype, array.shape, None))
                large.append(array)
            else:
                layout.append((array.dtype, array.shape, end))
                small.append((end, array))
                end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        buffer = np.empty(end, np.uint8)
        for begin, array in small:
            buffer[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        return cls(tuple(layout), buffer, tuple(large))

    def arrays(self) -> list[Array]:
        """Return the arrays, as views."""
        large = iter(self.large)
        return [
            next(large)
            if begin is None
            else self.buffer[begin : begin + math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .reshape(shape)
            for dtype, shape, begin in self.layout
        ]


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A piece of a batch, as it is sent.

    Attributes:
        members: Of each member its name, count and weight, and its shape if it is sparse.
        packed: Their arrays.
        terms: The piece's count, step and weight.
    """

    members: tuple[tuple[str, int, int, tuple[int, ...] | None], ...]
    packed: Packed
    terms: tuple[int, int, int]

    @classmethod
    def of(cls, piece: GroupPartial, *, copy: bool = False) -> "PackedPiece":
        """Pack a piece; as `Packed.of`."""
        members: list[tuple[str, int, int, tuple[int, ...] | None]] = []
        arrays: list[Array] = []
        for name, sums in piece.items():
            shape = None
            if isinstance(sums, SparsePartial):
                shape = tuple(sums.shape.tolist())
                arrays += sums.indices, sums.values, sums.row_counts
            else:
                arrays.append(sums.value)
            members.append((name, sums.count, sums.weight, shape))
        terms = piece.count, piece.step, piece.weight
        return cls(tuple(members), Packed.of(arrays, copy=copy), terms)

    def unpack(self) -> GroupPartial:
        """Return the piece; its arrays are views."""
        count, step, weight = self.terms
        arrays = iter(self.packed.arrays())
        found: dict[str, SparsePartial | DensePartial] = {}
        for name, own, own_weight, shape in self.members:
            if shape is None:
                found[name] = DensePartial(next(arrays), own, step, own_weight)
            else:
                indices, values, dims = next(arrays), next(arrays), np.array(shape, np.int64)
                found[name] = SparsePartial(
                    indices, values, dims, next(arrays), own, step, own_weight
                )
        return GroupPartial(found, count, step, weight)


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """A mapping to arrays, as it is sent."""

    names: tuple[str, ...]
    packed: Packed

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> "PackedArrays":
        """Pack a mapping."""
        return cls(tuple(arrays), Packed.of(arrays.values()))

    def unpack(self) -> dict[str, Array]:
        """Return the mapping; its arrays are views."""
        return dict(zip(self.names, self.packed.arrays(), strict=True))
