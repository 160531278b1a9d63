"""Applies to a full accumulator wait until a take makes room; other calls do not wait."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activity
from helpers.support import LONG, until

import shmacc
from shmacc import NEVER_STALE, AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors

pytestmark = pytest.mark.threads

NAME: Final = "bounded"


def make(capacity: int | None, lanes: int = 1) -> ConditionalAccumulator:
    return ConditionalAccumulator(
        "f8", (), NAME, reduction_type="SUM", capacity=capacity, lanes=lanes, unlink_on_close=True
    )


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """An accumulator that two gradients fill; contributor 1 applied the first."""
    with make(2) as made:
        made.apply_grad(1.0, contributor=1)
        made.apply_grad(2.0)
        yield made


def apply(value: float, step: int = NEVER_STALE, who: int | None = None, *, pipe: Pipe) -> bool:
    with ConditionalAccumulator.attach(NAME) as own:
        pipe.say()
        return own.apply_grad(value, step, contributor=who)


def wait_for_room(process: Apart) -> None:
    """Return when the process's apply waits for room."""
    process.hear()
    until(lambda: activity(NAME, process.pid) == "waits for room")


def test_an_apply_waits_for_a_take(acc: ConditionalAccumulator) -> None:
    with Apart(apply, 4.0) as one, Apart(apply, 8.0) as other:
        wait_for_room(one)
        wait_for_room(other)
        assert acc.num_accumulated() == 2
        assert acc.take(2, timeout=0).value == 3.0
        assert one.result(LONG)
        assert other.result(LONG)
    assert acc.take(2, timeout=0).value == 12.0


def _produce(number: int) -> bool:
    with ConditionalAccumulator.attach(NAME) as own:
        return all(own.apply_grad(float(i), NEVER_STALE) for i in range(number))


@pytest.mark.parametrize("make_room", ["take_partial", "advance_step", "round"])
def test_each_call_that_takes_makes_room(acc: ConditionalAccumulator, make_room: str) -> None:
    with Apart(apply, 4.0) as waiting:
        wait_for_room(waiting)
        if make_room == "round":
            with acc.round(2):
                pass
        else:
            getattr(acc, make_room)(2)
        assert waiting.result(LONG)
    assert acc.snapshot().value == 4.0


@pytest.mark.parametrize("judged_by", ["take", "seal", "set_global_step"])
def test_a_gradient_that_waits_for_room_is_checked_when_it_gets_in(
    acc: ConditionalAccumulator, judged_by: str
) -> None:
    with Apart(apply, 4.0, 0) as waiting:
        wait_for_room(waiting)
        if judged_by == "seal":
            acc.take_partial(2, seal=True)
        else:
            getattr(acc, judged_by)(2)  # set_global_step makes no room: the gradient turns stale
        assert waiting.result(LONG) is False
    assert acc.stats().dropped == 1


def test_an_apply_that_times_out_waiting_for_room_adds_nothing(acc: ConditionalAccumulator) -> None:
    for timeout in (0, 0.02):
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.apply_grad(4.0, timeout=timeout)
        error = caught.value
        assert (error.accumulated, error.step, error.required) == (2, 0, None)
    stats = acc.stats()
    assert (stats.applied, stats.dropped, stats.num_accumulated) == (2, 0, 2)
    assert acc.take(2, timeout=0).value == 3.0
    assert acc.apply_grad(4.0, 1, timeout=0)


def test_applies_that_need_no_room_return_at_once(acc: ConditionalAccumulator) -> None:
    assert acc.apply_grad(9.0, contributor=1)  # contributor 1's gradient is already in
    assert not acc.apply_grad(9.0, -1)
    assert acc.num_accumulated() == 2
    with acc.round(2):
        assert not acc.apply_grad(9.0, 0)
    acc.apply_grad(1.0, 1)
    acc.apply_grad(1.0, 1)
    acc.take_partial(2, seal=True)
    assert not acc.apply_grad(9.0, 1)


def test_a_repeated_gradient_that_waits_for_room_returns_true(acc: ConditionalAccumulator) -> None:
    """Both applies of contributor 5 return true, but only one adds its gradient."""
    with Apart(apply, 4.0, NEVER_STALE, 5) as one, Apart(apply, 4.0, NEVER_STALE, 5) as twin:
        wait_for_room(one)
        wait_for_room(twin)
        acc.take(2)
        assert one.result(LONG)
        assert twin.result(LONG)
    assert acc.contributors().tolist() == [5]
    assert acc.num_accumulated() == 1


def test_a_close_ends_an_applys_wait_for_room(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        own = ConditionalAccumulator.attach(NAME)
        waiting = pool.submit(own.apply_grad, 4.0, NEVER_STALE)
        until(lambda: activity(NAME, os.getpid()) == "waits for room")
        own.close()
        with pytest.raises(errors.CancelledError):
            waiting.result(LONG)
    assert acc.num_accumulated() == 2


def test_a_take_of_more_gradients_than_the_capacity_is_refused(acc: ConditionalAccumulator) -> None:
    for take in (acc.take, acc.take_partial, acc.take_grad):
        with pytest.raises(errors.InvalidArgumentError, match="capacity"):
            take(3, timeout=0)
    with pytest.raises(errors.InvalidArgumentError, match="capacity"), acc.round(3, timeout=0):
        raise AssertionError
    assert acc.take(2, timeout=0).count == 2


def test_a_partial_needs_as_much_capacity_as_its_gradients() -> None:
    five, two = (shmacc.DensePartial(np.array(1.0), count, 0) for count in (5, 2))
    with make(4) as acc:
        assert acc.apply_partial(five)  # an empty accumulator accepts a partial of any size
        with pytest.raises(errors.DeadlineExceededError):
            acc.apply_partial(two, timeout=0)
        assert acc.take(1).count == 5
        assert acc.apply_partial(two, 1)
        assert acc.apply_grad(1.0, 1)
        with pytest.raises(errors.DeadlineExceededError):
            acc.apply_partial(two, 1, timeout=0)
        assert acc.apply_grad(1.0, 1, weight=9)  # a gradient counts as one, whatever its weight
        assert acc.take(4).count == 4


def test_a_group_has_one_capacity_for_all_members() -> None:
    with AccumulatorGroup({"a": TensorSpec(()), "b": TensorSpec(())}, capacity=2) as group:
        assert group.apply({"a": 1}, 0)
        assert group.apply({"b": 1}, 0)
        with pytest.raises(errors.DeadlineExceededError):
            group.apply({}, 0, timeout=0)
        assert len(group.take(2)) == 2


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_exceed_the_capacity_by_less_than_their_number(lanes: int) -> None:
    each, number = 60, lanes + 1
    with make(3, lanes) as acc, ExitStack() as stack:
        workers = [stack.enter_context(Apart(_produce, each)) for _ in range(number)]
        total = count = 0
        while count < each * number:
            taken = acc.take(1, timeout=LONG)
            assert taken.count <= 3 + lanes - 1
            count += taken.count
            total += taken.value.item()
        assert total == number * sum(range(each))
        assert all(worker.result() for worker in workers)
