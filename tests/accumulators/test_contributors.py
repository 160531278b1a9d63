"""A gradient of a contributor is in a round once, however often it is sent; weights count."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.elements import ELEMENTS
from helpers.support import refused, same_bits

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST: Final = 2**63 - 1


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def acc(request: pytest.FixtureRequest) -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator(
        "f8", (), "contributed", reduction_type="SUM", lanes=request.param
    ) as made:
        yield made
        made.unlink()


def test_the_second_gradient_of_a_contributor_adds_nothing(acc: ConditionalAccumulator) -> None:
    assert acc.apply_grad(1.0, contributor=7)
    assert acc.apply_grad(2.0, contributor=0)
    for _ in range(3):
        assert acc.apply_grad(40.0, contributor=7)
        assert acc.apply_grad(40.0, contributor=7, weight=3)
    assert acc.apply_grad(4.0)  # of nobody in particular
    assert (acc.num_accumulated(), acc.stats().applied) == (3, 3)
    assert acc.contributors().tolist() == [0, 7]
    taken = acc.take(3)
    assert (taken.value.item(), taken.count, taken.weight) == (7.0, 3, 3)
    assert taken.contributors.tolist() == [0, 7]
    assert taken.contributors.dtype == np.int64


def test_in_the_next_round_it_counts_again(acc: ConditionalAccumulator) -> None:
    for step in range(3):
        assert acc.apply_grad(1.0, step, contributor=LAST)
        assert acc.apply_grad(1.0, step, contributor=LAST)
        assert acc.contributors().tolist() == [LAST]
        assert acc.take(1).count == 1
        assert acc.contributors().size == 0
    assert acc.apply_grad(1.0, 3, contributor=LAST)
    assert acc.advance_step(9) == 1
    assert acc.apply_grad(1.0, 9, contributor=LAST)
    assert acc.num_accumulated() == 1


def test_a_stale_or_sealed_apply_is_false_whoever_it_is_from(acc: ConditionalAccumulator) -> None:
    assert acc.apply_grad(1.0, contributor=1)
    assert not acc.apply_grad(1.0, -1, contributor=1)
    assert not acc.apply_grad(1.0, -1, contributor=2)
    with acc.round(1):
        assert not acc.apply_grad(1.0, contributor=1)
    assert acc.apply_grad(1.0, 1, contributor=1)
    acc.take_partial(1, seal=True)
    assert not acc.apply_grad(1.0, 1, contributor=1)
    assert acc.stats().dropped == 4


def test_an_exception_in_a_round_keeps_its_contributors(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0, contributor=5)
    with pytest.raises(LookupError), acc.round(1) as taken:  # noqa: PT012 - both are the point
        assert taken.contributors.tolist() == [5]
        raise LookupError
    assert acc.apply_grad(1.0, contributor=5)
    assert (acc.num_accumulated(), acc.contributors().tolist()) == (1, [5])


def test_many_contributors(acc: ConditionalAccumulator) -> None:
    rng = np.random.default_rng(1)
    who = rng.integers(0, LAST, 500, endpoint=True).tolist()
    for _ in range(2):
        for contributor in who:
            assert acc.apply_grad(1.0, contributor=contributor)
    taken = acc.take(len(who))
    assert taken.value == len(who)
    assert taken.contributors.tolist() == sorted(who)


@pytest.mark.parametrize("contributor", [-1, 2**63, 1.0, True, "me", [1], np.float32(1)])
def test_what_is_no_contributor(contributor: Any) -> None:
    with ConditionalAccumulator("f4") as acc:
        with refused():
            acc.apply_grad(1.0, contributor=contributor)
        numpys: Any = np.int32(3)
        assert acc.apply_grad(1.0, contributor=numpys)
        assert acc.contributors().tolist() == [3]


def _apply(contributor: int, value: float, *, pipe: Pipe) -> None:
    acc = ConditionalAccumulator.attach("contributed")
    pipe.say(acc.apply_grad(value, contributor=contributor))
    pipe.hear()


def test_a_restarted_worker_is_in_once(acc: ConditionalAccumulator) -> None:
    """Killed after its apply, it just computes its batch again."""
    for worker in (3, 4, 3, 4, 4):
        with Apart(_apply, worker, float(worker)) as process:
            assert process.hear()
    assert acc.num_accumulated() == 2
    taken = acc.take(2, timeout=0)
    assert (taken.value.item(), taken.contributors.tolist()) == (7.0, [3, 4])


@pytest.mark.parametrize("kind", [SparseConditionalAccumulator, ConditionalAccumulator])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_partial_brings_its_contributors(kind: Any, lanes: int) -> None:
    grad: tuple[Any, ...] = ([1, 2], [[1.0], [2.0]])
    if kind is ConditionalAccumulator:
        grad = ([1.0],)
    with kind("f4", lanes=lanes) as near, kind("f4", lanes=lanes) as far:
        for contributor in (1, 2, 9):
            near.apply_grad(*grad, contributor=contributor)
        partial = pickle.loads(pickle.dumps(near.take_partial(3)))
        assert partial.contributors.tolist() == [1, 2, 9]
        # An unsealed take_partial takes them along: they may apply again.
        assert near.apply_grad(*grad, contributor=2)
        assert near.contributors().tolist() == [2]

        far.apply_grad(*grad, contributor=4)
        assert far.apply_partial(partial)
        assert far.contributors().tolist() == [1, 2, 4, 9]
        before = far.snapshot()
        for _ in range(2):
            with pytest.raises(errors.AlreadyExistsError):
                far.apply_partial(partial)
            with pytest.raises(errors.AlreadyExistsError):
                far.apply_partial(_with_one_of_them(kind, grad, 9))
        for contributor in (1, 2, 4, 9):
            assert far.apply_grad(*grad, contributor=contributor)
        assert far.num_accumulated() == 4
        after = far.take(4)
        for field in ("indices", "values", "value", "row_counts", "contributors"):
            if hasattr(before, field):
                same_bits(getattr(after, field), getattr(before, field))


def _with_one_of_them(kind: Any, grad: tuple[Any, ...], contributor: int) -> Any:
    with kind("f4") as acc:
        acc.apply_grad(*grad, contributor=contributor)
        acc.apply_grad(*grad, contributor=77)
        return acc.take_partial(2)


def test_a_partial_of_nothing_brings_nobody() -> None:
    with ConditionalAccumulator("f4", ()) as acc:
        acc.apply_grad(1.0, contributor=1)
        nothing = acc.take_partial(0)
        acc.apply_grad(1.0, contributor=1)
        empty = _empty()
        assert acc.apply_partial(empty)
        assert (nothing.count, empty.count, acc.num_accumulated()) == (1, 0, 1)


def _empty() -> Any:
    with ConditionalAccumulator("f4", ()) as acc:
        return acc.take_partial(0)


@pytest.mark.parametrize("who", [[1, 1], [-1], [1.5], "me"])
def test_contributors_of_a_partial_that_no_take_gave(who: Any) -> None:
    with ConditionalAccumulator("f4", ()) as acc:
        partial = shmacc.DensePartial(np.array(1, np.float32), 2, 0, contributors=who)
        with refused():
            acc.apply_partial(partial)
        assert acc.num_accumulated() == 0


# --- weights -------------------------------------------------------------------------------------

WEIGHTS: Final = (3, 1, 2)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "CMEAN"])
@pytest.mark.parametrize("name", list(ELEMENTS))
def test_a_weight_is_so_many_gradients_in_the_sum_and_in_the_divisor(
    name: str, reduction: str
) -> None:
    """And one in the quorum. By the same gradient, sent so many times, of small whole numbers."""
    element = ELEMENTS[name]
    rng = np.random.default_rng(len(name))
    grads = [rng.integers(0, 3, (2, 2)).astype(element.plain) for _ in WEIGHTS]
    grads = [grad.view(element.dtype) if element.quantised else grad for grad in grads]
    rows = [[1, 2], [2, 5], [5, 1]]
    dense = (
        ConditionalAccumulator(name, reduction_type=reduction),
        ConditionalAccumulator(name, reduction_type=reduction),
    )
    sparse = (
        SparseConditionalAccumulator(name, reduction_type=reduction),
        SparseConditionalAccumulator(name, reduction_type=reduction),
    )
    for grad, touched, weight in zip(grads, rows, WEIGHTS, strict=True):
        assert dense[0].apply_grad(grad, weight=weight)
        assert sparse[0].apply_grad(touched, grad, weight=weight)
        for _ in range(weight):
            assert dense[1].apply_grad(grad)
            assert sparse[1].apply_grad(touched, grad)
    assert dense[0].num_accumulated() == sparse[0].num_accumulated() == len(WEIGHTS)
    assert dense[1].num_accumulated() == sum(WEIGHTS)
    for weighted, repeated in (dense, sparse):
        ours, theirs = weighted.take(3, timeout=0), repeated.take(6, timeout=0)
        assert (ours.count, ours.weight, theirs.count, theirs.weight) == (3, 6, 6, 6)
        for field in ("indices", "values", "value", "row_counts"):
            if hasattr(ours, field):
                same_bits(getattr(ours, field), getattr(theirs, field))
        weighted.close()
        repeated.close()


def test_a_product_with_a_large_weight_is_rounded_once() -> None:
    weight = 2**24 + 1  # no float32
    with ConditionalAccumulator("float32", (), reduction_type="SUM") as acc:
        acc.apply_grad(3.0, weight=weight)
        assert acc.take(1).value.item() == np.float32(3 * weight)


@pytest.mark.parametrize("weight", [0, -1, 1.0, True, "2", 2**48 + 1, None])
def test_what_is_no_weight(weight: Any) -> None:
    with ConditionalAccumulator("f4") as acc:
        with refused():
            acc.apply_grad(1.0, weight=weight)
        assert acc.num_accumulated() == 0


@pytest.mark.parametrize("name", ["int64", "uint64", "int8", "uint32"])
def test_a_weighted_gradient_that_overflows_adds_nothing(name: str) -> None:
    with ConditionalAccumulator(name, reduction_type="SUM") as acc:
        limit = np.iinfo(np.uint64 if name.startswith("u") else np.int64).max
        most = int(np.iinfo(name).max)
        weight = min(limit // most, 2**48)
        assert acc.apply_grad(most, weight=weight)
        overflows = limit // most < 2**48
        if overflows:
            for times in (weight, 2**48):
                with pytest.raises(errors.OutOfRangeError):
                    acc.apply_grad(most, weight=times)
        partial = acc.take_partial(1)
        assert (int(partial.value), partial.count, partial.weight) == (most * weight, 1, weight)
        assert acc.num_accumulated() == 0


@pytest.mark.parametrize(
    ("lanes", "sparse"), [(1, False), (2, False), (2, True), (3, True), (32, False)]
)
def test_weights_of_all_lanes_do_not_overflow(lanes: int, *, sparse: bool) -> None:
    """The apply is refused that would be too much, in whichever lane; what is there is taken."""
    kind: Any = SparseConditionalAccumulator if sparse else ConditionalAccumulator
    grad = ([3], [1.0]) if sparse else ([1.0],)
    weight, most = 2**48, 2**15 - 1
    with kind("f8", lanes=lanes) as acc:
        for contributor in range(most):  # goes to its own lane
            assert acc.apply_grad(*grad, contributor=contributor, weight=weight)
        for lane in range(lanes):
            with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
                acc.apply_grad(*grad, contributor=most + lane, weight=weight)
        assert acc.apply_grad(*grad, contributor=0, weight=weight), "it is in the round"
        assert acc.apply_grad(*grad, contributor=most, weight=weight - 1)
        assert acc.snapshot().weight == LAST
        taken = acc.take(most + 1, timeout=0)
        assert (taken.count, taken.weight) == (most + 1, LAST)
        if sparse:
            assert taken.row_counts.tolist() == [LAST]
        assert acc.apply_grad(*grad, local_step=1, weight=weight)
        assert acc.take(1, timeout=0).weight == weight


@pytest.mark.parametrize("named", [False, True], ids=["of nobody", "with contributors"])
def test_counts_of_partials_in_all_lanes_do_not_overflow(*, named: bool) -> None:
    half, lanes = 2**14, 2
    with ConditionalAccumulator("f8", lanes=lanes) as acc:
        for i in range(half):
            assert acc.apply_grad(1.0, contributor=lanes * i + 1, weight=2**48)
        for i in range(half - 1):
            assert acc.apply_partial(_of_most(lanes * i if named else None))
        for _ in range(2):
            with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
                acc.apply_partial(_of_most(lanes * half if named else None))
        taken = acc.take(2**60, timeout=0)
        assert (taken.count, taken.weight) == (half + (half - 1) * 2**48, 2**63 - 2**48)


def test_a_gradient_beside_a_lane_that_has_most_of_the_weight_does_not_overflow() -> None:
    """Its own lane has nothing yet: it is the others' weight that leaves it no room."""
    most = shmacc.DensePartial(np.array(1.0), 1, 0, LAST)
    with ConditionalAccumulator("f8", (), lanes=2) as acc:
        assert acc.apply_partial(most)
        with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
            acc.apply_grad(1.0, contributor=1)
        assert acc.take(1, timeout=0).weight == LAST


