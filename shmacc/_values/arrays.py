"""Converts a caller's arrays to the type of sums without silent loss.

Arrays follow NumPy's ``same_kind`` rule; a conversion that would change a value's meaning is
refused. A plain array of the right type is used as it is. The caller's ``np.seterr`` settings for
overflow, underflow and NaN do not apply here: these are regular results, as in the extension's
sums.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmacc import _core
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._base.shown import shown
from shmacc._base.signals import pass_on
from shmacc._values import foreign
from shmacc._values.arguments import INT64_MAX, describe_shape
from shmacc._values.dtypes import DType, kind_of, largest
from shmacc._values.slices import Undivided
from shmacc.errors import InvalidArgumentError, OutOfRangeError, ResourceExhaustedError

_INT64 = np.dtype(np.int64).num
# NumPy's `same_kind` rule: the kinds to which each kind converts (not: signed to unsigned).
_SAME_KIND = {"b": "buifc", "u": "uifc", "i": "ifc", "f": "fc", "c": "c"}


def values_array(value: Any, dtype: DType, what: str) -> ValueArray:
    """Return a gradient's values, C-contiguous, in the type of its sums; complex stays complex.

    Arrays (and everything that NumPy can view) follow NumPy's ``same_kind`` rule; lists and Python
    numbers are converted by value. A conversion that would change a value's meaning is refused: an
    integer out of the dtype's range, a finite number that would become infinite, a fraction into an
    integer dtype.

    Raises:
        InvalidArgumentError: The conversion is refused, or the value is no array at all.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    # Most gradients need no conversion: the extension tells in one call.
    plain = _core.plain_array(value, dtype.plain_type)
    if plain is not None:
        return plain
    array = converted(value, dtype, what)
    try:
        return dtype.widen(array)
    except (MemoryError, ValueError) as error:  # NumPy's ValueError: larger than any memory
        pass_on(error)
        raise _too_large(array, what) from error


def converted(value: Any, dtype: DType, what: str) -> ValueArray:
    """Return values, C-contiguous, in the dtype itself; rules and errors as for `values_array`."""
    array, by_value = _as_array(value, what)
    # Do this before any scan: an array too large for memory fails now, not after an hour.
    array = _contiguous(array, what)
    # A quantised dtype is a structure of one integer.
    if array.dtype.names is not None and array.dtype == dtype.numpy:
        array = array.view(dtype.storage)
    try:
        return _convert(array, dtype.storage, what, by_value=by_value)
    except InvalidArgumentError:
        raise
    except (MemoryError, ValueError) as error:
        pass_on(error)
        raise _too_large(array, what) from error


def sums_array(value: Any, dtype: DType, what: str) -> ValueArray:
    """Return a partial's sums; they must have the dtype of this accumulator's partials.

    Raises:
        InvalidArgumentError: They have another dtype.
        ResourceExhaustedError: There is no memory for a contiguous copy.
    """
    array, _ = _as_array(value, what)
    if array.dtype != dtype.partial:
        raise InvalidArgumentError(
            f"{what} of a partial for a {dtype.name} accumulator must be {dtype.partial.name}, "
            f"but are {array.dtype}"
        )
    return _contiguous(array, what)


def weighted(values: ValueArray, weight: int, dtype: DType, what: str) -> ValueArray:
    """Return values times the gradient's weight, in the type of sums.

    Raises:
        OutOfRangeError: A product does not fit the type of sums (integers).
        ResourceExhaustedError: There is no memory for the products.
    """
    if weight == 1 or values.size == 0:
        return values
    try:
        products = np.empty(values.shape, values.dtype)
    except MemoryError as error:
        pass_on(error)
        raise _too_large(values, what) from error
    if not _core.weigh(values, dtype.sum_code, dtype.components, weight, products):
        raise OutOfRangeError(
            f"{what} times their weight, {weight}, do not fit 64 bits; nothing was added"
        )
    return products


def zeros(shape: Any, dtype: np.dtype[Any]) -> ValueArray:
    """Return a new array of zeros.

    Raises:
        ResourceExhaustedError: There is no memory for it.
    """
    return _made(np.zeros, shape, dtype)


