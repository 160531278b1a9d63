"""A process that is stopped while it owns the lock owns it until it goes on, or dies."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers.killing_scenes import NAME, Scene
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    LONGER,
    SECOND,
    TAKING,
    THIRD,
    StopHalfWay,
    add,
    in_line,
    others,
    take,
    take_in_vain,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace
from helpers.support import SOON, slept, until

import shmacc
from shmacc import errors, inspection

pytestmark = needs_ptrace


@pytest.mark.parametrize("scene", [APPLYING, TAKING], ids=str)
def test_nobody_enters(scene: Scene) -> None:
    place = StopHalfWay.of(scene)
    with place.stopped() as owner:
        start = time.monotonic()
        before = inspection.describe(NAME)
        assert before.lock.pid == owner.pid
        with others((add,), (take, 1), (take_in_vain, 1, 0.3), (take_in_vain, 1, 0)) as crew:
            adder, taker, hasty, trier = crew
            trier.result()
            hasty.result()
            time.sleep(start + LONGER - time.monotonic())
            now = inspection.describe(NAME)
            assert now.generation == before.generation
            assert now.lock == before.lock
            assert not adder.pipe.poll()
            assert not taker.pipe.poll()
            owner.resume()
            adder.result()
            first = taker.result()
    left = what_is_left()
    if scene is APPLYING:
        assert first.count + left.count == 3
        expected = whole(FIRST, SECOND, THIRD)
    else:
        # The owner had the first.
        assert first.count + left.count == 1
        expected = whole(THIRD)
    np.testing.assert_array_equal(taken(first, left), expected)


def test_dead_after_all() -> None:
    place = StopHalfWay.of(APPLYING)
    with place.stopped() as owner, others((add,)) as (adder,):
        time.sleep(0.2)
        assert not adder.pipe.poll()
        owner.kill()
        adder.result()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, THIRD))


def test_those_in_line_can_leave() -> None:
    """By their timeout, and by cancel; neither needs the lock that the stopped process has."""
    place = StopHalfWay.of(APPLYING)
    with in_line((take_in_vain, 5, 0.5), (take, 5)) as (hasty, patient), place.stopped() as owner:
        generation = inspection.describe(NAME).generation
        hasty.result()
        inspection.cancel(NAME)
        with pytest.raises(errors.CancelledError):
            patient.result()
        assert inspection.describe(NAME).line == ()
        assert inspection.describe(NAME).generation == generation
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))


def test_those_who_wait_for_the_lock_can_be_cancelled() -> None:
    """Though they do not wait in the queue yet."""
    place = StopHalfWay.of(APPLYING)
    with place.stopped() as owner, others((take, 1)) as (taker,):
        until(lambda: _waiting_for_the_lock() == 1)
        inspection.cancel(NAME)
        with pytest.raises(errors.CancelledError):
            taker.result()
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))


def _waiting_for_the_lock() -> int:
    return sum(
        process.activity == "waits for the lock" for process in inspection.describe(NAME).processes
    )


def test_one_can_look_and_attach_and_leave() -> None:
    place = StopHalfWay.of(APPLYING)
    with place.stopped() as owner:
        start = slept()
        with shmacc.attach(NAME) as acc:
            assert acc.num_accumulated() == 1
            assert acc.global_step == 0
            assert acc.stats().attached == 2
        assert slept() - start < SOON
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))
