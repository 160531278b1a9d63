"""Partials count like their gradients, bad partials are refused, and a seal closes a step.

test_against_numpy_model.py and test_groups.py test partials of partials.
"""

from typing import Any

import numpy as np
import pytest
from helpers.support import nothing_changes, refused

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors
from shmacc._accumulators.taken import DensePartial, SparsePartial

pytestmark = pytest.mark.threads


def test_row_counts_and_weights_decide_the_mean() -> None:
    with (
        SparseConditionalAccumulator(np.float64) as host,
        SparseConditionalAccumulator("f8") as acc,
    ):
        host.apply_grad([1, 2], [1.0, 2.0], weight=3)
        host.apply_grad([2], [6.0])
        partial = host.take_partial(2)
        assert (partial.count, partial.weight, partial.row_counts.tolist()) == (2, 4, [3, 4])
        assert partial.values.tolist() == [3.0, 12.0]
        acc.apply_grad([2, 3], [13.0, 5.0])
        acc.apply_partial(partial)
        taken = acc.take(3)
        assert (taken.count, taken.weight, taken.row_counts.tolist()) == (3, 5, [3, 5, 1])
        assert taken.indices.tolist() == [1, 2, 3]
        assert taken.values.tolist() == [1.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [(ConditionalAccumulator, ([1.0],)), (SparseConditionalAccumulator, ([1], [1.0]))],
)
def test_a_seal_refuses_later_gradients_of_the_step(kind: Any, gradient: tuple[Any, ...]) -> None:
    with kind(np.float32) as acc:
        acc.apply_grad(*gradient)
        with pytest.raises(errors.DeadlineExceededError):
            acc.take_partial(2, timeout=0, seal=True)  # does not seal
        partial = acc.take_partial(1, seal=True)
        assert partial.count == 1
        # A gradient of any step is refused, and so is a partial. Each is counted as dropped.
        for step in (0, 1, shmacc.NEVER_STALE):
            assert acc.apply_grad(*gradient, local_step=step) is False
        assert acc.apply_partial(partial) is False
        assert (acc.num_accumulated(), acc.stats().dropped) == (0, 4)
        with refused():
            acc.apply_grad(*["malformed"] * len(gradient))
        acc.unseal()
        assert acc.apply_partial(partial) is True
        acc.take_partial(0, seal=True)
        assert acc.advance_step(0) == 0  # the step did not advance, so the seal stays
        assert acc.apply_grad(*gradient, local_step=1) is False
        assert acc.advance_step(1) == 0
        assert acc.apply_grad(*gradient, local_step=1) is True


def test_partials_of_another_kind_or_shape_are_refused() -> None:
    with ConditionalAccumulator("f4", (2,)) as acc, SparseConditionalAccumulator("f4") as rows:
        acc.apply_grad([1.0, 2.0])
        rows.apply_grad([0], [1.0])
        partial, row_partial = acc.take_partial(), rows.take_partial()
        with refused():
            acc.apply_partial(row_partial)  # type: ignore[arg-type]
        with refused():
            rows.apply_partial(partial)  # type: ignore[arg-type]
        with ConditionalAccumulator("f4", (3,)) as other:
            with refused("Shape mismatch: expected [3], got [2]"):
                other.apply_partial(partial)
            assert other.num_accumulated() == 0
        with ConditionalAccumulator("i4") as whole, refused():
            whole.apply_partial(partial)


def row_partial(**changes: Any) -> SparsePartial:
    """The sums of two gradients in rows 3 and 5, with the given fields changed."""
    fields: dict[str, Any] = {
        "indices": np.array([5, 3]), "values": np.ones((2, 1), np.float32),
        "shape": np.array([-1, 1]), "row_counts": np.array([1, 2]), "count": 2, "step": 0,
    }  # fmt: skip
    return SparsePartial(**(fields | changes))


def test_a_partial_with_repeated_rows_is_refused() -> None:
    """With repeats, a row's count could exceed the gradients' count. Rows may be in any order."""
    four = {"values": np.ones((4, 1), "f4"), "row_counts": [1, 1, 1, 1]}
    with SparseConditionalAccumulator("f4") as acc:
        for step in (0, 1):  # the partials are fresh, then stale
            acc.set_global_step(step)
            for bad in row_partial(indices=[3, 3]), row_partial(indices=[5, 3, 4, 5], **four):
                with nothing_changes(acc), refused() as caught:
                    acc.apply_partial(bad)
                assert "must not repeat; that of slice" in str(caught.value)
            assert acc.apply_partial(row_partial()) is (step == 0)


def test_impossible_counts_are_refused() -> None:
    with SparseConditionalAccumulator("f4") as acc, ConditionalAccumulator("f4") as dense:
        for count in (-1, 2**48 + 1, 2**61, 2**63 - 1):
            with nothing_changes(acc), refused():
                acc.apply_partial(row_partial(count=count, row_counts=[count, 1]))
            with nothing_changes(dense), refused():
                dense.apply_partial(DensePartial(np.ones(2, "f4"), count, 0))


def test_ragged_sums_are_refused() -> None:
    ragged: Any = [[1.0], [2.0, 3.0]]
    with SparseConditionalAccumulator("f4") as acc, refused():
        acc.apply_partial(row_partial(values=ragged))
    with ConditionalAccumulator("f4") as acc, refused():
        acc.apply_partial(DensePartial(ragged, 1, 0))


def test_an_empty_partial_has_the_declared_shape() -> None:
    shapes: dict[Any, Any] = {(): (), None: (0,), (3,): (3,), (None, 2): (0, 2), (0, 2): (0, 2)}
    for declared, shape in shapes.items():
        with ConditionalAccumulator("f4", declared) as acc:
            partial = acc.take_partial(0)
            assert (partial.count, partial.value.shape) == (0, shape)
            assert not partial.value.any()
            assert acc.apply_partial(partial)
            assert acc.num_accumulated() == 0


def test_an_empty_partial_too_large_for_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", fail)
    with (
        ConditionalAccumulator("f4", (2**36,)) as acc,
        pytest.raises(errors.ResourceExhaustedError, match=r"shape \[68719476736\]"),
    ):
        acc.take_partial(0)
