"""A worker that hangs in its batch is named as what its round waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask, run
from helpers.standing_still import NAME, begin, kinds, once, pause, stop, take, work
from helpers.support import until

import shmacc
from shmacc import inspection
from shmacc.inspection import Severity, StallKind, _nobody_takes, _standstill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew

A_TICK: Final = 0.02  # seconds; of the clock of the segments, twice at least


def make_sparse() -> Any:
    return shmacc.SparseConditionalAccumulator(np.float32, [9, 16], NAME)


def make_group() -> Any:
    return shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME)


@pytest.fixture(autouse=True, params=[make_sparse])
def segment(request: pytest.FixtureRequest) -> Iterator[None]:
    """One that the test itself does not have attached."""
    request.param().close()
    yield
    inspection.remove(NAME, force=True)


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a moment were half a minute."""
    for module in (_nobody_takes, _standstill):
        monkeypatch.setattr(module, "LONG_IDLE", 0.3)


def suspicion() -> str:
    """Wait until something is perhaps waited for; what is said of it."""
    until(lambda: inspection.describe(NAME).suspected is not None)
    stall = inspection.describe(NAME).suspected
    assert stall is not None
    assert stall.kind is StallKind.APPLIER_IDLE
    return stall.problem


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("segment", [make_sparse, make_group], indirect=True)
def test_a_worker_that_hangs_in_its_second_batch_is_named(crew: Crew) -> None:
    begin(crew, pause)  # a parent, which never applies
    begin(crew, take(2), take(2))
    until(lambda: len(inspection.describe(NAME).line) == 1)
    worker = begin(crew, work, pause)
    once(crew, work)
    begin(crew, work)
    problem = suspicion()
    assert kinds() == []
    assert "waits for 2 gradients; 1 is there" in problem
    assert f"; pid {worker.pid}, which has not applied to it, is alive (sleeping)" in problem
    (found,) = [each for each in inspection.check(NAME) if each.kind == StallKind.APPLIER_IDLE]
    assert found.severity is Severity.NOTE
    stop(worker)  # which is proof, as the others wait
    assert inspection.describe(NAME).suspected is None


@pytest.mark.usefixtures("impatience")
def test_a_worker_that_has_never_applied_is_named_and_counted(crew: Crew) -> None:
    begin(crew, take(2))
    worker = begin(crew, pause)
    begin(crew, work)
    assert f"; pid {worker.pid}, which has not applied to it, is alive" in suspicion()
    metrics = {metric["name"]: metric["samples"] for metric in ask("metrics")["metrics"]}
    assert metrics["shmacc_straggler_seconds"][0]["value"] > 0


def test_nobody_is_suspected_before_half_a_minute(crew: Crew) -> None:
    begin(crew, take(2))
    begin(crew, pause)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    assert inspection.describe(NAME).suspected is None
    assert "nothing is known that makes it stand still" in run("show", NAME).stdout


def test_a_worker_is_idle_only_since_it_came_back_from_a_wait(crew: Crew) -> None:
    """A chief may take long over its update: that is not its workers' time."""
    begin(crew, work, pause)
    until(lambda: inspection.describe(NAME).processes[0].activity == "waits for the step")
    (before,) = inspection.describe(NAME).processes
    until(lambda: time.time() > before.last_seen + A_TICK)
    with shmacc.attach(NAME) as acc:
        acc.take(1)
        until(lambda: inspection.describe(NAME).processes[0].activity == "idle")
    (after,) = [each for each in inspection.describe(NAME).processes if each.pid == before.pid]
    assert after.last_applied is not None
    assert after.last_seen > before.last_seen >= after.last_applied - 1