def empty(shape: Any, dtype: np.dtype[Any]) -> ValueArray:
    """Return a new array.

    Raises:
        ResourceExhaustedError: There is no memory for it.
    """
    return _made(np.empty, shape, dtype)


def _made(make: Callable[..., ValueArray], shape: Any, dtype: np.dtype[Any]) -> ValueArray:
    try:
        return make(shape, dtype)
    except (MemoryError, ValueError) as error:
        pass_on(error)
        raise ResourceExhaustedError(
            f"This process has no memory for an array of shape {describe_shape(tuple(shape))}"
        ) from error


def row_numbers(value: Any, what: str) -> IndexArray:
    """Return row numbers as `index_array` does, but in memory of their own.

    They are checked now and used later: if another thread writes into the caller's array meanwhile,
    the checked numbers must not change.
    """
    given = index_array(value, what)
    try:
        return given.copy()
    except MemoryError as error:
        pass_on(error)
        raise _too_large(given, what) from error


def index_array(value: Any, what: str) -> IndexArray:
    """Return row indices as C-contiguous int64 of any rank.

    Args:
        value: The indices.
        what: The name of the indices in a message.

    Raises:
        InvalidArgumentError: They are not integers, or do not fit int64.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    plain = _core.plain_array(value, _INT64)
    if plain is not None:
        return plain
    array, _ = _as_array(value, what, to_fill=False)
    # pandas, for one, makes floats of integers of which some are missing.
    if array.dtype.kind == "f" and bool(np.isnan(array).any()):
        raise InvalidArgumentError(
            f"{what} must be integers, but some are NaN: {foreign.LEAVE_OUT}"
        )
    if array.dtype.kind not in "iu" and array.size:
        kind = "strings" if array.dtype.kind in "SU" else array.dtype
        raise InvalidArgumentError(f"{what} must be integers, but are {kind}")
    array = _contiguous(array, what)
    if array.dtype.kind == "u" and array.size and int(array.max()) > INT64_MAX:
        raise InvalidArgumentError(
            f"{what} must be below 2**63, but one is {int(array.max())}; to make ids of hashes of "
            "64 bits: `ids & 0x7FFF_FFFF_FFFF_FFFF`, or `ids >> 1` as unsigned numbers"
        )
    return _contiguous(array, what, np.int64)


def as_array(value: Any, what: str) -> ValueArray:
    """Return a value as an array, if NumPy can view it as one; the dtype is the value's own.

    Raises:
        InvalidArgumentError: The value is no array.
        ResourceExhaustedError: There is no memory for it.
    """
    return _as_array(value, what)[0]


def as_bytes(array: ValueArray, dtype: np.dtype[Any], what: str) -> ValueArray:
    """Return an array's elements, converted to the dtype, as bytes in C order.

    Raises:
        ResourceExhaustedError: There is no memory for the conversion.
    """
    return bytes_of(_contiguous(array, what, dtype))


def bytes_of(array: ValueArray) -> ValueArray:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def _contiguous(array: np.ndarray[Any, Any], what: str, dtype: Any = None) -> np.ndarray[Any, Any]:
    try:
        return np.require(array, dtype, ["C", "A"])
    except (MemoryError, ValueError) as error:
        pass_on(error)
        raise _too_large(array, what) from error


def _too_large(array: np.ndarray[Any, Any], what: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"This process has no memory for a converted copy of {what}, of shape "
        f"{describe_shape(array.shape)} and dtype {array.dtype}; nothing was changed"
    )


def is_partial(what: str) -> InvalidArgumentError:
    """Return the error for a partial in the place of a gradient."""
    return InvalidArgumentError(
        f"{what} must not be a partial, whose counts would be ignored: apply_partial adds one"
    )


def _as_array(value: Any, what: str, *, to_fill: bool = True) -> tuple[np.ndarray[Any, Any], bool]:
    """Return the value as an array, and whether it came as plain Python numbers.

    to_fill: whether a message may suggest 0 for missing numbers, as for `foreign.instead`.
    """
    if isinstance(value, np.ndarray) and hasattr(value, "mask"):
        numbers = "the numbers to add, `masked.filled(0)` for instance"
        raise InvalidArgumentError(
            f"{what} must not be a masked array, whose mask would be ignored: "
            f"{foreign.instead(numbers, to_fill=to_fill)}"
        )
    if isinstance(value, Undivided):
        raise is_partial(what)
    array, by_value = _array_of(value, what, to_fill=to_fill)
    if array.dtype == np.object_:
        raise InvalidArgumentError(
            f"{what} must be an array of numbers, or convertible to one, but {_named(value)}"
        )
    return array, by_value


def _array_of(value: Any, what: str, *, to_fill: bool) -> tuple[np.ndarray[Any, Any], bool]:
    try:
        if not isinstance(value, np.ndarray | list | tuple):
            theirs = foreign.array(value, what, to_fill=to_fill)
            if theirs is not None:
                return theirs, False
        # np.asarray does not know DLPack: it would make an array of one object.
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value), False
        array = np.asarray(value)
        if array.dtype == np.float64 and isinstance(value, list | tuple):
            array = _exact(value, array)
    except InvalidArgumentError:
        raise
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(
            f"This process has no memory to view {what} as an array; nothing was changed"
        ) from error
    except Exception as error:
        pass_on(error)
        raise InvalidArgumentError(
            f"{what} cannot be viewed as an array ({type(error).__name__}: {error})"
        ) from error
    by_value = isinstance(value, list | tuple | int | float | complex) and not isinstance(
        value, np.generic
    )
    return array, by_value


def _named(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "an array of Python objects was given"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} that holds more than numbers was given"
    return "None was given" if value is None else f"a {type(value).__name__} was given"


def _exact(value: Any, rounded: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keep integers exact: NumPy makes floats of a list with numbers on both sides of 2**63."""
    # Convert again, by element: `rounded` no longer has the exact integers.
    objects = np.asarray(value, dtype=object)
    if rounded.size == 0 or not all(type(number) is int for number in objects.flat):
        return rounded
    return objects.astype(np.uint64 if min(objects.flat) >= 0 else np.int64)


