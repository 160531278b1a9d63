"""A worker that hangs in its batch, or was killed, is named as what its round waits for."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask, idle, run, start, wait_in_line
from helpers.standing_still import kill, kinds, stop
from helpers.support import until

import shmacc
from shmacc import inspection
from shmacc.inspection import Severity, StallKind, _nobody_takes, _standstill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew

NAME: Final = "still"  # as in helpers.standing_still
A_TICK: Final = 0.02  # seconds; of the clock of the segments, twice at least


def make_single() -> Any:
    return shmacc.ConditionalAccumulator(np.float32, [2], NAME)


def make_sparse() -> Any:
    return shmacc.SparseConditionalAccumulator(np.float32, [9, 2], NAME)


def make_group() -> Any:
    return shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME)


@pytest.fixture(autouse=True, params=[make_single, make_sparse, make_group])
def segment(request: pytest.FixtureRequest) -> Iterator[None]:
    """One of each kind, which the test itself does not have attached."""
    request.param().close()
    yield
    inspection.remove(NAME, force=True)


def apply(acc: Any, step: int) -> None:
    """Apply a gradient, whatever kind it is."""
    if isinstance(acc, shmacc.AccumulatorGroup):
        acc.apply({"w": np.ones(2, np.float32)}, step)
    elif isinstance(acc, shmacc.SparseConditionalAccumulator):
        acc.apply_grad([1], np.ones((1, 2), np.float32), local_step=step)
    else:
        acc.apply_grad(np.ones(2, np.float32), local_step=step)


def apply_and_wait_for_the_step(name: str) -> None:
    """Be a worker that does its part."""
    with shmacc.attach(name) as acc:
        step = acc.global_step
        apply(acc, step)
        acc.wait_step(step)


def apply_one_round_and_hang(name: str) -> None:
    """Be a worker that hangs in its second batch."""
    with shmacc.attach(name) as acc:
        apply(acc, 0)
        acc.wait_step(0)
        signal.pause()


def take_a_round_and_wait(name: str) -> None:
    """Be a chief of rounds of two gradients."""
    with shmacc.attach(name) as acc:
        while True:
            acc.take(2)


def suspected() -> inspection.Stall | None:
    """What is perhaps waited for."""
    return inspection.describe(NAME).suspected


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a moment were half a minute."""
    for module in (_nobody_takes, _standstill):
        monkeypatch.setattr(module, "LONG_IDLE", 0.3)


@pytest.mark.usefixtures("impatience")
def test_a_worker_that_hangs_in_its_second_batch_is_named(crew: Crew) -> None:
    start(crew, idle, NAME)  # a parent, which never applies
    start(crew, take_a_round_and_wait, NAME)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    worker = start(crew, apply_one_round_and_hang, NAME)
    crew.start(apply_and_wait_for_the_step, NAME).result()
    start(crew, apply_and_wait_for_the_step, NAME)
    until(lambda: suspected() is not None)
    assert kinds() == []
    stall = suspected()
    assert stall is not None
    assert stall.kind is StallKind.APPLIER_IDLE
    assert "waits for 2 gradients; 1 is there" in stall.problem
    assert f"; pid {worker.pid}, which has not applied to it, is alive (sleeping)" in stall.problem
    (found,) = [each for each in inspection.check(NAME) if each.kind == StallKind.APPLIER_IDLE]
    assert found.severity is Severity.NOTE
    stop(worker)  # which is proof, as the others wait
    assert suspected() is None


@pytest.mark.usefixtures("impatience")
def test_a_worker_that_has_never_applied_is_named_and_counted(crew: Crew) -> None:
    start(crew, wait_in_line, NAME, 2)
    worker = start(crew, idle, NAME)
    start(crew, apply_and_wait_for_the_step, NAME)
    until(lambda: suspected() is not None)
    stall = suspected()
    assert stall is not None
    assert f"; pid {worker.pid}, which has not applied to it, is alive" in stall.problem
    (metric,) = [
        metric
        for metric in ask("metrics")["metrics"]
        if metric["name"].endswith("straggler_seconds")
    ]
    assert metric["samples"][0]["value"] > 0


def test_nobody_is_suspected_before_half_a_minute(crew: Crew) -> None:
    start(crew, wait_in_line, NAME, 2)
    start(crew, idle, NAME)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    assert suspected() is None
    assert "nothing is known that makes it stand still" in run("show", NAME).stdout


@pytest.mark.usefixtures("impatience")
def test_a_worker_is_idle_only_since_it_came_back_from_a_wait(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chief may take long over its update: that is not its workers' time."""
    start(crew, apply_one_round_and_hang, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 1)
    (before,) = inspection.describe(NAME).processes
    until(lambda: time.time() > before.last_seen + A_TICK)
    with shmacc.attach(NAME) as acc:
        acc.take(1)
        until(lambda: inspection.describe(NAME).processes[0].activity == "idle")
    (after,) = [each for each in inspection.describe(NAME).processes if each.pid == before.pid]
    assert after.last_applied is not None
    assert after.last_seen > before.last_seen >= after.last_applied - 1
    monkeypatch.undo()


def test_a_worker_that_was_killed_is_the_cause(crew: Crew) -> None:
    """As "2 alive, 3 required" is, and not only a note on its entry."""
    start(crew, wait_in_line, NAME, 3)
    for _ in range(2):
        start(crew, apply_and_wait_for_the_step, NAME)
    until(lambda: inspection.describe(NAME).stats.num_accumulated == 2)
    pid = kill(start(crew, idle, NAME))
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    found = inspection.check(NAME)
    (wrong,) = [each for each in found if each.severity is Severity.WRONG]
    assert f"; pid {pid} is dead" in wrong.problem
    assert not [each for each in found if each.kind == "dead_entries"]
    with shmacc.attach(NAME):  # which sweeps the entry: then its death is an event
        pass
    until(lambda: kinds() == [StallKind.QUORUM_OUT_OF_REACH])
    (stall,) = inspection.describe(NAME).summary.stalls
    assert f"; pid {pid} is dead" in stall.problem
