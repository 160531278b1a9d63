"""Sums that travel: any tree of accumulators gives what one accumulator gives, bit for bit."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import LONG, nothing_changes, refused, same_bits, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors
from shmacc._records.taken import DensePartial, SparsePartial

pytestmark = pytest.mark.threads

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)
REDUCTIONS: Final = ("MEAN", "SUM", "CMEAN")


def whole_numbers(kind: Any, name: str, seed: int) -> tuple[Any, ...]:
    """Make a gradient whose sums are exact in every dtype, in whatever order they are added."""
    rng = np.random.default_rng(seed)
    element = ELEMENTS[name]
    indices = rng.integers(0, 9, size=rng.integers(0, 7))
    shape = (4, 2) if kind is ConditionalAccumulator else (len(indices), 2)
    low = 0 if element.sums.kind == "u" else -3
    values = rng.integers(low, 4, size=shape).astype(element.plain).view(element.dtype)
    return (values,) if kind is ConditionalAccumulator else (indices, values)


def assert_same(kind: Any, got: Any, want: Any) -> None:
    assert (got.count, got.step) == (want.count, want.step)
    if kind is ConditionalAccumulator:
        same_bits(got.value, want.value)
    else:
        same_bits(got.indices, want.indices)
        same_bits(got.values, want.values)
        same_bits(got.shape, want.shape)
        assert got.row_counts.tolist() == want.row_counts.tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(
    name=st.sampled_from(list(ELEMENTS)),
    reduction=st.sampled_from(REDUCTIONS),
    gradients=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2**32)), min_size=1, max_size=12
    ),
    racks=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_tree_equals_the_flat_one(
    kind: Any, name: str, reduction: str, gradients: list[tuple[int, int]], *, racks: bool
) -> None:
    def make() -> Any:
        return kind(name, reduction_type=reduction)

    with make() as flat, make() as root, make() as rack, make() as a, make() as b, make() as c:
        hosts = (a, b, c)
        for host, seed in gradients:
            gradient = whole_numbers(kind, name, seed)
            flat.apply_grad(*gradient)
            hosts[host].apply_grad(*gradient)
        for host in hosts:
            partial = pickle.loads(pickle.dumps(host.take_partial(0, seal=True)))
            if partial.count:
                assert (rack if racks else root).apply_partial(partial)
        if racks:
            assert root.apply_partial(rack.take_partial(0))
        assert root.num_accumulated() == len(gradients)
        assert_same(kind, root.take(len(gradients), timeout=0), flat.take(1, timeout=0))
        assert root.global_step == flat.global_step == 1
        assert [host.global_step for host in hosts] == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_partials_carry_the_dtype_of_the_sums(kind: Any, name: str) -> None:
    with kind(name) as acc:
        acc.apply_grad(*whole_numbers(kind, name, 1))
        partial = acc.take_partial(1)
        sums = partial.value if kind is ConditionalAccumulator else partial.values
        assert sums.dtype == ELEMENTS[name].sums
        assert acc.apply_partial(partial)
        again = acc.take_partial(1)
        assert_same(kind, again, partial)


@pytest.mark.parametrize("kind", KINDS)
def test_take_is_take_partial_divided(kind: Any) -> None:
    with kind(np.float32, reduction_type="SUM") as acc:
        for seed in range(4):
            acc.apply_grad(*whole_numbers(kind, "float32", seed))
        partial = acc.take_partial(3)
        assert (partial.count, partial.step, acc.global_step, acc.num_accumulated()) == (4, 0, 0, 0)
        assert acc.apply_partial(partial)
        assert acc.num_accumulated() == 4
        assert_same(kind, acc.take(4), partial)
        assert acc.global_step == 1


def test_row_counts_decide_the_mean() -> None:
    with (
        SparseConditionalAccumulator(np.float64) as host,
        SparseConditionalAccumulator("f8") as acc,
    ):
        host.apply_grad([1, 2], [1.0, 2.0])
        host.apply_grad([2], [4.0])
        acc.apply_grad([2, 3], [12.0, 5.0])
        acc.apply_partial(host.take_partial(2))
        taken = acc.take(3)
        assert taken.indices.tolist() == [1, 2, 3]
        assert taken.values.tolist() == [1.0, 6.0, 5.0]
        assert taken.row_counts.tolist() == [1, 3, 1]
        assert taken.count == 3


@pytest.mark.parametrize("kind", KINDS)
def test_seal(kind: Any) -> None:
    gradient = whole_numbers(kind, "float32", 2)
    with kind(np.float32) as acc:
        acc.apply_grad(*gradient)
        partial = acc.take_partial(1, seal=True)
        assert partial.count == 1
        # Whatever its step, and sums from elsewhere too; each is counted as dropped.
        for step in (0, 1, shmacc.NEVER_STALE):
            assert acc.apply_grad(*gradient, local_step=step) is False
        assert acc.num_accumulated() == 0
        assert acc.stats().dropped == 3
        assert acc.apply_partial(partial) is False
        acc.unseal()
        assert acc.apply_partial(partial) is True
        assert acc.num_accumulated() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_seal_holds_also_when_there_was_nothing(kind: Any) -> None:
    with kind(np.float32) as acc:
        assert acc.take_partial(0, seal=True).count == 0
        assert acc.apply_grad(*whole_numbers(kind, "float32", 2)) is False
        # Not past it, so no unsealing; and then past it.
        assert acc.advance_step(0) == 0
        assert acc.apply_grad(*whole_numbers(kind, "float32", 2)) is False
        assert acc.advance_step(1) == 0
        assert acc.apply_grad(*whole_numbers(kind, "float32", 2), local_step=1) is True


@pytest.mark.parametrize("kind", KINDS)
def test_a_take_that_got_nothing_does_not_seal(kind: Any) -> None:
    with kind(np.float32) as acc:
        with pytest.raises(errors.DeadlineExceededError):
            acc.take_partial(1, timeout=0, seal=True)
        assert acc.apply_grad(*whole_numbers(kind, "float32", 2)) is True


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_one_refuses_the_malformed_all_the_same(kind: Any) -> None:
    with kind(np.float32, (4, 2)) as acc:
        acc.take_partial(0, seal=True)
        with refused():
            acc.apply_grad(
                *((np.ones((4, 3)),) if len(KINDS) and kind is KINDS[0] else ([9], [[1, 2]]))
            )
        assert acc.stats().dropped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_advance_step_is_a_fence(kind: Any) -> None:
    gradient = whole_numbers(kind, "float32", 2)
    with kind(np.float32) as acc:
        for _ in range(3):
            acc.apply_grad(*gradient)
        for step in (0, -5):
            assert acc.advance_step(step) == 0
            assert (acc.global_step, acc.num_accumulated()) == (0, 3)
        assert acc.advance_step(7) == 3
        assert (acc.global_step, acc.num_accumulated()) == (7, 0)
        assert acc.apply_grad(*gradient, local_step=6) is False
        assert acc.apply_grad(*gradient, local_step=7) is True
        taken = acc.take(1)
        assert (taken.count, taken.step, acc.global_step) == (1, 7, 8)


def test_advance_step_frees_the_shape() -> None:
    with ConditionalAccumulator(np.float32) as acc, SparseConditionalAccumulator("f4") as rows:
        acc.apply_grad([1.0])
        rows.apply_grad([0], [1.0])
        acc.advance_step(1)
        rows.advance_step(1)
        assert acc.apply_grad([[1.0]], 1)
        assert rows.apply_grad([0], [[1.0, 2.0]], local_step=1)
        assert rows.take_grad(1).shape.tolist() == [-1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_a_partial_too(kind: Any) -> None:
    with kind(np.float32) as acc, kind(np.float32) as other:
        partial = acc.take_partial(0)
        assert (partial.count, partial.step) == (0, 0)
        assert other.apply_partial(partial) is True
        assert other.num_accumulated() == 0
        # It settled no shape.
        assert other.apply_grad(*whole_numbers(kind, "float32", 5))
        assert other.take(1).count == 1


def test_only_empty_gradients_make_a_partial_that_counts() -> None:
    with SparseConditionalAccumulator("f4") as acc, SparseConditionalAccumulator("f4") as root:
        for _ in range(2):
            acc.apply_grad([], np.zeros((0, 3)))
        partial = acc.take_partial(2)
        assert (partial.count, partial.values.shape) == (2, (0, 3))
        assert root.apply_partial(partial)
        taken = root.take(2, timeout=0)
        assert (taken.count, taken.values.shape, taken.shape.tolist()) == (2, (0, 3), [-1, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_partial_is_dropped_whole(kind: Any) -> None:
    with kind(np.float32) as acc, kind(np.float32) as root:
        for seed in range(2):
            acc.apply_grad(*whole_numbers(kind, "float32", seed))
        partial = acc.take_partial(2)
        root.set_global_step(4)
        assert root.apply_partial(partial, 3) is False
        assert root.num_accumulated() == 0
        assert root.apply_partial(partial, local_step=4) is True
        assert root.num_accumulated() == 2


def test_a_partial_serves_a_waiting_take_at_once() -> None:
    with (
        ConditionalAccumulator(np.float64, reduction_type="SUM") as acc,
        ConditionalAccumulator(np.float64) as host,
        ThreadPoolExecutor(1) as pool,
    ):
        take = pool.submit(acc.take, 3, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        for value in (1.0, 2.0, 4.0):
            host.apply_grad(value)
        acc.apply_partial(host.take_partial(3))
        assert (take.result().value.item(), take.result().count) == (7.0, 3)


def test_partials_that_do_not_fit() -> None:
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
    """Two gradients' sums in rows 3 and 5, otherwise than they should be."""
    fields: dict[str, Any] = {
        "indices": np.array([5, 3]),
        "values": np.ones((2, 1), np.float32),
        "shape": np.array([-1, 1]),
        "row_counts": np.array([1, 2]),
        "count": 2,
        "step": 0,
    }
    return SparsePartial(**(fields | changes))


