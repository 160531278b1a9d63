"""A snapshot is what a take would give now; nothing is consumed, and nobody is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart
from helpers.process_work import say_and_take
from helpers.support import same_bits, until

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS: Final = ("indices", "values", "value", "shape", "row_counts", "contributors")


def same(got: Any, want: Any) -> None:
    """Hold all that two takes say against each other, but for groups' members."""
    assert (got.count, got.weight, got.step) == (want.count, want.weight, want.step)
    for field in FIELDS:
        assert hasattr(got, field) == hasattr(want, field)
        if hasattr(got, field):
            same_bits(getattr(got, field), getattr(want, field))


def sparse(lanes: int) -> Any:
    """With three gradients in it."""
    acc = SparseConditionalAccumulator("f4", (9, 2), lanes=lanes)
    acc.apply_grad([3, 1], [[1, 2], [3, 4]], contributor=4)
    acc.apply_grad([1, 8], [[5, 6], [7, 8]], weight=3)
    acc.apply_grad([], np.empty((0, 2)), contributor=2)
    return acc


def dense(lanes: int) -> Any:
    """With two gradients in it."""
    acc = ConditionalAccumulator("int16", lanes=lanes)
    acc.apply_grad([[1, 2]], contributor=4)
    acc.apply_grad([[7, -4]], weight=2)
    return acc


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("make", [sparse, dense])
def test_it_is_what_the_next_take_gives(make: Callable[[int], Any], lanes: int) -> None:
    with make(lanes) as acc, make(1) as in_one_lane:
        before = acc.stats()
        first, second = acc.snapshot(), acc.snapshot()
        assert acc.stats() == before
        same(first, second)
        same(first, in_one_lane.take(1))  # whole numbers: in any order
        taken = acc.take(1)
        assert type(first) is type(taken)
        same(first, taken)
        first_array = first.values if make is sparse else first.value
        first_array[...] = 0  # the caller's own memory
        same(second, taken)


def test_of_an_empty_one() -> None:
    with SparseConditionalAccumulator("f2", (9, 2)) as acc:
        acc.set_global_step(4)
        none = acc.snapshot()
        assert (none.count, none.weight, none.step, none.contributors.size) == (0, 0, 4, 0)
        assert (none.indices.size, none.values.shape) == (0, (0, 2))
        assert none.values.dtype == np.float16
        assert none.shape.tolist() == [9, 2]
    with ConditionalAccumulator("int8", (2, None)) as acc:
        none_dense = acc.snapshot()
        assert (none_dense.count, none_dense.value.shape) == (0, (2, 0))
        assert none_dense.value.dtype == np.int8
    with AccumulatorGroup({"a": TensorSpec()}) as group:
        assert (len(group.snapshot()), group.snapshot().count) == (0, 0)


def test_in_an_open_round_it_shows_the_round() -> None:
    with ConditionalAccumulator("f8", (), "seen", reduction_type="SUM") as acc:
        acc.apply_grad(1.0, contributor=3)
        with shmacc.attach("seen") as other, acc.round(1) as taken:
            assert isinstance(other, ConditionalAccumulator)
            same(other.snapshot(), taken)
            same(acc.snapshot(), taken)
            assert acc.contributors().tolist() == other.contributors().tolist() == [3]
        assert acc.snapshot().count == 0
        acc.unlink()


def test_it_does_not_wait_in_line() -> None:
    with ConditionalAccumulator("f8", (), "seen", reduction_type="SUM") as acc:
        acc.apply_grad(1.0)
        with Apart(say_and_take, "seen", 2) as head:
            head.hear()
            until(lambda: acc.stats().waiting == 1)
            assert acc.snapshot().value == 1.0
            acc.apply_grad(2.0)
            assert head.result() == 2
        acc.unlink()


def test_of_a_sealed_one() -> None:
    with ConditionalAccumulator("f8", ()) as acc:
        acc.apply_grad(1.0)
        acc.take_partial(1, seal=True)
        assert acc.snapshot().count == 0
        assert acc.stats().sealed


def test_of_a_group() -> None:
    specs = {
        "rows": IndexedSlicesSpec((None, 2), "float64"),
        "array": TensorSpec((2,), "float32"),
        "untouched": TensorSpec((2,), "float32"),
    }
    with AccumulatorGroup(specs) as group:
        group.apply({"rows": ([4], [[1, 2]]), "array": [1, 2]}, 0, contributor=1)
        group.apply({"rows": ([4, 2], [[1, 2], [3, 4]])}, 0, contributor=2)
        seen = group.snapshot()
        taken = group.take(2)
        assert list(seen) == list(taken) == ["rows", "array"]
        assert (seen.count, seen.weight, seen.step) == (2, 2, 0)
        assert seen.contributors.tolist() == [1, 2]
        for name, member in taken.items():
            same(seen[name], member)


def test_of_a_result_that_does_not_fit() -> None:
    with ConditionalAccumulator("int8", (), reduction_type="SUM") as acc:
        for _ in range(2):
            acc.apply_grad(100)
        with pytest.raises(errors.OutOfRangeError):
            acc.snapshot()
        assert acc.take_partial(2).value == 200


def test_of_a_closed_one() -> None:
    acc = ConditionalAccumulator("f8", ())
    acc.close()
    with pytest.raises(errors.FailedPreconditionError):
        acc.snapshot()
    with pytest.raises(errors.FailedPreconditionError):
        acc.contributors()
