"""Arguments on their way in: converted without silent loss, checked in TensorFlow's order.

Everything here depends on the caller's own arguments alone and happens before the lock; so a
malformed gradient raises whether it is stale or not. What depends on the round (rows 8 and 9 of
TensorFlow's checks) is left to the apply, when the gradient is known to be fresh:
`declared_conflict` only words row 9, and the extension checks row 8.
"""

import itertools
import math
import operator
from typing import Any

import numpy as np

from shmacc import _core
from shmacc import _layout as layout
from shmacc._dtypes import DType, kind_of
from shmacc._records import DenseTaken, IndexArray, SparseTaken, ValueArray
from shmacc.errors import InvalidArgumentError, ResourceExhaustedError

Shape = tuple[int | None, ...] | None
"""A declared shape: None for an unknown rank, None as a dimension for an unknown one."""

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT64 = np.dtype(np.int64).num
_MOST_ELEMENTS = 2**36  # of a row, or of a dense gradient (round.hpp)
_MOST_GRADIENTS = 2**48  # in a partial: more than anybody adds up one by one
# NumPy's `same_kind`: to one's own kind or a wider one (not: signed to unsigned).
_SAME_KIND = {"b": "buifc", "u": "uifc", "i": "ifc", "f": "fc", "c": "c"}


def int64(value: object, what: str) -> int:
    """An integer argument: an int, a NumPy integer, an integer scalar array; no bool, no float.

    Raises:
        InvalidArgumentError: It is anything else, or does not fit int64.
    """
    if type(value) is not int:
        if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == np.bool_:
            raise InvalidArgumentError(f"{what} must be an integer, but was {value!r}")
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidArgumentError(f"{what} must be an integer, but was {value!r}") from None
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise InvalidArgumentError(f"{what} must fit 64 bits, but was {value}")
    return value


def timeout(value: object) -> float | None:
    """A timeout in seconds; None: for ever.

    Raises:
        InvalidArgumentError: It is negative, NaN or no number.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError  # noqa: TRY301
        seconds = float(value)  # type: ignore[arg-type]
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"timeout must be a number of seconds or None, but was {value!r}"
        ) from None
    if math.isnan(seconds) or seconds < 0:
        raise InvalidArgumentError(f"timeout must not be negative or NaN, but was {value!r}")
    return None if math.isinf(seconds) else seconds


def declared_shape(shape: Any, kind: str) -> Shape:
    """A constructor's shape: None, an int, or a sequence (a ``tf.TensorShape``) of ints and None.

    Raises:
        InvalidArgumentError: It is anything else, or so large that nothing could be accumulated.
    """
    if shape is None or (hasattr(shape, "rank") and shape.rank is None):
        return None
    if hasattr(shape, "as_list"):
        shape = shape.as_list()
    if isinstance(shape, str | bytes):
        raise InvalidArgumentError(f"shape must be integers or None, but was {shape!r}")
    if hasattr(shape, "__index__") and np.ndim(shape) == 0:
        shape = [shape]
    try:
        entries = list(itertools.islice(iter(shape), layout.MAX_RANK + 1))
    except TypeError:
        raise InvalidArgumentError(
            f"shape must be a sequence of integers and None, but was {shape!r}"
        ) from None
    if len(entries) > layout.MAX_RANK:
        raise InvalidArgumentError(f"A shape has at most {layout.MAX_RANK} dimensions")
    dims = tuple(
        None if entry is None else int64(getattr(entry, "value", entry), "A dimension")
        for entry in entries
    )
    for dim in dims:
        if dim is not None and dim < 0:
            raise InvalidArgumentError(f"Dimension {dim} must be >= 0")
    row = dims[1:] if kind == "sparse" else dims
    # Dimensions of 0 count as 1: NumPy, too, bounds the others beside them.
    if math.prod(dim or 1 for dim in row) > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"A row, or a dense gradient, has at most 2**36 numbers, but {describe_shape(row)} more"
        )
    return dims


def describe_shape(shape: Shape) -> str:
    """As TensorFlow prints it: ``[?,2]``."""
    if shape is None:
        return "<unknown>"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in shape) + "]"


def values_array(value: Any, dtype: DType, what: str) -> ValueArray:
    """A gradient's values, C-contiguous, in the type that its sums are kept in (or pairs of it).

    Arrays (and whatever NumPy can view) follow NumPy's ``same_kind`` rule; lists and Python numbers
    are converted by value. What would lose a value's meaning is refused: an integer out of the
    dtype's range, a finite number that would become infinite, a fraction into an integer dtype.

    Raises:
        InvalidArgumentError: The conversion is refused, or the value is no array at all.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    if _core.is_plain(value, dtype.plain_type):
        return value  # type: ignore[no-any-return]
    array, by_value = _view(value, what)
    # First of all: what does not fit in memory is not looked through for an hour either.
    array = _contiguous(array, what)
    try:
        if array.dtype.names is not None and array.dtype == dtype.numpy:
            array = array.view(dtype.storage)
        return dtype.widen(_convert(array, dtype.storage, what, by_value=by_value))
    except InvalidArgumentError:
        raise
    except (MemoryError, ValueError) as error:  # NumPy's ValueError: more than memory can have
        raise _too_large(array, what) from error


