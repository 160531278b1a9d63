"""Everybody waits for a take, and nobody takes: dead, never there, or stopped. It is named."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask, idle, run, start, stopped_with_the_lock, wait_in_line
from helpers.standing_still import (
    NAME,
    apply_one,
    kill,
    kinds,
    problem,
    seen,
    seen_in_every_verb,
    stop,
)
from helpers.support import LONG, until

import shmacc
from shmacc import SparseConditionalAccumulator, errors, inspection
from shmacc.inspection import StallKind, _nobody_takes, _standstill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew

CAPACITY: Final = 2
patience = pytest.mark.usefixtures("patience_of_a_test")


@pytest.fixture(autouse=True)
def segment() -> Iterator[None]:
    """One with room for a few gradients, which the test itself does not have attached."""
    SparseConditionalAccumulator(np.float32, [1000, 16], NAME, capacity=CAPACITY).close()
    yield
    inspection.remove(NAME, force=True)


@pytest.fixture
def patience_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what has lasted at all had lasted for seconds."""
    monkeypatch.setattr(_nobody_takes, "_AFTER_TAKES", 0.0)
    monkeypatch.setattr(_nobody_takes, "AT_THE_START", 0.0)


def take_and_idle(name: str) -> None:
    """Take one gradient, and stay attached."""
    with shmacc.attach(name) as acc:
        acc.take(1)
        signal.pause()


def take_and_leave(name: str) -> None:
    """Take one gradient, and leave in order."""
    with shmacc.attach(name) as acc:
        acc.take(1)


def apply_until_there_is_no_room(name: str) -> None:
    """Be a worker of an asynchronous job."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        while True:
            acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=shmacc.NEVER_STALE)


def apply_a_partial(name: str) -> None:
    """Apply two gradients as one."""
    with SparseConditionalAccumulator(np.float32, [1000, 16]) as own:
        for _ in range(2):
            own.apply_grad([1], np.ones((1, 16), np.float32))
        partial = own.take_partial(2)
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        acc.apply_partial(partial, local_step=shmacc.NEVER_STALE)


def apply_and_wait_for_the_next_step(name: str) -> None:
    """Be a worker for a round."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        step = acc.global_step
        acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=step)
        acc.wait_step(step)


def wait_for_steps_in_pieces(name: str) -> None:
    """Wait for the step for a moment, again and again."""
    with shmacc.attach(name) as acc:
        while True:
            with contextlib.suppress(errors.DeadlineExceededError):
                acc.wait_step(10**6, timeout=0.2)


def wait_for_the_step(name: str) -> None:
    """Wait for a step that never comes."""
    with shmacc.attach(name) as acc:
        acc.wait_step(10**6)


def doing(activity: str) -> int:
    """How many living processes do that."""
    processes = inspection.describe(NAME).processes
    return sum(each.alive and each.activity == activity for each in processes)


def chief_that_has_taken(crew: Crew) -> Any:
    """A process that has taken once, and computes."""
    chief = start(crew, take_and_idle, NAME)
    crew.start(apply_one, NAME).result()
    until(lambda: any(each.taken for each in inspection.describe(NAME).processes))
    until(lambda: doing("idle") == 1)
    return chief


def named() -> None:
    """Wait until it is named."""
    until(lambda: kinds() == [StallKind.NOBODY_TAKES])


def test_it_is_named_within_ten_seconds() -> None:
    longest = _nobody_takes.AT_THE_START, _nobody_takes._AFTER_TAKES, _standstill._AFTER_GRADIENTS
    assert max(longest) < 10


def test_workers_that_wait_for_the_step_of_a_chief_that_was_killed(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    for _ in range(3):
        start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 3)
    assert kinds() == [], "the chief may take"
    pid = kill(chief)
    named()
    assert problem() == (
        f"3 processes wait for the step, and nobody takes: pid {pid}, which did, is dead"
    )
    seen_in_every_verb(StallKind.NOBODY_TAKES, None)
    (finding,) = [f for f in ask("check", NAME, status=1)["findings"] if f["severity"] == "wrong"]
    assert finding["remedy"].startswith("start the process that takes")


def test_the_verdict_after_a_death_is_not_final(crew: Crew) -> None:
    start(crew, idle, NAME)
    assert "look again" not in run("show", NAME).stdout
    kill(chief_that_has_taken_beside(crew, 1))
    fine = "nothing is known that makes it stand still; 1 process died: look again in 10 s"
    assert fine in " ".join(run("show", NAME).stdout.split())


@patience
def test_the_remedy_ends_it(crew: Crew) -> None:
    """A chief that is started in place of the dead one."""
    kill(chief_that_has_taken(crew))
    worker = start(crew, apply_and_wait_for_the_next_step, NAME)
    named()
    crew.start(take_and_leave, NAME).result()
    worker.result()
    assert kinds() == []


@patience
def test_a_dead_chief_beside_a_parent_that_only_keeps_it_open(crew: Crew) -> None:
    start(crew, idle, NAME)
    chief = chief_that_has_taken_beside(crew, 1)
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    assert kinds() == []
    kill(chief)
    named()


def chief_that_has_taken_beside(crew: Crew, idlers: int) -> Any:
    """The same beside processes that do nothing."""
    chief = start(crew, take_and_idle, NAME)
    crew.start(apply_one, NAME).result()
    until(lambda: any(each.taken for each in inspection.describe(NAME).processes))
    until(lambda: doing("idle") == 1 + idlers)
    return chief


