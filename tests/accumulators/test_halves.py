"""float16 is widened and narrowed as NumPy does it, to the bit, by whatever instructions."""

from __future__ import annotations

import numpy as np
import pytest

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
NUMBERS = HALVES[~np.isnan(HALVES)]


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16 if values.dtype == np.float16 else np.uint32)


@pytest.mark.parametrize("size", [1, 7, 8, 9, NUMBERS.size])
def test_each_half_goes_through_as_it_is(size: int) -> None:
    values = NUMBERS[-size:]
    with ConditionalAccumulator("float16", (size,)) as acc:
        acc.apply_grad(values)
        partial = acc.take_partial(1)
        assert np.array_equal(bits(partial.value), bits(values.astype(np.float32)))
        acc.apply_partial(partial)
        assert np.array_equal(bits(acc.take_grad(1)), bits(values))


def test_results_are_rounded_as_numpy_rounds() -> None:
    """Between every two halves that follow each other: a third, the middle, two thirds."""
    steps = np.sort(NUMBERS[np.isfinite(NUMBERS)].astype(np.float32))
    between = [steps[:-1] + np.diff(steps) * np.float32(part) for part in (1 / 3, 1 / 2, 2 / 3)]
    beyond = np.array([65519.99, 65520, 1e30, 2e-8, 3e-8], np.float32)
    wide = np.concatenate([*between, beyond])
    with ConditionalAccumulator("float16", wide.shape) as acc:
        acc.apply_grad(np.zeros(wide.shape, np.float16))
        partial = acc.take_partial(1)
        partial.value[:] = wide
        acc.apply_partial(partial)
        with np.errstate(over="ignore"):
            expected = wide.astype(np.float16)
        assert np.array_equal(bits(acc.take_grad(1)), bits(expected))


def test_nan_stays_nan_and_strides_do_not_matter() -> None:
    values = np.full((3, 8), np.nan, np.float16)[:, ::2]
    with SparseConditionalAccumulator("float16", (9, 4)) as acc:
        acc.apply_grad([1, 2, 3], values)
        assert np.isnan(acc.take_grad(1).values).all()
