"""Any integer is a step, integer sums are checked for overflow, and float16 rounds like NumPy."""

import logging
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import nothing_changes

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

INT64: Final = 2**63


def test_steps_may_be_of_any_integer_type() -> None:
    with ConditionalAccumulator(np.float32) as acc:
        goods: list[Any] = [1, np.int8(1), np.uint64(1), np.int64(1), np.array(1), INT64 - 1]
        for good in goods:
            acc.set_global_step(good)
            assert acc.global_step == int(good)
            assert type(acc.global_step) is int
            assert acc.apply_grad(1.0, local_step=good)


# --- steps ----------------------------------------------------------------------------------------


def test_a_lower_step_is_set_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with ConditionalAccumulator(np.float32) as acc, caplog.at_level(logging.WARNING, "shmacc"):
        acc.apply_grad(1.0)
        for step in (9, 9):
            acc.set_global_step(step)
        assert not caplog.records
        for step in (3, -4):
            acc.set_global_step(step)
            assert acc.global_step == step
        assert [(r.name, r.levelname) for r in caplog.records] == [("shmacc", "WARNING")] * 2
        assert "9" in caplog.records[0].getMessage()
        assert "3" in caplog.records[0].getMessage()
        # Accumulated gradients stay and count, whatever the new step is.
        assert acc.num_accumulated() == 1
        assert acc.apply_grad(3.0, local_step=-4)
        assert acc.apply_grad(3.0, local_step=-5) is False
        assert acc.stats().dropped == 1
        taken = acc.take(2)
        assert (taken.value.item(), taken.count, taken.step) == (2.0, 2, -4)
        assert acc.global_step == -3


# --- integers that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "last"),
    [("int8", 127), ("int8", -128), ("uint8", 255), ("int16", -(2**15)), ("uint32", 2**32 - 1)],
)
def test_a_result_that_overflows_stays_in_the_accumulator(dtype: str, last: int) -> None:
    with ConditionalAccumulator(dtype, reduction_type="SUM") as acc:
        for _ in range(2):
            acc.apply_grad(np.full(3, last, dtype))
        for _ in range(2):
            for take in acc.snapshot, lambda: acc.take_grad(2):
                with pytest.raises(OverflowError):
                    take()
            assert (acc.num_accumulated(), acc.global_step) == (2, 0)
        partial = acc.take_partial(2)
        assert partial.value.tolist() == [2 * last] * 3
        assert partial.value.dtype == (np.int64 if dtype.startswith("i") else np.uint64)


def test_lanes_whose_sums_overflow_together_raise() -> None:
    with ConditionalAccumulator("int64", lanes=2, reduction_type="SUM") as acc:
        for contributor in (0, 1):
            acc.apply_grad([2**62], contributor=contributor)
        for refused in acc.take_partial, acc.take:
            with pytest.raises(errors.OutOfRangeError, match="the round stays") as told:
                refused(2)
            assert ("sums of the lanes" in str(told.value)) == (refused == acc.take_partial)
        assert acc.advance_step(1) == 2


@pytest.mark.parametrize(
    ("dtype", "edge", "over"),
    [("int64", 2**63 - 1, 1), ("int64", -(2**63), -1), ("uint64", 2**64 - 1, 1)],
)
def test_a_sum_that_would_wrap_is_refused_at_the_apply(dtype: str, edge: int, over: int) -> None:
    with ConditionalAccumulator(dtype) as acc, SparseConditionalAccumulator(dtype) as rows:
        acc.apply_grad([0, edge])
        rows.apply_grad([1, 2], [[0, 0], [0, edge]])
        with nothing_changes(acc), pytest.raises(errors.OutOfRangeError):
            acc.apply_grad([abs(over), over])
        with nothing_changes(rows), pytest.raises(errors.OutOfRangeError):
            # Row 1 comes first and fits; it must not be added either.
            rows.apply_grad([1, 2], [[abs(over)] * 2, [0, over]])
        with nothing_changes(rows), pytest.raises(errors.OutOfRangeError):
            rows.apply_grad([7, 7], [[edge, 0], [over, 0]])
        assert acc.take_grad(1).tolist() == [0, edge]
        assert rows.take_grad(1).values.tolist() == [[0, 0], [0, edge]]


# float16 is converted to float32 and back exactly as by NumPy, with any CPU instructions.


HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


NUMBERS = HALVES[~np.isnan(HALVES)]


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16 if values.dtype == np.float16 else np.uint32)


@pytest.mark.parametrize("size", [1, 7, 8, 9, NUMBERS.size])
def test_every_float16_passes_unchanged(size: int) -> None:
    values = NUMBERS[-size:]
    with ConditionalAccumulator("float16", (size,)) as acc:
        acc.apply_grad(values)
        partial = acc.take_partial(1)
        assert np.array_equal(bits(partial.value), bits(values.astype(np.float32)))
        acc.apply_partial(partial)
        assert np.array_equal(bits(acc.take_grad(1)), bits(values))


def test_results_are_rounded_as_numpy_rounds() -> None:
    """Results lie between neighbouring float16: at a third, the middle and two thirds."""
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