def test_a_chief_that_is_started_again_has_time_to_load(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(chief_that_has_taken(crew))
    start(crew, wait_for_the_step, NAME)
    monkeypatch.setattr(_nobody_takes, "_AFTER_TAKES", 0.0)
    named()
    monkeypatch.setattr(_nobody_takes, "_AFTER_TAKES", LONG)
    start(crew, idle, NAME)
    assert kinds() == []


def test_workers_of_a_chief_that_never_came(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    (pid,) = [each.pid for each in inspection.describe(NAME).processes]
    monkeypatch.setattr(_nobody_takes, "AT_THE_START", LONG)
    assert kinds() == [], "it may be importing"
    monkeypatch.setattr(_nobody_takes, "AT_THE_START", 0.0)
    assert kinds() == [StallKind.NOBODY_TAKES]
    assert problem() == (
        f"pid {pid} waits for the step, and nobody takes: no take has been served yet"
    )


@patience
def test_workers_of_a_chief_that_was_killed_before_its_first_take(crew: Crew) -> None:
    start(crew, idle, NAME)
    chief = start(crew, wait_in_line, NAME, 2)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    pid = kill(chief)
    named()
    assert f"nobody takes: pid {pid}, which did, is dead" in problem()


@patience
def test_workers_without_room_of_a_chief_that_was_killed(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    for _ in range(2):
        start(crew, apply_until_there_is_no_room, NAME)
    until(lambda: doing("waits for room") == 2)
    kill(chief)
    named()
    assert problem().startswith("2 processes wait for room, and nobody takes: ")
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    named()
    assert problem().startswith("3 processes wait (2 for room, 1 for the step), and nobody takes: ")


@patience
def test_a_chief_that_left_in_order(crew: Crew) -> None:
    chief = crew.start(take_and_leave, NAME)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    crew.start(apply_one, NAME).result()
    chief.result()
    start(crew, wait_for_the_step, NAME)
    named()
    assert problem().endswith("nobody takes: the processes that took have left")


def test_a_stopped_chief(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    pid = stop(chief)
    assert kinds() == [StallKind.NOBODY_TAKES]
    assert problem().endswith(f"and nobody takes: pid {pid}, which could, is stopped")
    seen(StallKind.NOBODY_TAKES, f"kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    until(lambda: kinds() == [])


def test_a_job_that_is_stopped_altogether_goes_on_altogether(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    worker = start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    pids = sorted([stop(chief), stop(worker)])
    (stall,) = inspection.describe(NAME).summary.stalls
    assert stall.command is not None
    assert sorted(map(int, stall.command.split()[2:])) == pids


@patience
def test_a_wait_in_pieces_is_a_wait(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    start(crew, wait_for_steps_in_pieces, NAME)
    until(lambda: doing("waits for the step") == 1)
    kill(chief)
    named()


@patience
def test_a_chief_that_computes_takes(crew: Crew) -> None:
    """Nobody waits to take, but the one that took is alive, and not stopped."""
    chief_that_has_taken(crew)
    start(crew, wait_for_the_step, NAME)
    until(lambda: doing("waits for the step") == 1)
    assert kinds() == []
    assert "nothing wrong" in run("check", NAME).stderr


def test_a_take_whose_gradients_have_no_room(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who apply wait for room, which only this take would make."""
    monkeypatch.setattr(_standstill, "_AFTER_GRADIENTS", 0.0)
    crew.start(apply_one, NAME).result()
    start(crew, wait_in_line, NAME, CAPACITY)
    start(crew, apply_a_partial, NAME)
    until(lambda: doing("waits for room") == 1)
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    assert "2 alive (waiting for this take: 1)" in problem()


def test_what_waits_for_room_does_so_while_it_looks_for_it(crew: Crew) -> None:
    """It looks twenty times a second, under the lock; no verdict hangs on the moment of a look."""
    start(crew, apply_until_there_is_no_room, NAME)
    until(lambda: doing("waits for room") == 1)
    with stopped_with_the_lock(crew, NAME, changes=False):
        for _ in range(5):
            time.sleep(0.05)
            assert doing("waits for room") == 1


def apply_without_memory(name: str) -> None:
    """Wait for memory of /dev/shm, all of which is kept for others."""
    with SparseConditionalAccumulator.attach(name) as acc:
        acc.apply_grad(range(1000), np.ones((1000, 1024), np.float32))


def test_a_take_whose_gradients_have_no_memory(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """No capacity is in their way, and more processes would be of no use."""
    monkeypatch.setattr(_standstill, "_AFTER_GRADIENTS", 0.0)
    name = f"{NAME}-unbounded"
    with SparseConditionalAccumulator(np.float32, [1000, 1024], name) as acc:
        acc.apply_grad([0], np.ones((1, 1024), np.float32))
        acc._handle.keep_free(1 << 60)
    try:
        start(crew, wait_in_line, name, 2)
        start(crew, apply_without_memory, name)
        until(lambda: inspection.describe(name).summary.stalls != ())
        (stall,) = inspection.describe(name).summary.stalls
        assert stall.kind == StallKind.QUORUM_OUT_OF_REACH
        assert f"wait for room in /dev/shm, of which {1 << 60} bytes are kept" in stall.problem
        assert "processes that apply" not in stall.remedy
        assert ask("show", name)["summary"]["kept_free"] == 1 << 60
        assert "leaves free" in run("show", name).stdout
    finally:
        inspection.remove(name, force=True)


def test_a_take_that_nobody_ever_sends_a_gradient_is_named(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(crew, wait_in_line, NAME, 2)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    monkeypatch.setattr(_standstill, "AT_THE_START", LONG)
    assert kinds() == [], "workers may be importing"
    monkeypatch.setattr(_standstill, "AT_THE_START", 0.0)
    assert kinds() == [StallKind.QUORUM_OUT_OF_REACH]
