"""`ELEMENTS` has the 19 dtypes that accumulators accept."""

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Element:
    """A `dtype` as callers pass it, a `plain` dtype of the same bytes, and the dtype of `sums`."""

    name: str
    dtype: np.dtype[Any]
    plain: np.dtype[Any]
    sums: np.dtype[Any]

    @property
    def integral(self) -> bool:
        """Whether sums are exact 64-bit integers."""
        return self.sums.kind in "iu"

    @property
    def quantised(self) -> bool:
        """Whether callers pass the dtype as one of TensorFlow's structured NumPy types."""
        return self.dtype.names is not None


def _element(name: str, sums: str) -> Element:
    if name.startswith("q"):
        plain = np.dtype(name.removeprefix("q"))
        return Element(name, np.dtype([(name, plain)]), plain, np.dtype(sums))
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    return Element(name, dtype, dtype, np.dtype(sums))


ELEMENTS: Final = {
    name: _element(name, sums)
    for sums, names in {
        "float32": ("float16", "bfloat16", "float32"),
        "float64": ("float64",),
        "complex64": ("complex64",),
        "complex128": ("complex128",),
        "int64": ("int8", "int16", "int32", "int64", "qint8", "qint16", "qint32"),
        "uint64": ("uint8", "uint16", "uint32", "uint64", "quint8", "quint16"),
    }.items()
    for name in names
}
