"""TensorFlow's names and ``DataType`` numbers of the accumulators' dtypes, without NumPy."""

NUMBERS = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "qint8": 11,
    "quint8": 12,
    "qint32": 13,
    "bfloat16": 14,
    "qint16": 15,
    "quint16": 16,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
}
BOOL = 10
"""Shared arrays have it, accumulators do not."""
NAMES = {number: name for name, number in NUMBERS.items()} | {BOOL: "bool"}


def item_bytes(number: int) -> int:
    """Return how many bytes an element of an array of this dtype has; the name ends in bits."""
    bits = "".join(filter(str.isdigit, NAMES[number]))
    return int(bits or 8) // 8
