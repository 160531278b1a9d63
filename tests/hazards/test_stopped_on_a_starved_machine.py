"""With more busy processes than cores, a process that gets no processor is not taken for dead."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.apart import Apart
from helpers.killing_scenes import NAME
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    LONGER,
    SECOND,
    THIRD,
    StopHalfWay,
    others,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace

import shmacc
from shmacc import NEVER_STALE, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

EACH = 50


def spin(pipe: Pipe) -> None:
    """Be busy until killed."""
    pipe.say()
    while True:
        pass


@pytest.fixture
def starved() -> Iterator[None]:
    """Keep all cores busy with three processes each."""
    with ExitStack() as stack:
        spinners = [
            stack.enter_context(Apart(spin)) for _ in range(3 * len(os.sched_getaffinity(0)))
        ]
        for spinner in spinners:
            spinner.hear()
        yield


def add_often(pipe: Pipe) -> None:
    """Add the third gradient many times."""
    acc: Any = shmacc.attach(NAME)
    with acc:
        pipe.say()
        for _ in range(EACH):
            assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)


@pytest.mark.usefixtures("starved")
@needs_ptrace
def test_nobody_enters() -> None:
    place = StopHalfWay.of(APPLYING)
    with place.stopped() as owner, others((add_often,), (add_often,), (add_often,)) as adders:
        before = inspection.describe(NAME)
        time.sleep(LONGER)
        assert inspection.describe(NAME).generation == before.generation
        owner.resume()
        for adder in adders:
            adder.result()
        stats = inspection.describe(NAME).stats
    assert stats.applied == 2 + 3 * EACH
    # Nobody died, so nothing was ever to be undone.
    assert stats.recoveries == 0
    left = what_is_left()
    assert left.count == 2 + 3 * EACH
    np.testing.assert_array_equal(taken(left), whole(FIRST, SECOND, *[THIRD] * (3 * EACH)))
