"""A process that is stopped while it owns the lock owns it until it goes on, or dies."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
    add,
    in_line,
    middle,
    others,
    stopped_half_way,
    take,
    take_in_vain,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import stopped
from helpers.support import SOON, slept, until

import shmacc
from shmacc import errors, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_ptrace


@pytest.mark.parametrize("scene", [APPLYING, TAKING], ids=str)
def test_nobody_enters(scene: Scene) -> None:
    with stopped_half_way(scene) as owner:
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
            assert inspection.describe(NAME).stats.recoveries == 0
    left = what_is_left()
    # The owner has what it takes.
    expected, count = (whole(FIRST, SECOND, THIRD), 3) if scene is APPLYING else (whole(THIRD), 1)
    assert first.count + left.count == count
    np.testing.assert_array_equal(taken(first, left), expected)


def test_dead_after_all() -> None:
    with stopped_half_way(APPLYING) as owner, others((add,)) as (adder,):
        time.sleep(0.2)
        assert not adder.pipe.poll()
        owner.kill()
        adder.result()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, THIRD))


@contextmanager
def goes_on() -> Iterator[None]:
    """The owner goes on after the block, and all is as if it had never been stopped."""
    with stopped_half_way(APPLYING) as owner:
        yield
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))


def test_those_in_line_can_leave() -> None:
    """By their timeout, and by cancel; neither needs the lock that the stopped process has."""
    step = middle(APPLYING)
    with (
        in_line((take_in_vain, 5, 0.5), (take, 5)) as (hasty, patient),
        stopped(APPLYING.act, step) as owner,
    ):
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
    with goes_on(), others((take, 1)) as (taker,):
        until(lambda: "waits for the lock" in activities())
        inspection.cancel(NAME)
        with pytest.raises(errors.CancelledError):
            taker.result()


def activities() -> list[str]:
    """What the attached processes do."""
    return [process.activity for process in inspection.describe(NAME).processes]


def test_one_can_look_and_attach_and_leave() -> None:
    with goes_on():
        start = slept()
        with shmacc.attach(NAME) as acc:
            assert acc.num_accumulated() == 1
            assert acc.global_step == 0
            assert acc.stats().attached == 2
        assert slept() - start < SOON
