"""The hash of row numbers in NumPy, to check that of row_index.hpp."""

import numpy as np
import numpy.typing as npt

from shmacc._base.array_types import IndexArray

_HALF = np.uint64(32)  # bits
_LOWER_HALF = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def hash_rows(rows: IndexArray, key: list[int]) -> npt.NDArray[np.uint64]:
    """Return the upper 64 bits of ``factor * row + addend`` modulo ``2**128``, mixed.

    The product is computed in digits of 32 bits, so that no product or sum of the lower 64 bits
    wraps around. Overflow of the upper 64 bits is lost, as it should be.
    """
    factor, factor_low, addend, addend_low = map(np.uint64, key)
    row = rows.astype(np.uint64)
    low, high = row & _LOWER_HALF, row >> _HALF
    first, second = factor_low & _LOWER_HALF, factor_low >> _HALF
    column = first * low + (addend_low & _LOWER_HALF)
    column = second * low + (column >> _HALF)
    other = first * high + (column & _LOWER_HALF) + (addend_low >> _HALF)
    upper = factor * row + second * high + (column >> _HALF) + (other >> _HALF) + addend
    mixed: npt.NDArray[np.uint64] = (upper ^ (upper >> _HALF)) * _MIX
    return mixed
