"""`np.seterr(all="raise")`, which finds a program's first NaN, makes no call of the library raise.

Overflow, underflow and NaN give results by IEEE 754: the same bits, and no warning.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import same_bits

import shmacc
from shmacc import inspection
from shmacc._base import layout

REDUCTIONS: Final = tuple(layout.REDUCTIONS)
FLOATS: Final = [name for name, element in ELEMENTS.items() if not element.integral]


def extremes(name: str) -> np.ndarray:
    """Return numbers whose arithmetic raises every floating-point flag."""
    element = ELEMENTS[name]
    if element.integral:
        info = np.iinfo(element.plain)
        return np.array([0, 1, info.max // 4, info.min // 4], element.plain).view(element.dtype)
    real = np.zeros(1, element.dtype).real.dtype
    limits: Any = ml_dtypes.finfo(real)  # type: ignore[no-untyped-call]
    numbers = np.array(
        [1.0, limits.max, -limits.max, limits.smallest_subnormal, np.inf, -np.inf, np.nan], real
    ).astype(element.dtype)
    if element.dtype.kind == "c":
        numbers.imag = np.roll(numbers.real, 1)
    return numbers


def of_other_types(name: str) -> list[Any]:
    """Return numbers of a wider type and of Python's types, which must be converted."""
    if ELEMENTS[name].integral:
        return [[3.0, 2.0]]
    tiny = np.array([1e-320, 1e-46, 1e-9, 1.0, np.nan])
    if name.startswith("complex"):
        return [tiny, tiny * 1j, tiny.tolist()]
    return [tiny, tiny.tolist()]


def same_with_errors_raised(results: Callable[[], list[Any]]) -> None:
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual = results()
        np.seterr(all="raise")
        try:
            raised = results()
        finally:
            np.seterr(**before)
    assert len(usual) == len(raised) > 0
    for ours, theirs in zip(raised, usual, strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_calls_do_not_raise_under_numpys_seterr_raise(name: str) -> None:
    reduction = reduction_of(name)

    def results() -> list[Any]:
        found = []
        for gradient in (extremes(name), *of_other_types(name)):
            rows = np.zeros(len(gradient), np.int64)
            rows[1::2] = range(1, 1 + len(rows[1::2]))  # all others are 0
            with (
                shmacc.ConditionalAccumulator(name, reduction_type=reduction) as dense,
                shmacc.SparseConditionalAccumulator(name, reduction_type=reduction) as sparse,
            ):
                for _ in range(2):
                    dense.apply_grad(gradient)
                    sparse.apply_grad(rows, gradient)
                found += [dense.take_partial(2).value, sparse.take_partial(2).values]
                dense.apply_grad(gradient)
                sparse.apply_grad(rows, gradient)
                dense.restore(dense.state())
                sparse.restore(sparse.state())
                found += [dense.take_grad(1), sparse.take_grad(1).values]
        swapped = extremes(name)
        if ELEMENTS[name].plain.isbuiltin == 1 and not ELEMENTS[name].quantised:
            swapped = swapped.astype(swapped.dtype.newbyteorder())
        with shmacc.SharedArrays({"a": swapped}) as params:
            return [*found, params["a"].copy()]

    same_with_errors_raised(results)


def reduction_of(name: str) -> str:
    """Return a reduction for a dtype; all reductions are used by dtypes of each kind."""
    return REDUCTIONS[list(ELEMENTS).index(name) % len(REDUCTIONS)]


@pytest.mark.parametrize("name", FLOATS)
def test_weights_do_not_raise_under_numpys_seterr_raise(name: str) -> None:
    reduction = reduction_of(name)

    def results(weight: int) -> list[Any]:
        gradient = extremes(name)
        group = {
            "dense": shmacc.TensorSpec(None, name, reduction_type=reduction),
            "sparse": shmacc.IndexedSlicesSpec(None, name, reduction_type=reduction),
        }
        with shmacc.AccumulatorGroup(group) as acc, shmacc.AccumulatorGroup(group) as far:
            for of_it in ({"dense": gradient}, {"sparse": (range(len(gradient)), gradient)}):
                assert acc.apply(of_it, 0, weight=weight)
            seen = acc.snapshot()
            assert far.apply_partial(acc.take_partial(2))
            taken = far.take(1)
        return [seen["dense"].value, taken["dense"].value, taken["sparse"].values]

    same_with_errors_raised(lambda: results(3) + results(2**30))


def test_inspection_does_not_raise_under_numpys_seterr_raise() -> None:
    def results() -> list[Any]:
        found = []
        for name in FLOATS:
            with shmacc.ConditionalAccumulator(name, None, "raising", reduction_type="SUM") as acc:
                assert acc.apply_grad(extremes(name))
                summary = inspection.summarise_values("raising")
                found.append(np.array([summary.norm, summary.largest, summary.nan]))
                acc.unlink()
        return found

    same_with_errors_raised(results)