def _convert(
    array: np.ndarray[Any, Any], to: np.dtype[Any], what: str, *, by_value: bool
) -> np.ndarray[Any, Any]:
    if array.dtype == to:
        return array
    source, target = kind_of(array.dtype), kind_of(to)
    # An empty list has no dtype of its own: np.array([]) makes it float64.
    if array.size == 0 and (by_value or (array.shape == (0,) and array.dtype == np.float64)):
        return array.astype(to)
    allowed = target in _SAME_KIND.get(source, "")
    if by_value and source in "iuf" and target in "iub":
        allowed = True
        if source == "f" and not bool(np.all(np.isfinite(array) & (array == np.trunc(array)))):
            raise InvalidArgumentError(
                f"{what}: numbers for dtype {to.name} must be integers, but not all are"
            )
    if not allowed:
        raise InvalidArgumentError(
            f"{what}: {_elements(array)} do not convert to {to.name} by NumPy's same_kind rule"
        )
    if target in "iub" and source != "b":
        _check_integer_range(array, to, what)
    with np.errstate(all="ignore"):
        converted = array.astype(to)
        if target in "fc" and largest(array.dtype) > largest(to):
            infinite = np.isinf(converted.real) & np.isfinite(array.real)
            if target == "c":  # each part alone, since the other one may be NaN
                infinite |= np.isinf(converted.imag) & np.isfinite(array.imag)
            if bool(infinite.any()):
                raise InvalidArgumentError(
                    f"{what}: one number is {shown(array[infinite].flat[0])}, which would become "
                    f"infinite in {to.name}"
                )
    return converted


def _elements(array: np.ndarray[Any, Any]) -> str:
    return "strings" if array.dtype.kind in "SU" else f"values of dtype {array.dtype}"


def _check_integer_range(array: np.ndarray[Any, Any], to: np.dtype[Any], what: str) -> None:
    if array.size == 0:
        return
    least, most = (0, 1) if to.kind == "b" else (np.iinfo(to).min, np.iinfo(to).max)
    for extreme in (array.min(), array.max()):
        # Compare with an int: in a comparison with a float, the bound would be rounded.
        if not least <= int(extreme) <= most:
            raise InvalidArgumentError(
                f"{what}: one number is {int(extreme)}, which does not fit {to.name} ({least} to "
                f"{most})"
            )
