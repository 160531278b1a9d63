"""A contributor's gradient is added once in a round; a weight counts like equal gradients."""

import itertools
import logging
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.elements import ELEMENTS
from helpers.support import refused, same_bits

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors
from shmacc._base import layout

LAST: Final = 2**63 - 1
MOST: Final = 2**48  # the largest weight, and the largest count of a partial


@pytest.fixture(params=[1, 3])
def lanes(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_the_second_gradient_of_a_contributor_adds_nothing(acc: ConditionalAccumulator) -> None:
    assert acc.apply_grad(1.0, contributor=7)
    assert acc.apply_grad(2.0, contributor=0)
    for _ in range(3):
        assert acc.apply_grad(40.0, contributor=7)
        assert acc.apply_grad(40.0, contributor=7, weight=3)
    assert acc.apply_grad(4.0)  # without a contributor
    stats = acc.stats()
    assert (stats.num_accumulated, stats.applied, stats.repeated, stats.dropped) == (3, 3, 6, 0)
    assert acc.contributors().tolist() == [0, 7]
    taken = acc.take(3)
    assert (taken.value.item(), taken.count, taken.weight) == (7.0, 3, 3)
    assert taken.contributors.tolist() == [0, 7]
    assert taken.contributors.dtype == np.int64


def test_a_stale_or_sealed_apply_is_false_for_everybody(acc: ConditionalAccumulator) -> None:
    assert acc.apply_grad(1.0, contributor=1)
    assert not acc.apply_grad(1.0, -1, contributor=1)
    assert not acc.apply_grad(1.0, -1, contributor=2)
    with acc.round(1):
        assert not acc.apply_grad(1.0, contributor=1)
    assert acc.apply_grad(1.0, 1, contributor=1)
    acc.take_partial(1, seal=True)
    assert not acc.apply_grad(1.0, 1, contributor=1)
    assert acc.stats().dropped == 4


@pytest.mark.parametrize("kind", ["dense", "sparse", "group"])
def test_a_repeated_never_stale_gradient_is_logged_once(
    kind: str, lanes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What looks like a repeat may be a new gradient; the warning says that it is lost."""
    make: Any = {
        "dense": lambda: ConditionalAccumulator("f8", (), "told", lanes=lanes),
        "sparse": lambda: SparseConditionalAccumulator("f8", (None,), "told", lanes=lanes),
        "group": lambda: shmacc.AccumulatorGroup({"w": shmacc.TensorSpec(())}, "told", lanes=lanes),
    }[kind]
    gradient: Any = {"dense": [1.0], "sparse": [[1], [1.0], None], "group": [{"w": 1.0}]}[kind]
    with make() as acc, make() as other:
        for one in (acc, other):
            apply = one.apply if kind == "group" else one.apply_grad
            for _ in range(3):
                assert apply(*gradient, 0, contributor=5)  # like a restarted worker
                assert apply(*gradient, shmacc.NEVER_STALE)
            assert caplog.records == []
            for _ in range(3):
                assert apply(*gradient, shmacc.NEVER_STALE, contributor=5)
            [record] = caplog.records
            assert (record.name, record.levelno) == ("shmacc", logging.WARNING)
            text = record.getMessage()
            assert all(each in text for each in ("'told'", "contributor 5", "id of its own"))
            assert "leave contributor= out" in text
            caplog.clear()
        assert (acc.stats().repeated, acc.num_accumulated()) == (2 + 3 + 3 + 3, 1 + 3 + 3)
        acc.unlink()


def test_a_raising_log_handler_does_not_disturb_later_applies(acc: ConditionalAccumulator) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyError(record.name)

    handler = Raises()
    acc.apply_grad(1.0, contributor=1)
    logging.getLogger("shmacc").addHandler(handler)
    try:
        with pytest.raises(KeyError):
            acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=1)
    finally:
        logging.getLogger("shmacc").removeHandler(handler)
    assert acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=1)
    assert (acc.stats().repeated, acc.num_accumulated()) == (2, 1)


def test_hundreds_of_contributors_count_once_each(acc: ConditionalAccumulator) -> None:
    who = np.random.default_rng(1).integers(0, LAST, 300, endpoint=True).tolist()
    for contributor in who * 2:
        assert acc.apply_grad(1.0, contributor=contributor)
    taken = acc.take(len(who))
    assert taken.value == len(who)
    assert taken.contributors.tolist() == sorted(who)


def test_a_contributor_may_be_numpys_integer() -> None:
    with ConditionalAccumulator("f4") as acc:
        numpys: Any = np.int32(3)
        assert acc.apply_grad(1.0, contributor=numpys)
        assert acc.contributors().tolist() == [3]


def same(got: Any, want: Any) -> None:
    for field in ("indices", "values", "value", "row_counts"):
        if hasattr(want, field):
            same_bits(getattr(got, field), getattr(want, field))


@pytest.mark.parametrize("who", [[1, 1], [-1], [1.5], "me", [1, 2, 3]])
def test_a_partial_with_wrong_contributors_is_refused(who: Any) -> None:
    with ConditionalAccumulator("f4", ()) as acc:
        partial = shmacc.DensePartial(np.array(1, np.float32), 2, 0, contributors=who)
        with refused():
            acc.apply_partial(partial)
        assert acc.num_accumulated() == 0


# --- weights -------------------------------------------------------------------------------------

WEIGHTS: Final = (3, 1, 2)


@pytest.mark.parametrize(
    ("name", "reduction"), list(zip(ELEMENTS, itertools.cycle(layout.REDUCTIONS), strict=False))
)
def test_a_weight_counts_like_that_many_equal_gradients(name: str, reduction: str) -> None:
    """The sums and the divisors are equal; only the number of gradients differs."""
    element = ELEMENTS[name]
    rng = np.random.default_rng(len(name))
    grads = [rng.integers(0, 3, (2, 2)).astype(element.plain).view(element.dtype) for _ in WEIGHTS]
    for kind in (ConditionalAccumulator, SparseConditionalAccumulator):
        weighted, repeated = (kind(name, reduction_type=reduction) for _ in range(2))
        for grad, rows, weight in zip(grads, ([1, 2], [2, 5], [5, 1]), WEIGHTS, strict=True):
            given: Any = (grad,) if kind is ConditionalAccumulator else (rows, grad)
            assert weighted.apply_grad(*given, weight=weight)
            for _ in range(weight):
                assert repeated.apply_grad(*given)
        ours, theirs = weighted.take(3, timeout=0), repeated.take(6, timeout=0)
        assert (ours.count, ours.weight, theirs.count, theirs.weight) == (3, 6, 6, 6)
        same(ours, theirs)
        weighted.close()
        repeated.close()


def test_a_product_with_a_large_weight_is_rounded_once() -> None:
    weight = 2**24 + 1  # float32 cannot hold this number
    with ConditionalAccumulator("float32", (), reduction_type="SUM") as acc:
        acc.apply_grad(3.0, weight=weight)
        assert acc.take(1).value.item() == np.float32(3 * weight)


@pytest.mark.parametrize("name", ["int64", "uint64"])
def test_a_weighted_gradient_that_overflows_adds_nothing(name: str) -> None:
    with ConditionalAccumulator(name, reduction_type="SUM") as acc:
        most = int(np.iinfo(name).max) // 7
        assert acc.apply_grad(most, weight=7)
        for weight in (7, MOST):
            with pytest.raises(errors.OutOfRangeError):
                acc.apply_grad(most, weight=weight)
        partial = acc.take_partial(1)
        assert (int(partial.value), partial.count, partial.weight) == (most * 7, 1, 7)


@pytest.mark.parametrize(("lanes", "sparse"), [(1, True), (3, True), (2, False)])
def test_an_apply_that_would_overflow_all_weights_is_refused(lanes: int, *, sparse: bool) -> None:
    """The overflowing apply is refused in every lane; all other applies are accepted."""
    kind: Any = SparseConditionalAccumulator if sparse else ConditionalAccumulator
    grad: Any = ([3], [1.0]) if sparse else (1.0,)
    with kind("f8", lanes=lanes) as acc:
        first = LAST // MOST - 50
        assert acc.apply_partial(_weighing(first * MOST, sparse=sparse))
        for contributor in range(50):  # the contributor chooses the lane
            assert acc.apply_grad(*grad, contributor=contributor, weight=MOST)
        for lane in range(lanes):
            with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
                acc.apply_grad(*grad, contributor=50 + lane, weight=MOST)
        assert acc.apply_grad(*grad, contributor=0, weight=MOST), "it is in the round"
        assert acc.apply_grad(*grad, contributor=50, weight=MOST - 1)
        assert acc.snapshot().weight == LAST
        taken = acc.take(52, timeout=0)
        assert (taken.count, taken.weight) == (52, LAST)
        if sparse:
            assert taken.row_counts.tolist() == [LAST]
        assert acc.apply_grad(*grad, local_step=1, weight=MOST)
        assert acc.take(1, timeout=0).weight == MOST


def _weighing(weight: int, *, sparse: bool = False) -> Any:
    if not sparse:
        return shmacc.DensePartial(np.array(1.0), 1, 0, weight)
    rows, counts = np.array([3]), np.array([weight])
    return shmacc.SparsePartial(rows, np.ones(1), np.array([-1]), counts, 1, 0, weight)


@pytest.mark.parametrize("named", [False, True], ids=["of nobody", "with contributors"])
def test_a_partial_that_would_overflow_all_counts_is_refused(*, named: bool) -> None:
    with ConditionalAccumulator("f8", lanes=2) as acc:
        assert acc.apply_partial(_weighing((LAST // MOST - 8) * MOST))
        for contributor in range(8):
            assert acc.apply_partial(_of_most(contributor if named else None))
        for contributor in (8, 9):
            with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
                acc.apply_partial(_of_most(contributor if named else None))
        taken = acc.take(2**49, timeout=0)
        assert (taken.count, taken.weight) == (1 + 8 * MOST, LAST // MOST * MOST)


def test_a_lane_with_the_largest_weight_makes_the_other_lane_refuse() -> None:
    """The sum over both lanes is checked, although the gradient's own lane is empty."""
    with ConditionalAccumulator("f8", (), lanes=2) as acc:
        assert acc.apply_partial(_weighing(LAST))
        with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
            acc.apply_grad(1.0, contributor=1)
        with pytest.raises(errors.OutOfRangeError, match="nothing was changed"):
            acc.apply_partial(_weighing(LAST))
        assert acc.take(1, timeout=0).weight == LAST


def _of_most(contributor: int | None) -> shmacc.DensePartial:
    who = None if contributor is None else np.array([contributor])
    return shmacc.DensePartial(np.array(1.0), MOST, 0, MOST, who)  # type: ignore[arg-type]


def _weigh(acc: ConditionalAccumulator, first: int, *, pipe: Pipe) -> list[int]:
    pipe.hear()
    accepted: list[int] = []
    for contributor in range(first, first + 600):
        try:
            accepted.append(acc.apply_grad(1.0, contributor=contributor, weight=MOST))
        except errors.OutOfRangeError:
            accepted.append(0)
    return accepted


def test_processes_that_apply_at_once_do_not_overflow_the_weights() -> None:
    with ConditionalAccumulator("f8", (), lanes=4) as acc:
        assert acc.apply_partial(_weighing((LAST // MOST - 1000) * MOST))
        with Apart(_weigh, acc, 0) as one, Apart(_weigh, acc, 2**20) as other:
            one.say()
            other.say()
            assert sum(one.result()) + sum(other.result()) == 1000
        assert acc.take(1001, timeout=0).weight == LAST // MOST * MOST


@pytest.mark.parametrize(("name", "weight"), [("complex64", 3), ("complex128", 2**30)])
def test_a_weight_multiplies_both_components_of_a_complex_gradient(name: str, weight: int) -> None:
    """Complex multiplication would turn (inf+1j) * 2 into a nan."""
    parts = (0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan)
    numbers = np.array([complex(real, imag) for real in parts for imag in parts], name)
    expected = np.empty_like(numbers)
    expected.real, expected.imag = numbers.real * weight, numbers.imag * weight
    for grad, wanted in ((numbers, expected), (numbers[9], expected[9])):
        with ConditionalAccumulator(name, reduction_type="SUM") as acc:
            assert acc.apply_grad(grad, weight=weight)
            same_bits(acc.take_grad(1), np.asarray(wanted))