def _of_most(contributor: int | None) -> shmacc.DensePartial:
    who = None if contributor is None else np.array([contributor])
    return shmacc.DensePartial(np.array(1.0), 2**48, 0, 2**48, who)  # type: ignore[arg-type]


def test_the_weight_of_a_partial_and_of_a_state_is_that_of_many_gradients() -> None:
    with ConditionalAccumulator("f8", ()) as near, ConditionalAccumulator("f8", ()) as far:
        for _ in range(3):
            near.apply_grad(1.0, weight=2**48)
        far.restore(near.state())
        assert far.apply_partial(near.take_partial(3))
        taken = far.take(6, timeout=0)
        assert (taken.value.item(), taken.count, taken.weight) == (1.0, 6, 6 * 2**48)
        most = shmacc.DensePartial(np.array(1.0), 1, 0, LAST)
        for partial, fits in ((most, True), (most, False)):
            with contextlib.nullcontext() if fits else pytest.raises(errors.OutOfRangeError):
                assert far.apply_partial(partial, 1)
        assert far.take(1, timeout=0).weight == LAST


def _weigh(acc: ConditionalAccumulator, first: int, *, pipe: Pipe) -> list[int]:
    pipe.hear()
    accepted: list[int] = []
    for contributor in range(first, first + 2**14 + 100):
        try:
            accepted.append(acc.apply_grad(1.0, contributor=contributor, weight=2**48))
        except errors.OutOfRangeError:
            accepted.append(0)
    return accepted


