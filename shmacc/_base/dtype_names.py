"""The accumulators' dtypes, without NumPy: TensorFlow's names, ``DataType`` numbers, and sizes."""

from shmacc.errors import DataLossError

# Each name leads to TensorFlow's number of the dtype, and the bytes of an element.
_DTYPES = {
    "float32": (1, 4), "float64": (2, 8), "int32": (3, 4), "uint8": (4, 1), "int16": (5, 2),
    "int8": (6, 1), "complex64": (8, 8), "int64": (9, 8), "qint8": (11, 1), "quint8": (12, 1),
    "qint32": (13, 4), "bfloat16": (14, 2), "qint16": (15, 2), "quint16": (16, 2),
    "uint16": (17, 2), "complex128": (18, 16), "float16": (19, 2), "uint32": (22, 4),
    "uint64": (23, 8),
}  # fmt: skip
NUMBERS = {name: number for name, (number, _) in _DTYPES.items()}
BOOL = 10
"""The number of bool, a dtype of shared arrays but not of accumulators."""
NAMES = {number: name for name, number in NUMBERS.items()} | {BOOL: "bool"}
ITEM_BYTES = dict(_DTYPES.values()) | {BOOL: 1}
"""How many bytes an element of an array has, by the dtype's number."""


def unknown(number: int) -> DataLossError:
    """Return the error for a segment with an unknown dtype number."""
    return DataLossError(
        f"A member has a dtype of number {number}, which this version of shmacc does not have; a "
        "newer one has made it, and reads it"
    )