def sums_array(value: Any, dtype: DType, what: str) -> ValueArray:
    """A partial's sums; they must have the very dtype that partials of this accumulator have.

    Raises:
        InvalidArgumentError: They have another one.
        ResourceExhaustedError: There is no memory for them as one piece.
    """
    array, _ = _view(value, what)
    if array.dtype != dtype.partial:
        raise InvalidArgumentError(
            f"{what} of a partial for a {dtype.name} accumulator must be {dtype.partial.name}, "
            f"but are {array.dtype}"
        )
    return _contiguous(array, what)


def check_not_divided(partial: object) -> None:
    """Whether somebody takes a take's result for a partial, whose sums are not divided.

    Raises:
        InvalidArgumentError: It is one.
    """
    if type(partial) in {SparseTaken, DenseTaken}:
        raise InvalidArgumentError(
            f"A partial was expected, but this {type(partial).__name__} is the result of a take, "
            "reduced already; take_partial hands out sums"
        )


def partial_count(value: object) -> int:
    """How many gradients a partial says that it is.

    Raises:
        InvalidArgumentError: It is no such number. Sums of what is accepted do not overflow.
    """
    count = int64(value, "partial.count")
    if not 0 <= count <= _MOST_GRADIENTS:
        raise InvalidArgumentError(
            f"partial.count must not be negative, nor more than 2**48, but was {count}"
        )
    return count


def zeros(shape: Any, dtype: np.dtype[Any]) -> ValueArray:
    """A new array of zeros.

    Raises:
        ResourceExhaustedError: There is no memory for it.
    """
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise ResourceExhaustedError(
            f"This process has no memory for an array of shape {describe_shape(tuple(shape))}"
        ) from error