def test_processes_that_apply_at_a_time_do_not_overflow_the_weights_together() -> None:
    with ConditionalAccumulator("f8", (), lanes=4) as acc:
        with Apart(_weigh, acc, 0) as one, Apart(_weigh, acc, 2**20) as other:
            one.say()
            other.say()
            accepted = sum(one.result()) + sum(other.result())
        assert accepted == 2**15 - 1
        assert acc.take(accepted, timeout=0).weight == accepted * 2**48


PARTS: Final = (0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan)


@pytest.mark.parametrize("weight", [2, 3, 2**30])
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_a_weighted_complex_gradient_is_its_two_components_times_the_weight(
    name: str, weight: int
) -> None:
    """A product of complex numbers would make (inf+1j) * 2 a nan."""
    numbers = np.array([complex(real, imag) for real in PARTS for imag in PARTS], name)
    expected = np.empty_like(numbers)
    expected.real, expected.imag = numbers.real * weight, numbers.imag * weight
    for grad, wanted in ((numbers, expected), (numbers[9], expected[9])):
        with ConditionalAccumulator(name, reduction_type="SUM") as acc:
            assert acc.apply_grad(grad, weight=weight)
            same_bits(acc.take_grad(1), np.asarray(wanted))
    with SparseConditionalAccumulator(name, reduction_type="SUM") as rows:
        assert rows.apply_grad(range(7), numbers.reshape(7, 7), weight=weight)
        same_bits(rows.take_grad(1).values, expected.reshape(7, 7))


def test_weights_of_halves_are_applied_to_sums_of_32_bits() -> None:
    """A half times a weight may be more than a half can be; their mean is one again."""
    with ConditionalAccumulator("float16") as acc:
        assert acc.apply_grad(np.float16(60000), weight=1000)
        assert acc.apply_grad(np.float16(0), weight=1000)
        assert acc.take(2, timeout=0).value == np.float16(30000)


def test_a_weighted_partial_counts_as_its_gradients() -> None:
    with (
        SparseConditionalAccumulator("f8") as near,
        SparseConditionalAccumulator("f8") as far,
    ):
        near.apply_grad([1, 2], [[1.0], [2.0]], weight=3)
        near.apply_grad([2], [[8.0]])
        partial = near.take_partial(2)
        assert (partial.count, partial.weight, partial.row_counts.tolist()) == (2, 4, [3, 4])
        assert partial.values.tolist() == [[3.0], [14.0]]
        far.apply_grad([1], [[9.0]], weight=3)
        assert far.apply_partial(partial)
        taken = far.take(3, timeout=0)
        assert (taken.count, taken.weight, taken.row_counts.tolist()) == (3, 7, [6, 4])
        assert taken.values.tolist() == [[5.0], [3.5]]
