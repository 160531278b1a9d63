"""Computes the initial contents of tables' rows in NumPy, as shmacc.init documents them."""

import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import init


def rows(
    initial: init.Initial, ids: Any, row_shape: tuple[int, ...], dtype: Any = "float32"
) -> npt.NDArray[Any]:
    """Return the initial rows of these ids."""
    numbers = np.asarray(ids, np.int64).reshape(-1)
    width = int(np.prod(row_shape, dtype=np.int64))
    if isinstance(initial, init.Constant):
        made = np.full((len(numbers), width), initial.value)
    elif isinstance(initial, init.Uniform):
        made = initial.low + (initial.high - initial.low) * (
            words(initial.seed, numbers, width) * 2.0**-32
        )
    else:
        assert isinstance(initial, init.Normal)
        probability = (words(initial.seed, numbers, width) + 0.5) * 2.0**-32
        made = initial.mean + initial.stddev * quantile(probability)
    return made.astype(dtype).reshape(*np.shape(ids), *row_shape)


def words(seed: int, ids: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.uint64]:
    """Return each row's random 32-bit words, by Philox4x32-10."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    blocks = -(-width // 4)
    shape = (len(ids), blocks)
    wide = ids.astype(np.uint64)
    c0 = np.broadcast_to(np.arange(blocks, dtype=np.uint64), shape)
    c1 = np.zeros(shape, np.uint64)
    c2 = np.broadcast_to((wide & mask)[:, None], shape)
    c3 = np.broadcast_to((wide >> half)[:, None], shape)
    k0, k1 = seed % 2**32, seed // 2**32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (b >> half) ^ c1 ^ np.uint64(k0), b & mask, (a >> half) ^ c3 ^ np.uint64(k1), a & mask,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).reshape(len(ids), blocks * 4)[:, :width]


def quantile(p: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the standard normal distribution's quantile, by Wichura's AS 241."""
    near, near_divisor, far, far_divisor = _coefficients()
    q = p - 0.5
    r = 0.180625 - q * q
    middle = _polynomial(near, r) * q / _polynomial(near_divisor, r)
    r = np.sqrt(-logarithm(np.where(q < 0, p, 1 - p))) - 1.6
    tail = _polynomial(far, r) / _polynomial(far_divisor, r)
    return np.asarray(np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -tail, tail)))


def logarithm(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the natural logarithm by a series."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.75
    mantissa = np.where(small, mantissa * 2, mantissa)
    exponent = exponent - small
    s = (mantissa - 1) / (mantissa + 1)
    total = np.full_like(s, 1 / 21)
    for k in (19, 17, 15, 13, 11, 9, 7, 5, 3, 1):
        total = total * (s * s) + 1 / k
    return np.asarray(exponent * 0.6931471805599453 + 2 * s * total)


def _polynomial(coefficients: list[float], x: npt.NDArray[Any]) -> Any:
    total: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _coefficients() -> list[list[float]]:
    """Read the four lists of coefficients for `quantile` from Python's `statistics`."""
    source = Path(statistics.__file__).read_text(encoding="utf-8")
    body = source[source.index("def _normal_dist_inv_cdf") :]
    numbers = [
        float(text.replace("_", ""))
        for text in re.findall(r"\d\.[\d_]+e[+-]\d+|1\.0\)", body)
        for text in [text.rstrip(")")]
    ]
    return [numbers[0:8], numbers[8:16], numbers[16:24], numbers[24:32]]
