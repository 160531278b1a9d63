"""What was taken of a dense accumulator is an array to NumPy; rows of a sparse one are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import refused, same_bits

from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)

GROUP = {"w": TensorSpec((3,)), "rows": IndexedSlicesSpec((5, 2))}


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_what_was_taken_of_a_dense_one_is_its_value(name: str) -> None:
    given = np.arange(6).astype(ELEMENTS[name].plain).view(ELEMENTS[name].dtype).reshape(2, 3)
    with ConditionalAccumulator(name) as acc:
        acc.apply_grad(given)
        partial = acc.snapshot()
        taken = acc.take(1)
    assert np.asarray(taken) is taken.value
    same_bits(np.asarray(partial), given)
    copied = np.array(taken)
    assert not np.shares_memory(copied, taken.value)
    same_bits(copied, given)


def test_of_a_group_it_is_the_members() -> None:
    with AccumulatorGroup(GROUP) as acc:
        acc.apply({"w": [1, 2, 3]}, 0)
        taken = acc.take(1)
    assert np.asarray(taken["w"]).tolist() == [1, 2, 3]
    assert (2 * np.asarray(taken["w"], np.float64)).dtype == np.float64
    assert np.stack([taken["w"], taken["w"]]).shape == (2, 3)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(taken["w"], np.float64, copy=False)


def test_of_a_sparse_one_it_says_what_to_use() -> None:
    with SparseConditionalAccumulator("f4", (5, 2)) as acc:
        acc.apply_grad([3], [[1, 2]])
        taken = acc.take_partial(1), acc.snapshot()
    for rows in taken:
        for convert in (np.asarray, np.array, np.sum):
            with pytest.raises(TypeError, match=rf"{type(rows).__name__}.*\.values.*\.indices"):
                convert(rows)


def test_a_take_is_a_gradient_and_a_partial_is_none() -> None:
    """As a gradient it would count once, whatever it is of."""
    with ConditionalAccumulator("f4", (3,)) as near, ConditionalAccumulator("f4", (3,)) as far:
        near.apply_grad([1, 2, 3])
        near.apply_grad([3, 2, 1])
        partial = near.take_partial(2)
        with pytest.raises(errors.InvalidArgumentError, match="apply_partial"):
            far.apply_grad(partial)
        assert far.apply_grad(near.snapshot())
        assert far.apply_partial(partial)
        assert far.take(3).value.tolist() == [float(np.float32(4) / np.float32(3))] * 3
    with AccumulatorGroup(GROUP) as group:
        for wrong in ({"w": partial}, {"w": _rows()}):
            with refused():
                group.apply(wrong, 0)
        assert group.num_accumulated() == 0


def _rows() -> Any:
    with SparseConditionalAccumulator("f4", (5, 2)) as acc:
        return acc.snapshot()
