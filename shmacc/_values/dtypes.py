"""The 19 dtypes that TensorFlow's op registry advertises for accumulators.

Sums are kept in one of four types: float32 (also for the half types, whose sums a take rounds
once), float64, int64 and uint64. The sum of complex numbers is a pair: real and imaginary part.
Quantised dtypes use TensorFlow's NumPy structured types, ``np.dtype([("qint8", np.int8)])``.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._base import dtype_names, layout
from shmacc._base.dtype_names import NUMBERS
from shmacc._base.shown import shown
from shmacc._base.signals import pass_on
from shmacc.errors import InvalidArgumentError

SUM_BOUNDS = (-(2**63), 2**64 - 1)
"""Lowest and highest value of the 64-bit integers that sums are kept in."""


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype of accumulators.

    Attributes:
        name: TensorFlow's name.
        number: TensorFlow's ``DataType`` number, which the segment contains.
        numpy: The NumPy dtype of gradients and results.
        storage: The same as `numpy`; for a quantised dtype, the integer type of its one field.
        sums: The type of sums; a complex dtype has two sums for each number.
        components: Sums for each number: 2 for complex dtypes, else 1.
        sum_code: The number by which the extension knows the type of sums.
        sums_as_is: Whether results need no conversion from sums.
        plain_type: NumPy's number of the type if gradients need no conversion, else -1.
        by_extension: Whether the extension, and not NumPy, converts to the type of sums and back.
        bounds: The lowest and highest value of an integer dtype; for other dtypes `SUM_BOUNDS`.
    """

    name: str
    number: int
    numpy: np.dtype[Any]
    storage: np.dtype[Any]
    sums: np.dtype[Any]
    components: int
    sum_code: int = field(init=False)
    sums_as_is: bool = field(init=False)
    plain_type: int = field(init=False)
    by_extension: bool = field(init=False)
    bounds: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the fields that every apply and take needs."""
        object.__setattr__(self, "sum_code", _SUM_CODES[self.sums])
        plain = self.storage == self.partial
        object.__setattr__(self, "sums_as_is", self.numpy == self.partial)
        object.__setattr__(self, "plain_type", self.storage.num if plain else -1)
        object.__setattr__(self, "by_extension", self.storage in _CONVERTED_BY_EXTENSION)
        bounds = SUM_BOUNDS
        if self.storage.kind in "iu":
            info = np.iinfo(self.storage)
            bounds = int(info.min), int(info.max)
        object.__setattr__(self, "bounds", bounds)

    def widen(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert values to the type of sums, C-contiguous. Complex values stay complex."""
        if self.by_extension:
            wide = np.empty(values.shape, self.sums)
            _core.widen(np.require(values, requirements=["C", "A"]), wide)
            return wide
        return np.require(values.astype(self.partial, copy=False), requirements=["C", "A"])

    def narrow(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert results from the type of sums to the dtype; complex ones are complex already."""
        if self.by_extension:
            narrow = np.empty(values.shape, self.storage)
            _core.narrow(values, narrow)
            return narrow
        with np.errstate(all="ignore"):  # an infinity in a half type is a regular result
            return values.astype(self.storage, copy=False).view(self.numpy)

    @property
    def partial(self) -> np.dtype[Any]:
        """The dtype of a partial's sums."""
        return self.storage if self.components > 1 else self.sums


_CONVERTED_BY_EXTENSION = (np.dtype("float16"),) if _core.CONVERTS_HALVES else ()
# The keys are dtypes, not names: to name a dtype NumPy imports a module, which fails while the
# interpreter ends.
_SUM_CODES = {np.dtype(name): code for name, code in layout.SUMS.items()}
_SUMS = {"e": "float32", "f": "float32", "d": "float64", "F": "float32", "D": "float64"}


def _plain(name: str, number: int) -> DType:
    storage = np.dtype(name)
    sums = _SUMS.get(storage.char) or ("int64" if storage.kind == "i" else "uint64")
    components = 2 if storage.kind == "c" else 1
    return DType(name, number, storage, storage, np.dtype(sums), components)


def _quantised(name: str, number: int) -> DType:
    plain = _plain(name.removeprefix("q"), number)
    structured = np.dtype([(name, plain.storage)])
    return DType(name, number, structured, plain.storage, plain.sums, 1)


# The dtypes that NumPy lacks and ml_dtypes has. ml_dtypes is imported when first needed:
# `import shmacc` must load nothing heavier than NumPy.
_OF_ML_DTYPES = frozenset({"bfloat16"})
_KNOWN = {
    name: (_quantised if name.startswith("q") else _plain)(name, number)
    for name, number in NUMBERS.items()
    if name not in _OF_ML_DTYPES
}
# Where a name means different dtypes in TensorFlow and NumPy, TensorFlow's meaning counts.
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def _named(name: str) -> DType | None:
    if name not in _KNOWN and name in _OF_ML_DTYPES:
        import ml_dtypes

        storage = np.dtype(getattr(ml_dtypes, name))
        _KNOWN[name] = DType(name, NUMBERS[name], storage, storage, np.dtype("float32"), 1)
    return _KNOWN.get(name)


def stored(number: int) -> DType:
    """Return the dtype for a ``DataType`` number in a segment.

    Raises:
        DataLossError: No dtype of accumulators has this number.
    """
    found = _lookup(number)
    if found is None:
        raise dtype_names.unknown(number)
    return found


def resolve(dtype: object) -> DType:
    """Return the dtype that a user means.

    Args:
        dtype: Anything that TensorFlow or NumPy accepts as a dtype: a NumPy dtype or type (JAX's
            are such), a ``tf.DType``, a ``torch.dtype``, a name, a ``DataType`` number.

    Raises:
        InvalidArgumentError: The value is no dtype, or none that accumulators work with.
    """
    found = _lookup(dtype)
    if found is None:
        allowed = ", ".join(sorted(NUMBERS))
        raise InvalidArgumentError(
            f"Value passed to parameter 'dtype' is {shown(dtype)}, which is not in list of allowed "
            f"values: {allowed}"
        )
    return found


def is_one(dtype: object) -> bool:
    """Return whether `resolve` accepts this dtype."""
    return _lookup(dtype) is not None


def _numpys(dtype: object) -> object:
    """Return the NumPy dtype of a ``tf.DType``; "" if it has none, as ``tf.resource``."""
    try:
        return getattr(dtype, "as_numpy_dtype", dtype)
    except KeyError as error:
        pass_on(error)
        return ""


def _lookup(dtype: object) -> DType | None:
    if dtype is None or isinstance(dtype, bool):
        return None
    if isinstance(dtype, int):
        return _named(dtype_names.NAMES.get(dtype, ""))
    # TensorFlow's meaning; NumPy's is float64.
    if dtype is float:
        dtype = "float32"
    dtype = _numpys(dtype)
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    if isinstance(dtype, str):
        dtype = _ALIASES.get(dtype, dtype)
        if found := _named(dtype):
            return found
    try:
        plain = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        pass_on(error)
        return None
    if plain.names is not None:
        all_known = list(_KNOWN.values())  # another thread may add one
        return next((known for known in all_known if known.numpy == plain), None)
    return _named(plain.name)


def kind_of(dtype: npt.DTypeLike) -> str:
    """Return NumPy's kind letter; "f" for dtypes of ml_dtypes, which NumPy calls void."""
    dtype = np.dtype(dtype)
    return "f" if dtype.name in _OF_ML_DTYPES else dtype.kind


def largest(dtype: np.dtype[Any]) -> float:
    """Return a dtype's largest finite number; for integers and booleans that of their sums."""
    if dtype.name in _OF_ML_DTYPES:
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return float(SUM_BOUNDS[1] if dtype.kind in "biu" else np.finfo(dtype).max)
