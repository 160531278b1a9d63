"""A declared shape is what a gradient must have: nothing else gets into a round.

A first gradient of more dimensions would settle the round: every right one after it would be
refused, and `Parameters.update` of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.support import refused

from shmacc import (
    AccumulatorGroup,
    IndexedSlices,
    IndexedSlicesSpec,
    Parameters,
    SparseConditionalAccumulator,
    errors,
    optim,
    raw_ops,
)
from shmacc._records.taken import GroupPartial, SparsePartial

if TYPE_CHECKING:
    from collections.abc import Callable

Shape = tuple[int, ...]
# Of an accumulator, and of the rows of a gradient that must not get in.
WRONG: Final[list[tuple[Shape, Shape]]] = [
    ((10,), (1,)),
    ((10,), (1, 1)),
    ((10, 2), (2, 1)),
    ((10, 2), (2, 3)),
    ((10, 2, 3), (2, 3, 1)),
    ((10, 0), (0, 1)),
    ((0, 2), (2, 2)),
]


def rows(shape: Shape, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(count), np.ones((count, *shape), np.float32)


def partial(indices: Any, values: Any) -> SparsePartial:
    counts = np.ones(len(indices), np.int64)
    return SparsePartial(indices, values, np.array([-1, *values.shape[1:]]), counts, 1, 0)


def restored(acc: Any, indices: Any, values: Any) -> None:
    state = acc.state()
    one = np.array(1)
    of_member = {
        "0.values": values,
        "0.indices": indices,
        "0.row_counts": np.ones(len(indices), np.int64),
        "0.shape": np.array([-1, *values.shape[1:]]),
        "0.count": one,
        "0.weight": one,
    }
    acc.restore({**state, **of_member, "count": one, "weight": one})


SINGLE: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "arrays": lambda acc, i, v: acc.apply_grad(i, v),
    "lists": lambda acc, i, v: acc.apply_grad(i.tolist(), v.tolist() if v.size else v),
    "a wider type": lambda acc, i, v: acc.apply_grad(i, v.astype("f8")),
    "a weight": lambda acc, i, v: acc.apply_grad(i, v, weight=2),
    "its own shape": lambda acc, i, v: acc.apply_grad(
        i, v, [*acc.shape, *v.shape[acc_rank(acc) :]]
    ),
    "slices": lambda acc, i, v: acc.apply_indexed_slices_grad(IndexedSlices(v, i)),
    "a raw op": lambda acc, i, v: raw_ops.SparseAccumulatorApplyGradient(
        acc, 0, i, v, [], has_known_shape=False
    ),
    "a partial": lambda acc, i, v: acc.apply_partial(partial(i, v)),
    "a state": restored,
}
GROUP: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "arrays": lambda acc, i, v: acc.apply({"t": (i, v)}, 0),
    "a wider type": lambda acc, i, v: acc.apply({"t": (i, v.astype("f8"))}, 0),
    "slices": lambda acc, i, v: acc.apply({"t": IndexedSlices(v, i)}, 0),
    "a partial": lambda acc, i, v: acc.apply_partial(GroupPartial({"t": partial(i, v)}, 1, 0), 0),
    "a state": restored,
}


def acc_rank(acc: Any) -> int:
    return len(acc.shape)


@pytest.mark.parametrize(("declared", "wrong"), WRONG)
@pytest.mark.parametrize("how", SINGLE)
def test_of_an_accumulator(declared: Shape, wrong: Shape, how: str) -> None:
    count = min(2, declared[0])
    with SparseConditionalAccumulator("f4", declared) as acc:
        said = f"expected values rank {len(declared)}, got {len(wrong) + 1}"
        with pytest.raises(errors.InvalidArgumentError, match=said):
            SINGLE[how](acc, *rows(wrong, count))
        assert acc.num_accumulated() == 0
        SINGLE[how](acc, *rows(declared[1:], count))
        assert acc.num_accumulated() == 1


@pytest.mark.parametrize("unknown_rows", [False, True])
@pytest.mark.parametrize(("declared", "wrong"), WRONG)
@pytest.mark.parametrize("how", GROUP)
def test_of_a_groups_member(declared: Shape, wrong: Shape, how: str, *, unknown_rows: bool) -> None:
    spec = IndexedSlicesSpec((None if unknown_rows else declared[0], *declared[1:]))
    count = min(2, declared[0])
    with AccumulatorGroup({"t": spec}) as group:
        said = f"Member 't': .*expected values rank {len(declared)}, got {len(wrong) + 1}"
        with pytest.raises(errors.InvalidArgumentError, match=said):
            GROUP[how](group, *rows(wrong, count))
        assert group.num_accumulated() == 0
        GROUP[how](group, *rows(declared[1:], count))
        assert group.num_accumulated() == 1


def test_one_worker_with_a_column_stops_nobody() -> None:
    with (
        Parameters({"t": np.zeros(10)}, optimizer=optim.SGD(1)) as params,
        AccumulatorGroup(params.member_specs(["t"])) as group,
    ):
        with pytest.raises(errors.InvalidArgumentError):
            group.apply({"t": ([1], [[1.0]])}, 0, contributor=1)
        assert group.apply({"t": ([1], [1.0])}, 0, contributor=1)
        with group.round(1) as taken:
            assert params.update(taken)
        assert params["t"].tolist() == [0, -1, *[0] * 8]


def test_a_stale_gradient_is_dropped_as_any_other() -> None:
    with SparseConditionalAccumulator("f4", (10,)) as acc:
        acc.set_global_step(1)
        assert acc.apply_grad([1], [[1.0]]) is False


def test_what_leaves_a_dimension_open_is_tensorflows() -> None:
    """Its own tests apply rows of more dimensions to these; the first settles the round."""
    for declared in (None, 2), (10, None):
        with SparseConditionalAccumulator("f4", declared) as acc:
            assert acc.apply_grad([0], np.ones((1, 2, 3)))
            with refused("Shape mismatch: expected values rank 3, got 2"):
                acc.apply_grad([0], np.ones((1, 2)))
