"""NumPy's own arrays of the right type are recognised at once; any other form means the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Other(np.ndarray[Any, Any]):
    """An array that is not NumPy's own, so it goes the long way."""


DECLARED: Final[tuple[Any, ...]] = (
    None,
    [],
    [4],
    [None],
    [4, 2],
    [None, 2],
    [4, None],
    [4, 2, None],
    [0, 2],
)
INDICES: Final[tuple[Any, ...]] = (
    [],
    [0],
    [0, 1, 3],
    [3, 1, 0],
    [1, 1, 2],
    [4],
    [0, 4, 2],
    [-1],
    [2, -1, 0],
    [2**63 - 1],
    [[0, 1]],
    2,
)
SHAPES: Final = ((), (1,), (2,), (2, 1), (1, 2), (4, 2), (2, 4), (0, 2), (4, 2, 3))


def same(acc: Any, apply: Callable[..., bool], *gradient: np.ndarray[Any, Any]) -> None:
    others = [array.view(Other) for array in gradient]
    assert outcome(acc, lambda: apply(*gradient)) == outcome(acc, lambda: apply(*others))


def outcome(acc: Any, apply: Callable[[], bool]) -> Any:
    """Return what an apply to an empty accumulator does."""
    acc.advance_step(acc.global_step + 1)
    try:
        added = apply()
    except errors.ShmaccError as error:
        return type(error), str(error), acc.num_accumulated()
    state = {key: np.asarray(value).tolist() for key, value in acc.state().items()}
    del state["step"]
    return added, state


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_rows_are_as_in_any_other_form(declared: Any) -> None:
    def apply(indices: Any, values: Any) -> bool:
        return acc.apply_grad(indices, values, None, NEVER_STALE)

    def apply_three(indices: Any, values: Any) -> bool:
        return acc.apply_grad(indices, values, None, NEVER_STALE, weight=3)

    def apply_to_group(indices: Any, values: Any) -> bool:
        return group.apply({"rows": (indices, values)}, NEVER_STALE)

    with (
        SparseConditionalAccumulator("float32", declared) as acc,
        AccumulatorGroup({"rows": IndexedSlicesSpec(declared, "float32")}) as group,
    ):
        for given in INDICES:
            indices = np.array(given, np.int64)
            count = indices.size
            for shape in (count,), (count, 2), (count, 3), (count, 2, 2), (count + 1, 2), ():
                values = np.ones(shape, np.float32)
                same(acc, apply, indices, values)
                same(acc, apply_three, indices, values)
                same(group, apply_to_group, indices, values)


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_arrays_are_as_in_any_other_form(declared: Any) -> None:
    with (
        ConditionalAccumulator("float32", declared) as acc,
        AccumulatorGroup({"array": TensorSpec(declared, "float32")}) as group,
    ):
        for shape in SHAPES:
            value = np.ones(shape, np.float32)
            same(acc, lambda value: acc.apply_grad(value, NEVER_STALE), value)
            same(group, lambda value: group.apply({"array": value}, NEVER_STALE), value)


def layouts(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the array in C order, and as it is when it needs a copy to be."""
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    swapped = array.astype(array.dtype.newbyteorder())
    return [array, np.asfortranarray(array), np.repeat(array, 2, 0)[::2], unaligned, swapped]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64", "qint8"])
def test_types_and_layouts_are_as_in_any_other_form(dtype: str) -> None:
    with (
        SparseConditionalAccumulator(dtype, [4, 2]) as sparse,
        ConditionalAccumulator(dtype, [3, 2]) as dense,
    ):
        for given in "float32", "float64", "int32", "int64", "complex64", "float16":
            for values in layouts(np.arange(6).reshape(3, 2).astype(given)):
                same(dense, lambda values: dense.apply_grad(values, NEVER_STALE), values)
                for indices in (
                    *layouts(np.array([0, 2, 3])),
                    np.array([0, 2, 3], np.int32),
                    np.array([0, 2, 3], np.float32),
                ):
                    same(
                        sparse,
                        lambda indices, values: sparse.apply_grad(
                            indices, values, None, NEVER_STALE
                        ),
                        indices,
                        values,
                    )
