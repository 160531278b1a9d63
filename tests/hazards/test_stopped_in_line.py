"""A waiting taker that is stopped keeps its place; gradients go on coming in after a while."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.killing_scenes import NAME, path
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    THIRD,
    in_line,
    others,
    take,
    take_in_vain,
    taken,
    what_is_left,
    whole,
)
from helpers.support import SOON, slept

import shmacc
from shmacc import NEVER_STALE, errors


def add_often(times: int) -> list[tuple[float, float]]:
    """Add the third gradient so many times; how long each took, and slept."""
    seconds = []
    acc: Any = shmacc.attach(NAME)
    with acc:
        for _ in range(times):
            began, start = time.monotonic(), slept()
            assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)
            seconds.append((time.monotonic() - began, slept() - start))
    return seconds


def test_it_keeps_its_place() -> None:
    APPLYING.prepare().write(path())
    with in_line((take, 3), (take, 1)) as (first, second):
        first.signal(signal.SIGSTOP)
        # With the first one's number reached, it would take at once; so it is waited for, but
        # only for a while, and only once.
        seconds = run_apart(add_often, 5)
        assert max(sleeping for _, sleeping in (*seconds[:2], *seconds[3:])) < 0.9
        assert seconds[2][0] > 0.9
        assert seconds[2][1] < 1.9
        # Nobody else gets what is the stopped one's.
        with others((take_in_vain, 1, 0.1)) as (hasty,):
            hasty.result()
        assert not second.pipe.poll()
        first.signal(signal.SIGCONT)
        got = first.result()
        assert got.count == 6
        np.testing.assert_array_equal(taken(got), whole(FIRST, *[THIRD] * 5))
        run_apart(add_often, 1)
        np.testing.assert_array_equal(taken(second.result()), whole(THIRD))
    assert what_is_left().count == 0


def test_its_death_is_noticed() -> None:
    APPLYING.prepare().write(path())
    with in_line((take, 2), (take, 1)) as (first, second):
        first.signal(signal.SIGSTOP)
        run_apart(add_often, 1)
        first.kill()
        assert second.result().count == 2
    assert what_is_left().count == 0


def test_a_stopped_one_that_was_cancelled_holds_nobody_up() -> None:
    """Nor those who have seen it at the head before."""
    APPLYING.prepare().write(path())
    acc: Any = shmacc.attach(NAME)
    with acc, in_line((take, 3)) as (first,):
        first.signal(signal.SIGSTOP)
        assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)
        acc.cancel()
        start = slept()
        assert acc.take(2, timeout=0).count == 2
        assert slept() - start < SOON
        first.signal(signal.SIGCONT)
        with pytest.raises(errors.CancelledError):
            first.result()
    assert what_is_left().count == 0