def index_array(value: Any, what: str) -> IndexArray:
    """Row indices as C-contiguous int64 of whatever rank.

    Raises:
        InvalidArgumentError: They are not integers, or do not fit int64.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    if _core.is_plain(value, _INT64):
        return value  # type: ignore[no-any-return]
    array, by_value = _view(value, what)
    if array.dtype.kind not in "iu" and not (by_value and array.size == 0):
        raise InvalidArgumentError(f"{what} must be integers, but are {array.dtype}")
    array = _contiguous(array, what)
    if array.dtype.kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise InvalidArgumentError(f"{what} must fit 64 bits, but one is {int(array.max())}")
    return _contiguous(array, what, np.int64)


def _contiguous(array: np.ndarray[Any, Any], what: str, dtype: Any = None) -> np.ndarray[Any, Any]:
    try:
        return np.require(array, dtype, ["C", "A"])
    except (MemoryError, ValueError) as error:
        raise _too_large(array, what) from error


def _too_large(array: np.ndarray[Any, Any], what: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"This process has no memory for a converted copy of {what}, of shape "
        f"{describe_shape(array.shape)} and dtype {array.dtype}; nothing was changed"
    )


def _view(value: Any, what: str) -> tuple[np.ndarray[Any, Any], bool]:
    """The value as an array, and whether it came as plain Python numbers."""
    if isinstance(value, np.ndarray) and hasattr(value, "mask"):
        raise InvalidArgumentError(
            f"{what} are a masked array, whose mask would be ignored: pass what is to be added, "
            "`masked.filled(0)` for instance"
        )
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value), False
        array = np.asarray(value)
        if array.dtype == np.float64 and isinstance(value, list | tuple):
            array = _exact(value, array)
    except MemoryError as error:
        raise ResourceExhaustedError(
            f"This process has no memory to view {what} as an array; nothing was changed"
        ) from error
    except Exception as error:
        raise InvalidArgumentError(
            f"{what} cannot be viewed as an array ({type(error).__name__}: {error})"
        ) from error
    if array.dtype == np.object_:
        raise InvalidArgumentError(
            f"{what} must be an array of numbers, or what NumPy makes one of, but {_named(value)}"
        )
    by_value = isinstance(value, list | tuple | int | float | complex) and not isinstance(
        value, np.generic
    )
    return array, by_value


def _named(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "an array of Python objects was given"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} that holds other things than numbers was given"
    return "None was given" if value is None else f"a {type(value).__name__} was given"


def _exact(value: Any, rounded: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """NumPy makes floats of integers from both sides of 2**63; they are kept as they are."""
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
    if by_value and array.size == 0:
        return array.astype(to)
    allowed = target in _SAME_KIND.get(source, "")
    if by_value and source in "iuf" and target in "iu":
        allowed = True
        if source == "f" and not bool(np.all(np.isfinite(array) & (array == np.trunc(array)))):
            raise InvalidArgumentError(f"{what} are not all integers, which {to.name} holds")
    if not allowed:
        raise InvalidArgumentError(
            f"{what} of dtype {array.dtype} do not convert to {to.name} by NumPy's same_kind rule"
        )
    if target in "iu" and source != "b":
        _check_integer_range(array, to, what)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(to)
        if target in "fc" and _can_overflow(array.dtype, to):
            infinite = ~np.isfinite(converted) & np.isfinite(array)
            if bool(infinite.any()):
                raise InvalidArgumentError(
                    f"{what} hold {array[infinite].flat[0]!r}, which {to.name} cannot: "
                    "it would become infinite"
                )
    return converted


def _check_integer_range(array: np.ndarray[Any, Any], to: np.dtype[Any], what: str) -> None:
    if array.size == 0:
        return
    info = np.iinfo(to)
    for extreme in (array.min(), array.max()):
        if not info.min <= int(extreme) <= info.max:
            raise InvalidArgumentError(
                f"{what} hold {int(extreme)}, which does not fit {to.name} "
                f"({info.min} to {info.max})"
            )


def _can_overflow(source: np.dtype[Any], to: np.dtype[Any]) -> bool:
    # Float32 and wider hold every 64-bit integer's magnitude; half holds up to 65504 only.
    if kind_of(source) in "biu":
        return to.name == "float16"
    return not np.can_cast(source, to, "safe") if to.name != "bfloat16" else source != to


def given_shape(shape: Any) -> tuple[int, ...] | None:
    """A gradient's ``grad_shape``: flattened; None or ``[]`` is "not given", -1 is "unknown".

    Raises:
        InvalidArgumentError: It does not consist of integers.
    """
    if shape is None:
        return None
    if hasattr(shape, "as_list"):
        shape = shape.as_list()
    return tuple(index_array(shape, "grad_shape").ravel().tolist()) or None


def check_sparse(
    indices: IndexArray, values: ValueArray, given: tuple[int, ...] | None, declared: Shape
) -> bool:
    """Rows 2 to 7 of TensorFlow's checks.

    Returns:
        Whether the indices are strictly ascending, and none negative.

    Raises:
        InvalidArgumentError: The first check that fails.
    """
    if indices.ndim != 1:
        raise InvalidArgumentError(
            f"Input indices should be vector but received shape: {describe_shape(indices.shape)}"
        )
    if values.ndim == 0:
        raise InvalidArgumentError("Values cannot be 0-dimensional.")
    if values.shape[0] != indices.size:
        raise InvalidArgumentError(
            f"Expected {indices.size} non-empty input values, got {values.shape[0]}"
        )
    if given is not None and declared is not None:
        _check_given_against_declared(given, declared)
    limit = declared[0] if declared else None
    ascending, over, negative = _core.check_rows(indices, _INT64_MAX if limit is None else limit)
    if over >= 0 and limit is not None:
        raise InvalidArgumentError(_over_limit(indices, over, limit))
    return ascending and negative < 0


def own_refusal(
    indices: IndexArray,
    values: ValueArray,
    given: tuple[int, ...] | None,
    *,
    ascending: bool,
    repeats: bool,
) -> str | None:
    """What TensorFlow lets pass and no consumer can use; None if there is nothing of it.

    Args:
        indices: As `check_sparse` has passed them.
        values: Likewise.
        given: The gradient's own ``grad_shape``.
        ascending: What `check_sparse` said.
        repeats: Whether indices may repeat; those of a partial do not, since each row has a count.
    """
    if not ascending:
        negative = _core.check_rows(indices, _INT64_MAX)[2]
        if negative >= 0:
            return f"Indices must not be negative; index of slice {negative} is {indices[negative]}"
        repeated = -1 if repeats else _core.repeated_row(indices)
        if repeated >= 0:
            return f"Indices of a partial must not repeat; that of slice {repeated} does"
    if given is None:
        return None
    if given[0] != -1:
        over = _core.check_rows(indices, given[0])[1]
        if over >= 0:
            return _over_limit(indices, over, given[0])
    for i, (expected, got) in enumerate(zip(given[1:], values.shape[1:], strict=False), start=1):
        if expected not in {got, -1}:
            return (
                f"Shape mismatch: the given shape's dim {i} is {expected}, but the gradient's "
                f"values have {got}"
            )
    return None


def _over_limit(indices: IndexArray, at: int, limit: int) -> str:
    return (
        f"Shape mismatch: index of slice {at} exceeded limits of shape; "
        f"index is {indices[at]} exceeded {limit}"
    )


def _check_given_against_declared(given: tuple[int, ...], declared: tuple[int | None, ...]) -> None:
    if len(given) < len(declared):
        raise InvalidArgumentError(
            f"Shape mismatch: expected shape rank at least {len(declared)}, got {len(given)}"
        )
    for i, (expected, got) in enumerate(zip(declared, given, strict=False)):
        if expected is not None and got not in {expected, -1}:
            raise InvalidArgumentError(
                f"Shape mismatch: expected shape dim {i} to be {expected}, got {got}"
            )


def declared_conflict(values_shape: tuple[int, ...], declared: Shape) -> str | None:
    """Row 9 of TensorFlow's checks, in its words; None if the values fit the declared shape."""
    if declared is None:
        return None
    if len(values_shape) < len(declared):
        return (
            f"Shape mismatch: expected values rank at least {len(declared)}, "
            f"got {len(values_shape)}"
        )
    for i, expected in enumerate(declared[1:], start=1):
        if expected is not None and values_shape[i] != expected:
            return (
                f"Shape mismatch: expected values dim {i} to be {expected}, got {values_shape[i]}"
            )
    return None


def check_dense(shape: tuple[int, ...], declared: Shape) -> None:
    """Whether a dense gradient fits the declared shape.

    Raises:
        InvalidArgumentError: It does not.
    """
    if declared is None:
        return
    fits = len(shape) == len(declared) and all(
        expected is None or expected == got for expected, got in zip(declared, shape, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(
            f"Shape mismatch: expected {describe_shape(declared)}, got {describe_shape(shape)}"
        )
