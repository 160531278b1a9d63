"""Where pids mean nothing: held by a process of another pid namespace is held, dead there is dead.

All processes of these tests are process 1 of a namespace of their own, but for the test itself.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.apart import forks, run_apart
from helpers.killing_scenes import NAME, SOON, path
from helpers.stepping_namespaces import (
    elsewhere,
    leave_pids_behind,
    needs_pid_namespaces,
    perform,
    see_own_pids,
    stop,
)
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    LONGER,
    SECOND,
    THIRD,
    StopHalfWay,
    add,
    others,
    take,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import under_the_lock
from helpers.support import until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, inspection
from shmacc import _names as names

if TYPE_CHECKING:
    from helpers.apart import Pipe

pytestmark = [forks, needs_ptrace, needs_pid_namespaces]


def test_held_there_is_held() -> None:
    """For this namespace, and for one in which a process has the owner's very pid."""
    place = StopHalfWay.of(APPLYING)
    with (
        elsewhere(stop, under_the_lock(APPLYING), place.step) as owner,
        elsewhere(perform, add) as namesake,
        others((add,)) as (neighbour,),
    ):
        until(lambda: _attached_and_alive() == 3)
        before = inspection.describe(NAME)
        assert before.lock.held
        time.sleep(LONGER)
        now = inspection.describe(NAME)
        assert now.generation == before.generation
        assert now.lock == before.lock
        owner.signal(signal.SIGCONT)
        assert owner.result() == 0
        namesake.result()
        neighbour.result()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND, THIRD, THIRD))


def test_dead_there_is_dead() -> None:
    place = StopHalfWay.of(APPLYING)
    with (
        elsewhere(stop, under_the_lock(APPLYING), place.step) as owner,
        elsewhere(perform, add) as namesake,
        others((add,)) as (neighbour,),
    ):
        until(lambda: _attached_and_alive() == 3)
        start = time.monotonic()
        owner.signal(signal.SIGKILL)
        assert os.WTERMSIG(owner.result()) == signal.SIGKILL
        assert namesake.result() - start < SOON
        assert neighbour.result() - start < SOON
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, THIRD, THIRD))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_the_head_of_the_line(fate: signal.Signals) -> None:
    """A dead one loses its place to a namesake; a stopped one keeps it."""
    APPLYING.prepare().write(path())
    with elsewhere(perform, take, 2) as first:
        until(lambda: len(inspection.describe(NAME).line) == 1)
        with elsewhere(perform, take, 2) as second:
            until(lambda: len(inspection.describe(NAME).line) == 2)
            first.signal(fate)
            run_apart(add_alone)
            if fate == signal.SIGKILL:
                served = second.result()
            else:
                time.sleep(0.2)
                assert not second.governor.pipe.poll()
                first.signal(signal.SIGCONT)
                served = first.result()
                run_apart(add_alone)
                run_apart(add_alone)
                np.testing.assert_array_equal(taken(second.result()), whole(THIRD, THIRD))
            np.testing.assert_array_equal(taken(served), whole(FIRST, THIRD))
    assert what_is_left().count == 0


def test_a_child_of_its_makers_very_pid_does_not_remove_a_private_one() -> None:
    """It is process 1 of a namespace within the one of which its parent is process 1."""
    with elsewhere(perform, _close_in_a_child) as maker:
        assert maker.result() is True


def _close_in_a_child(pipe: Pipe) -> bool:
    with ConditionalAccumulator("f4", ()) as acc:
        pipe.say()
        leave_pids_behind()
        run_apart(_close_as_process_1, acc)
        return os.path.exists(names.segment_name(acc.shared_name).path)  # noqa: PTH110


def _close_as_process_1(acc: ConditionalAccumulator) -> None:
    see_own_pids()
    acc.close()


def add_alone() -> None:
    """Add the third gradient."""
    acc: Any = shmacc.attach(NAME)
    with acc:
        acc.apply_grad(*THIRD, local_step=NEVER_STALE)


def _attached_and_alive() -> int:
    return sum(process.alive for process in inspection.describe(NAME).processes)
