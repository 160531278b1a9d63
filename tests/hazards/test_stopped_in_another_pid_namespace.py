"""Whether a lock's owner in another pid namespace is alive is known without its pid.

Each process of these tests is process 1 of its own namespace; only the test itself is outside.
What `shmacc-inspect` shows of such processes is in tests/inspection/test_elsewhere.py.
"""

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers import stepping_namespaces
from helpers.apart import Pipe, run_apart
from helpers.inspect_tool import ask, scribble
from helpers.killing_scenes import NAME, path
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    LONGER,
    SECOND,
    THIRD,
    add,
    middle,
    others,
    take,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace
from helpers.support import until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, inspection
from shmacc._base import names

MINUTE: Final = 60.0  # even a machine that just started has been up for this long

pytestmark = [needs_ptrace, stepping_namespaces.needs_pid_namespaces]


@pytest.mark.parametrize("fate", [signal.SIGCONT, signal.SIGKILL])
def test_a_lock_in_another_namespace_is_held_until_its_owner_dies(fate: signal.Signals) -> None:
    """Processes wait in this namespace, and in one where the owner's pid names another process."""
    step = middle(APPLYING)
    with (
        stepping_namespaces.elsewhere(stepping_namespaces.stop, APPLYING.act, step) as owner,
        stepping_namespaces.elsewhere(stepping_namespaces.perform, add) as namesake,
        others((add,)) as (neighbour,),
    ):
        until(lambda: _attached_and_alive() == 3)
        before = inspection.describe(NAME)
        assert before.lock.held
        time.sleep(LONGER)
        now = inspection.describe(NAME)
        assert now.generation == before.generation
        assert now.lock == before.lock
        owner.signal(fate)
        assert owner.result() == (0 if fate == signal.SIGCONT else signal.SIGKILL)
        namesake.result()
        neighbour.result()
    all_of_it = (FIRST, SECOND) if fate == signal.SIGCONT else (FIRST,)
    np.testing.assert_array_equal(taken(what_is_left()), whole(*all_of_it, THIRD, THIRD))


def test_a_pid_is_the_one_in_this_namespace_or_is_marked_as_foreign() -> None:
    """The kernel gives the pid in the reader's namespace; a sibling namespace has no such pid."""
    step = middle(APPLYING)
    with stepping_namespaces.elsewhere(stepping_namespaces.stop, APPLYING.act, step) as owner:
        until(lambda: inspection.describe(NAME).lock.condition == "stopped")
        _backdate_the_operation()
        lock = inspection.describe(NAME).lock
        assert (lock.pid, lock.pid_is_here, lock.pid_label) == (owner.pid, True, str(owner.pid))
        assert time.time() - (lock.since or time.time()) > MINUTE
        (process,) = inspection.describe(NAME).processes
        assert (process.pid, process.condition) == (owner.pid, "stopped")
        (stall,) = inspection.describe(NAME).summary.stalls
        assert (stall.kind, stall.command) == ("lock_holder_stopped", f"kill -CONT {owner.pid}")
        with stepping_namespaces.elsewhere(
            stepping_namespaces.perform, _look_at_the_lock_from_beside
        ) as beside:
            beside.result()
    inspection.remove(NAME, force=True)


def _backdate_the_operation() -> None:
    """Pretend that the only process began its operation when the machine was started."""
    (process,) = inspection.describe(NAME).processes
    place = layout.region("participants") + process.entry * 128
    scribble(Path(path()), place + layout.Participant.seen_ns.offset, struct.pack("<q", 1))


def _look_at_the_lock_from_beside(pipe: Pipe) -> None:
    pipe.say()
    lock = inspection.describe(NAME).lock
    assert lock.held
    assert (lock.pid, lock.pid_is_here, lock.pid_label, lock.condition) == (1, False, "1*", "")
    (stall,) = inspection.describe(NAME).summary.stalls
    assert (stall.kind, stall.command) == ("lock_held_long", None)
    assert "pid 1* has been in an operation with the lock" in stall.problem
    assert [f["kind"] for f in ask("check", NAME, status=1)["findings"]] == ["lock_held_long"]
    samples = [sample for metric in ask("metrics")["metrics"] for sample in metric["samples"]]
    (held,) = [each for each in samples if each["name"] == "shmacc_lock_held_seconds"]
    assert held["value"] > MINUTE


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_take_in_another_namespace_keeps_its_place_until_it_dies(fate: signal.Signals) -> None:
    """A dead take loses its entry though a living process has its pid; a stopped one keeps its."""
    APPLYING.prepare().write(path())
    with stepping_namespaces.elsewhere(stepping_namespaces.perform, take, 2) as first:
        until(lambda: len(inspection.describe(NAME).queue) == 1)
        with stepping_namespaces.elsewhere(stepping_namespaces.perform, take, 2) as second:
            until(lambda: len(inspection.describe(NAME).queue) == 2)
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


def test_a_child_with_its_makers_pid_does_not_remove_a_private_segment() -> None:
    """Child and maker are each process 1 of their own namespace."""
    with stepping_namespaces.elsewhere(stepping_namespaces.perform, _close_in_a_child) as maker:
        assert maker.result() is True


def _close_in_a_child(pipe: Pipe) -> bool:
    with ConditionalAccumulator("f4", ()) as acc:
        pipe.say()
        stepping_namespaces.leave_pids_behind()
        run_apart(_close_as_process_1, acc)
        return os.path.exists(names.segment_name(acc.shared_name).path)  # noqa: PTH110


def _close_as_process_1(acc: ConditionalAccumulator) -> None:
    stepping_namespaces.see_own_pids()
    acc.close()


def add_alone() -> None:
    acc: Any = shmacc.attach(NAME)
    with acc:
        acc.apply_grad(*THIRD, local_step=NEVER_STALE)


def _attached_and_alive() -> int:
    return sum(process.alive for process in inspection.describe(NAME).processes)
