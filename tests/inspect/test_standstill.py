"""Why a segment stands still, in every verb that shows it; and that healthy ones do not."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import Terminal, ask, start
from helpers.lock_holder import sleeps_in
from helpers.standing_still import (
    NAME,
    apply_and_wait_for_the_step,
    apply_one,
    kill,
    kinds,
    seen,
    seen_in_every_verb,
    stop,
)
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection
from shmacc.inspection import StallKind, _standstill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew


@pytest.fixture(autouse=True)
def segment() -> Iterator[None]:
    """A sparse one, which the test itself does not have attached."""
    SparseConditionalAccumulator(np.float32, [200_000, 16], NAME).close()
    yield
    inspection.remove(NAME, force=True)


def whole_name() -> str:
    """What commands name it by."""
    return inspection.resolve(NAME).system_name


def apply_and_take(name: str, num_required: int) -> None:
    """Apply a gradient, then take."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        acc.apply_grad([1], np.ones((1, 16), np.float32))
        acc.take(num_required)


def apply_and_idle(name: str) -> None:
    """Apply a gradient, and stay attached."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=shmacc.NEVER_STALE)
        signal.pause()


def take_two_rounds(name: str) -> None:
    """Take one gradient, then two."""
    with shmacc.attach(name) as acc:
        acc.take(1)
        acc.take(2)


def hold_a_round(name: str) -> None:
    """Have a round open."""
    with shmacc.attach(name) as acc, acc.round(1):
        signal.pause()


def test_a_stopped_holder_of_the_lock(crew: Crew) -> None:
    with inspect_tool.stopped_with_the_lock(crew, NAME) as pid:
        seen_in_every_verb(StallKind.LOCK_HOLDER_STOPPED, f"kill -CONT {pid}")


def test_a_stopped_holder_of_an_open_round(crew: Crew) -> None:
    crew.start(apply_one, NAME).result()
    holder = start(crew, hold_a_round, NAME)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    assert kinds() == []
    pid = stop(holder)
    seen(StallKind.ROUND_HOLDER_STOPPED, f"kill -CONT {pid}")


def test_a_look_beside_a_commit_proves_nothing(crew: Crew) -> None:
    """The processes that it has seen may not be those of the state that it has."""
    crew.start(apply_one, NAME).result()
    holder = start(crew, hold_a_round, NAME)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    stop(holder)
    with SparseConditionalAccumulator.attach(NAME) as acc:

        class Meanwhile(inspection.Look):
            def condition(self, pid: int) -> str:
                assert not acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=-1)
                return super().condition(pid)

        assert inspection.describe(NAME, Meanwhile()).summary.stalls == ()
        assert inspection.describe(NAME).summary.stalls != ()


def test_a_stopped_taker_whose_number_is_reached(crew: Crew) -> None:
    taker = start(crew, inspect_tool.wait_in_line, NAME, 2)
    until(lambda: sleeps_in(NAME, taker.pid, "waits in the queue"))
    pid = stop(taker)
    worker = start(crew, apply_and_idle, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 1)
    assert kinds() == [], "the number is not reached yet"
    kill(worker)
    crew.start(apply_one, NAME).result()
    seen(StallKind.TAKER_STOPPED, f"kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    taker.result()
    assert kinds() == []


def test_all_who_could_apply_are_stopped(crew: Crew) -> None:
    start(crew, inspect_tool.wait_in_line, NAME, 3)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    workers = [start(crew, apply_and_idle, NAME) for _ in range(2)]
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 2)
    first = stop(workers[0])
    assert kinds() == [], "the other one may apply"
    second = stop(workers[1])
    seen(StallKind.APPLIERS_STOPPED, f"kill -CONT {first} {second}")


def test_a_worker_that_was_stopped_before_the_step_that_it_waits_for(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the take waits for, although it waits itself, as far as can be seen."""
    monkeypatch.setattr(_standstill, "_AFTER_GRADIENTS", 0.0)
    worker = start(crew, apply_and_wait_for_the_step, NAME)
    until(lambda: sleeps_in(NAME, worker.pid, "waits for the step"))
    pid = stop(worker)
    start(crew, take_two_rounds, NAME)
    until(lambda: inspection.describe(NAME).stats.takes == 1)
    crew.start(apply_one_at_the_step, NAME).result()
    until(lambda: kinds() == [StallKind.APPLIERS_STOPPED])
    seen(StallKind.APPLIERS_STOPPED, f"kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    worker.result()


def apply_one_at_the_step(name: str) -> None:
    """Apply a gradient of the accumulator's step, and leave in order."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        assert acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=acc.global_step)


def test_a_quorum_that_those_who_were_killed_were_part_of(crew: Crew) -> None:
    start(crew, inspect_tool.wait_in_line, NAME, 2)
    worker = start(crew, apply_and_idle, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 1)
    assert kinds() == [], "it may apply once more"
    kill(worker)
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    command = f"shmacc-inspect cancel {whole_name()} --yes"
    seen_in_every_verb(StallKind.QUORUM_OUT_OF_REACH, command)


def test_a_quorum_while_the_living_wait_for_its_step(crew: Crew) -> None:
    """The commonest hang: one worker of many is gone, and the others wait for the take."""
    start(crew, inspect_tool.wait_in_line, NAME, 3)
    others = [start(crew, apply_and_wait_for_the_step, NAME) for _ in range(2)]
    third = start(crew, inspect_tool.idle, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 2)
    assert kinds() == [], "the third may apply"
    kill(third)
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    (stall,) = inspection.describe(NAME).summary.stalls
    assert "3 alive (waiting for this take: 2)" in stall.problem
    crew.start(apply_one, NAME).result()
    for child in others:
        child.result()
    assert kinds() == []


def test_a_quorum_beside_a_parent_that_only_keeps_it_open(crew: Crew) -> None:
    """It was there before the worker that was killed; one that came later may be in its place."""
    start(crew, inspect_tool.idle, NAME)
    crew.start(take_two_rounds, NAME)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    crew.start(apply_one, NAME).result()
    until(lambda: inspection.describe(NAME).stats.takes == 1)
    worker = start(crew, apply_and_idle, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 1)
    assert kinds() == []
    kill(worker)
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    start(crew, inspect_tool.idle, NAME)
    assert kinds() == []


def test_a_quorum_of_processes_that_apply_and_then_take(crew: Crew) -> None:
    start(crew, apply_and_take, NAME, 2)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    other = start(crew, inspect_tool.idle, NAME)
    kill(other)
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])


def test_a_job_that_has_just_started_does_not_stand_still(crew: Crew) -> None:
    start(crew, inspect_tool.wait_in_line, NAME, 2)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    assert kinds() == []
    assert ask("check", NAME)["wrong"] == 0


def test_workers_that_come_for_one_gradient_each_are_no_standstill(crew: Crew) -> None:
    """Between them there is nobody who could apply, for a moment."""
    start(crew, inspect_tool.wait_in_line, NAME, 10**9)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    for _ in range(5):
        crew.start(apply_one, NAME).result()
        assert kinds() == []
    assert ask("check", NAME)["wrong"] == 0


def test_it_is_to_be_seen_on_the_live_screen(crew: Crew) -> None:
    ConditionalAccumulator(np.float32, [2], "another").close()
    with inspect_tool.stopped_with_the_lock(crew, NAME), Terminal("watch", columns=140) as screen:
        screen.wait_for("STALL", "lock_holder_stopped")
        screen.press("j")
        screen.wait_for("stands still", "no process can apply or take")
        screen.press("q")
        assert screen.end() == 0
    inspection.remove("another")
