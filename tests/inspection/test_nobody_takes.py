"""All workers wait for a take, but the chief is dead, was never there, or is stopped."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import standing_still as job
from helpers.apart import Apart, Crew
from helpers.inspect_tool import ask, run, stopped_with_the_lock
from helpers.standing_still import NAME, impatient
from helpers.standing_still import impatience as impatience
from helpers.support import LONG, until

import shmacc
from shmacc import SparseConditionalAccumulator, errors, inspection
from shmacc.inspection import StallKind, _stall_facts

NOBODY_TAKES = StallKind.NOBODY_TAKES


@pytest.fixture(autouse=True)
def segment() -> Iterator[None]:
    """Make an accumulator with room for two gradients; the test itself has not attached it."""
    SparseConditionalAccumulator(np.float32, [1000, 16], NAME, capacity=2).close()
    yield
    inspection.remove(NAME, force=True)


def apply_a_partial(acc: Any) -> None:
    with SparseConditionalAccumulator(np.float32, [1000, 16]) as own:
        for _ in range(2):
            job.apply(own)
        partial = own.take_partial(2)
    acc.apply_partial(partial, local_step=shmacc.NEVER_STALE)


def apply_for_ever(acc: Any) -> None:
    while True:
        job.apply(acc)


def chief_that_has_taken(crew: Crew, beside: int = 0) -> Apart:
    """Start a process that takes once and then idles; `beside` other processes must idle, too."""
    chief = job.begin(crew, job.take(1), job.pause)
    job.once(crew, job.apply)
    until(lambda: any(each.taken for each in inspection.describe(NAME).processes))
    until(lambda: job.doing("idle") == 1 + beside)
    return chief


def wait_beside_it(crew: Crew, number: int = 1) -> list[Apart]:
    workers = [job.begin(crew, job.wait_for_ever) for _ in range(number)]
    until(lambda: job.doing("waits for the step") == number)
    return workers


def test_a_standstill_is_reported_within_ten_seconds() -> None:
    facts = _stall_facts
    assert max(facts.AT_THE_START, facts.AFTER_TAKES, facts.AFTER_GRADIENTS) < 10


@impatient
def test_a_killed_chief_is_named_when_workers_wait_for_the_step(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    wait_beside_it(crew, 3)
    assert job.kinds() == [], "the chief may take"
    assert "nothing wrong" in run("check", NAME).stderr
    pid = job.kill(chief)
    job.named(NOBODY_TAKES)
    assert job.problem() == (
        f"3 processes wait for the step, and nobody takes: pid {pid}, which did, is dead"
    )
    job.seen_in_every_verb(NOBODY_TAKES, None)
    (finding,) = [f for f in ask("check", NAME, status=1)["findings"] if f["severity"] == "wrong"]
    assert finding["remedy"].startswith("start the process that takes")


def test_after_a_death_show_says_to_look_again(crew: Crew) -> None:
    job.begin(crew, job.pause)
    assert "look again" not in run("show", NAME).stdout
    job.kill(chief_that_has_taken(crew, beside=1))
    fine = "nothing is known that makes it stand still; 1 process died: look again in 10 s"
    assert fine in " ".join(run("show", NAME).stdout.split())


@impatient
def test_the_remedy_ends_the_standstill(crew: Crew) -> None:
    """The remedy is to start a chief in place of the dead one."""
    job.kill(chief_that_has_taken(crew))
    worker = job.begin(crew, job.work)
    job.named(NOBODY_TAKES)
    job.once(crew, job.take(1))
    worker.result()
    assert job.kinds() == []


def test_a_restarted_chief_has_time_to_load(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    job.kill(chief_that_has_taken(crew))
    wait_beside_it(crew)
    job.patience(monkeypatch, 0.0)
    job.named(NOBODY_TAKES)
    job.patience(monkeypatch, LONG)
    job.begin(crew, job.pause)
    assert job.kinds() == []


def test_a_chief_that_never_came_is_reported(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = wait_beside_it(crew)
    job.patience(monkeypatch, LONG)
    assert job.kinds() == [], "it may be importing"
    job.patience(monkeypatch, 0.0)
    assert job.kinds() == [NOBODY_TAKES]
    assert job.problem() == (
        f"pid {worker.pid} waits for the step, and nobody takes: no take has been served yet"
    )


@impatient
def test_a_chief_killed_before_its_first_take_is_named(crew: Crew) -> None:
    job.begin(crew, job.pause)
    chief = job.begin(crew, job.take(2))
    until(lambda: len(inspection.describe(NAME).queue) == 1)
    wait_beside_it(crew)
    pid = job.kill(chief)
    job.named(NOBODY_TAKES)
    assert f"nobody takes: pid {pid}, which did, is dead" in job.problem()


@impatient
def test_workers_without_room_count_as_waiting_for_a_killed_chief(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    for _ in range(2):
        job.begin(crew, apply_for_ever)
    until(lambda: job.doing("waits for room") == 2)
    job.kill(chief)
    job.named(NOBODY_TAKES)
    assert job.problem().startswith("2 processes wait for room, and nobody takes: ")
    wait_beside_it(crew)
    job.named(NOBODY_TAKES)
    assert job.problem().startswith(
        "3 processes wait (2 for room, 1 for the step), and nobody takes: "
    )


@impatient
def test_a_chief_that_left_in_order_is_reported(crew: Crew) -> None:
    chief = job.begin(crew, job.take(1))
    job.once(crew, job.apply)
    chief.result()
    wait_beside_it(crew)
    job.named(NOBODY_TAKES)
    assert job.problem().endswith("nobody takes: the processes that took have left")


def test_a_stopped_chief_is_named_with_the_command_that_continues_it(crew: Crew) -> None:
    chief = chief_that_has_taken(crew)
    (worker,) = wait_beside_it(crew)
    pid = job.stop(chief)
    assert job.kinds() == [NOBODY_TAKES]
    assert job.problem().endswith(f"and nobody takes: pid {pid}, which could, is stopped")
    job.seen(NOBODY_TAKES, f"kill -CONT {pid}")
    # If all processes are stopped, one command continues all of them.
    pids = sorted([pid, job.stop(worker)])
    (stall,) = inspection.describe(NAME).summary.stalls
    assert stall.command is not None
    assert sorted(map(int, stall.command.split()[2:])) == pids
    for each in pids:
        os.kill(each, signal.SIGCONT)
    until(lambda: job.kinds() == [])


@impatient
def test_a_wait_of_many_short_timeouts_counts_as_one_wait(crew: Crew) -> None:
    def wait_in_pieces(acc: Any) -> None:
        while True:
            with contextlib.suppress(errors.DeadlineExceededError):
                acc.wait_step(10**6, timeout=0.2)

    chief = chief_that_has_taken(crew)
    job.begin(crew, wait_in_pieces)
    until(lambda: job.doing("waits for the step") == 1)
    job.kill(chief)
    job.named(NOBODY_TAKES)


@impatient
def test_a_take_whose_gradients_have_no_room_is_reported(crew: Crew) -> None:
    """All workers wait for room, which only this take would make."""
    job.once(crew, job.apply)
    job.begin(crew, job.take(2))
    job.begin(crew, apply_a_partial)
    until(lambda: job.doing("waits for room") == 1)
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    assert "2 alive (waiting for this take: 1)" in job.problem()


def test_a_worker_that_looks_for_room_counts_as_waiting(crew: Crew) -> None:
    """Such a worker looks twenty times a second, under the lock, and must count then, too."""
    job.begin(crew, apply_for_ever)
    until(lambda: job.doing("waits for room") == 1)
    with stopped_with_the_lock(crew, NAME, changes=False):
        for _ in range(5):
            time.sleep(0.05)
            assert job.doing("waits for room") == 1


@impatient
def test_a_take_whose_gradients_have_no_memory_is_reported(crew: Crew) -> None:
    """No capacity limits the gradients, so the remedy must not ask for more processes."""
    name = f"{NAME}-unbounded"
    with SparseConditionalAccumulator(np.float32, [1000, 1024], name) as acc:
        acc.apply_grad([0], np.ones((1, 1024), np.float32))
        acc._handle.keep_free(1 << 47)
    much = range(1000), np.ones((1000, 1024), np.float32)
    try:
        job.begin(crew, job.take(2), name=name)
        job.begin(crew, lambda acc: acc.apply_grad(*much), name=name)
        until(lambda: inspection.describe(name).summary.stalls != ())
        (stall,) = inspection.describe(name).summary.stalls
        assert stall.kind == StallKind.QUORUM_OUT_OF_REACH
        assert f"wait for room in /dev/shm, of which {1 << 47} bytes are kept" in stall.problem
        assert "processes that apply" not in stall.remedy
        assert ask("show", name)["summary"]["kept_free"] == 1 << 47
        assert "leaves free" in run("show", name).stdout
    finally:
        inspection.remove(name, force=True)