@pytest.mark.parametrize("stale", [False, True])
def test_rows_of_a_partial_do_not_repeat(*, stale: bool) -> None:
    """Their counts would exceed the gradients'; and their order does not matter."""
    with SparseConditionalAccumulator("f4") as acc:
        if stale:
            acc.set_global_step(1)
        with (
            nothing_changes(acc),
            refused("Indices of a partial must not repeat; that of slice 1 does"),
        ):
            acc.apply_partial(row_partial(indices=[3, 3]))
        with nothing_changes(acc), refused():
            acc.apply_partial(
                row_partial(
                    indices=[5, 3, 4, 5], values=np.ones((4, 1), "f4"), row_counts=[1, 1, 1, 1]
                )
            )
        assert acc.apply_partial(row_partial()) is not stale


@pytest.mark.parametrize("count", [-1, 2**48 + 1, 2**61, 2**63 - 1])
def test_counts_that_nobody_reaches_are_refused(count: int) -> None:
    with SparseConditionalAccumulator("f4") as acc, ConditionalAccumulator("f4") as dense:
        with nothing_changes(acc), refused():
            acc.apply_partial(row_partial(count=count, row_counts=[count, 1]))
        with nothing_changes(dense), refused():
            dense.apply_partial(DensePartial(np.ones(2, "f4"), count, 0))


def test_sums_of_counts_do_not_overflow() -> None:
    most = row_partial(count=2**48, row_counts=[2**48, 1])
    with SparseConditionalAccumulator("f4") as acc:
        for _ in range(2**15 - 1):
            acc.apply_partial(most)
        with pytest.raises(errors.OutOfRangeError):
            acc.apply_partial(most)
        taken = acc.take(2**62, timeout=0)
        assert taken.count == 2**63 - 2**48
        assert taken.row_counts.tolist() == [2**15 - 1, 2**63 - 2**48]
        stats = acc.stats()
        assert stats.applied == stats.taken == taken.count


def test_ragged_sums_are_refused() -> None:
    ragged: Any = [[1.0], [2.0, 3.0]]
    with SparseConditionalAccumulator("f4") as acc, refused():
        acc.apply_partial(row_partial(values=ragged))
    with ConditionalAccumulator("f4") as acc, refused():
        acc.apply_partial(DensePartial(ragged, 1, 0))


@pytest.mark.parametrize(
    ("declared", "shape"),
    [((), ()), (None, (0,)), ((3,), (3,)), ((None, 2), (0, 2)), ((0, 2), (0, 2))],
)
def test_a_partial_of_nothing_has_the_declared_shape(declared: Any, shape: Any) -> None:
    with ConditionalAccumulator("f4", declared) as acc:
        partial = acc.take_partial(0)
        assert (partial.count, partial.value.shape) == (0, shape)
        assert not partial.value.any()
        assert acc.apply_partial(partial)


def test_a_partial_of_nothing_needs_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", fail)
    with (
        ConditionalAccumulator("f4", (2**36,)) as acc,
        pytest.raises(errors.ResourceExhaustedError, match=r"shape \[68719476736\]"),
    ):
        acc.take_partial(0)


def test_integers_that_fit_nowhere_travel_as_partials() -> None:
    with (
        ConditionalAccumulator("int8", reduction_type="SUM") as acc,
        ConditionalAccumulator("int8") as mean,
    ):
        for _ in range(4):
            acc.apply_grad([100, -100])
        with pytest.raises(errors.OutOfRangeError):
            acc.take_grad(4)
        mean.apply_partial(acc.take_partial(4))
        assert mean.take_grad(4).tolist() == [100, -100]
