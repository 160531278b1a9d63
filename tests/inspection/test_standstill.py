"""Every verb says why a segment stands still, and calls no healthy segment stuck."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers import standing_still as job
from helpers.apart import Apart, Crew
from helpers.inspect_tool import Terminal, ask, run, stopped_with_the_lock
from helpers.lock_holder import held, sleeps_in
from helpers.standing_still import NAME, impatient
from helpers.standing_still import impatience as impatience
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection
from shmacc.inspection import Severity, StallKind, _stall_facts


def make_sparse() -> SparseConditionalAccumulator:
    return SparseConditionalAccumulator(np.float32, [200_000, 16], NAME)


def make_lanes() -> ConditionalAccumulator:
    return ConditionalAccumulator(np.float32, [2], NAME, lanes=2)


def make_group() -> shmacc.AccumulatorGroup:
    return shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME)


@pytest.fixture(autouse=True)
def segment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a segment, sparse by default; the test itself has not attached it."""
    getattr(request, "param", make_sparse)().close()
    yield
    inspection.remove(NAME, force=True)


def begin_to_take(crew: Crew, number: int) -> Apart:
    taker = job.begin(crew, job.take(number))
    until(lambda: sleeps_in(NAME, taker.pid, "waits in the queue"))
    return taker


def there(number: int) -> bool:
    return inspection.describe(NAME).stats.num_accumulated == number


def test_a_stopped_holder_of_the_lock_is_named(crew: Crew) -> None:
    ConditionalAccumulator(np.float32, [2], "another").close()
    with stopped_with_the_lock(crew, NAME) as pid:
        job.seen_in_every_verb(StallKind.LOCK_HOLDER_STOPPED, f"kill -CONT {pid}")
        with Terminal("watch", columns=140) as screen:
            screen.wait_for("STALL", "lock_holder_stopped")
            screen.press("j")
            screen.wait_for("stands still", "no process can apply or take")
            screen.press("q")
            assert screen.end() == 0
    inspection.remove("another")


@pytest.mark.parametrize("segment", [make_lanes], indirect=True)
def test_a_stopped_holder_of_a_later_lane_is_named(crew: Crew) -> None:
    """While a take waits for the later lane's lock, it nearly always holds the first lane's."""
    job.once(crew, job.apply)
    with held(NAME, layout.lane_byte(1)) as holder:
        taker = job.begin(crew, job.take(1))
        until(lambda: inspection.describe(NAME).lanes[0].held)
        for _ in range(10):
            job.seen(StallKind.LOCK_HOLDER_STOPPED, f"kill -CONT {holder.pid}")
    taker.result()


def test_a_stopped_holder_of_an_open_round_is_named(crew: Crew) -> None:
    holder = job.begin(crew, job.apply, job.hold_a_round)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    assert job.kinds() == []
    pid = job.stop(holder)
    job.seen(StallKind.ROUND_HOLDER_STOPPED, f"kill -CONT {pid}")


def test_a_look_during_a_commit_proves_no_standstill(crew: Crew) -> None:
    """The processes and the state that a look has read may belong to two commits."""
    holder = job.begin(crew, job.apply, job.hold_a_round)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    job.stop(holder)
    with shmacc.attach(NAME) as acc:

        class Meanwhile(inspection.Look):
            def condition(self, pid: int) -> str:
                assert not job.apply(acc, -1)
                return super().condition(pid)

        assert inspection.describe(NAME, Meanwhile()).summary.stalls == ()
        assert inspection.describe(NAME).summary.stalls != ()


def test_a_stopped_take_that_has_its_gradients_is_named(crew: Crew) -> None:
    taker = begin_to_take(crew, 2)
    pid = job.stop(taker)
    worker = job.begin(crew, job.apply, job.pause)
    until(lambda: there(1))
    assert job.kinds() == [], "the number is not reached yet"
    job.kill(worker)
    job.once(crew, job.apply)
    job.seen(StallKind.TAKER_STOPPED, f"kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    taker.result()
    assert job.kinds() == []


def test_workers_that_are_all_stopped_are_named(crew: Crew) -> None:
    begin_to_take(crew, 3)
    workers = [job.begin(crew, job.apply, job.pause) for _ in range(2)]
    until(lambda: there(2))
    first = job.stop(workers[0])
    assert job.kinds() == [], "the other one may apply"
    second = job.stop(workers[1])
    job.seen(StallKind.APPLIERS_STOPPED, f"kill -CONT {first} {second}")


@impatient
def test_a_worker_stopped_in_its_wait_for_the_step_is_the_cause(crew: Crew) -> None:
    """The take waits for the worker, which itself seems to wait."""
    worker = job.begin(crew, job.work)
    until(lambda: sleeps_in(NAME, worker.pid, "waits for the step"))
    pid = job.stop(worker)
    job.begin(crew, job.take(1), job.take(2))
    until(lambda: inspection.describe(NAME).stats.takes == 1)
    job.once(crew, lambda acc: job.apply(acc, acc.global_step))
    job.named(StallKind.APPLIERS_STOPPED)
    job.seen(StallKind.APPLIERS_STOPPED, f"kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    worker.result()


def test_a_quorum_that_needs_killed_workers_is_out_of_reach(crew: Crew) -> None:
    begin_to_take(crew, 2)
    worker = job.begin(crew, job.apply, job.pause)
    until(lambda: there(1))
    assert job.kinds() == [], "it may apply once more"
    job.kill(worker)
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    command = f"shmacc-inspect cancel {inspection.resolve(NAME).system_name} --yes"
    job.seen_in_every_verb(StallKind.QUORUM_OUT_OF_REACH, command)


@impatient
def test_a_killed_worker_is_the_cause(crew: Crew) -> None:
    """The commonest hang: one worker of many is gone, and the others wait for the take."""
    begin_to_take(crew, 3)
    others = [job.begin(crew, job.work) for _ in range(2)]
    third = job.begin(crew, job.pause)
    until(lambda: job.doing("waits for the step") == 2)
    assert job.kinds() == [], "the third may apply"
    pid = job.kill(third)
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    found = inspection.check(NAME)
    (wrong,) = [each for each in found if each.severity is Severity.WRONG]
    assert "3 alive (waiting for this take: 2)" in wrong.problem
    assert f"; pid {pid} is dead" in wrong.problem
    assert not [each for each in found if each.kind == "dead_entries"]
    with shmacc.attach(NAME):  # this removes the entry, and records the death as an event
        pass
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    assert f"; pid {pid} is dead" in job.problem()
    job.once(crew, job.apply)
    for child in others:
        child.result()
    assert job.kinds() == []


@impatient
def test_a_parent_that_only_keeps_the_segment_open_counts_for_no_quorum(crew: Crew) -> None:
    """The parent came before the killed worker; a later process may replace the worker."""
    job.begin(crew, job.pause)
    job.begin(crew, job.take(1), job.take(2))
    until(lambda: len(inspection.describe(NAME).queue) == 1)
    job.once(crew, job.apply)
    until(lambda: inspection.describe(NAME).stats.takes == 1)
    worker = job.begin(crew, job.apply, job.pause)
    until(lambda: there(1))
    assert job.kinds() == []
    job.kill(worker)
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    job.begin(crew, job.pause)
    assert job.kinds() == []


@impatient
def test_a_quorum_is_out_of_reach_if_all_who_applied_wait_to_take(crew: Crew) -> None:
    job.begin(crew, job.apply, job.take(2))
    until(lambda: len(inspection.describe(NAME).queue) == 1)
    other = job.begin(crew, job.pause)
    assert job.kinds() == []
    job.kill(other)
    job.named(StallKind.QUORUM_OUT_OF_REACH)


def test_workers_that_come_for_one_gradient_each_are_no_standstill(crew: Crew) -> None:
    """For a moment between two workers nobody can apply."""
    begin_to_take(crew, 10**9)
    for _ in range(5):
        job.once(crew, job.apply)
        assert job.kinds() == []
    assert ask("check", NAME)["wrong"] == 0


def test_a_take_without_any_gradient_is_named(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_to_take(crew, 2)
    job.patience(monkeypatch, 60.0)
    assert job.kinds() == [], "workers may be importing"
    job.patience(monkeypatch, 0.0)
    assert job.kinds() == [StallKind.QUORUM_OUT_OF_REACH]


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspect processes after 0.3 s, not after half a minute."""
    monkeypatch.setattr(_stall_facts, "LONG_IDLE", 0.3)


def suspicion() -> str:
    """Wait for a suspicion, and return it."""
    until(lambda: inspection.describe(NAME).suspected is not None)
    stall = inspection.describe(NAME).suspected
    assert stall is not None
    assert stall.kind is StallKind.APPLIER_IDLE
    return stall.problem


@pytest.mark.usefixtures("suspicious")
@pytest.mark.parametrize("segment", [make_sparse, make_group], indirect=True)
def test_a_worker_that_hangs_in_its_second_batch_is_named(crew: Crew) -> None:
    job.begin(crew, job.pause)  # a parent, which never applies
    job.begin(crew, job.take(2), job.take(2))
    until(lambda: len(inspection.describe(NAME).queue) == 1)
    worker = job.begin(crew, job.work, job.pause)
    job.once(crew, job.work)
    job.begin(crew, job.work)
    suspected = suspicion()
    assert job.kinds() == []
    assert "waits for 2 gradients; 1 is there" in suspected
    assert f"; pid {worker.pid}, which has not applied to it, is alive (sleeping)" in suspected
    (found,) = [each for each in inspection.check(NAME) if each.kind == StallKind.APPLIER_IDLE]
    assert found.severity is Severity.NOTE
    job.stop(worker)  # this is proof, since the others wait
    assert inspection.describe(NAME).suspected is None


@pytest.mark.usefixtures("suspicious")
def test_a_worker_that_has_never_applied_is_named_and_counted(crew: Crew) -> None:
    job.begin(crew, job.take(2))
    worker = job.begin(crew, job.pause)
    job.begin(crew, job.work)
    assert f"; pid {worker.pid}, which has not applied to it, is alive" in suspicion()
    metrics = {metric["name"]: metric["samples"] for metric in ask("metrics")["metrics"]}
    assert metrics["shmacc_straggler_seconds"][0]["value"] > 0


def test_nobody_is_suspected_before_half_a_minute(crew: Crew) -> None:
    job.begin(crew, job.take(2))
    job.begin(crew, job.pause)
    until(lambda: len(inspection.describe(NAME).queue) == 1)
    assert inspection.describe(NAME).suspected is None
    assert "nothing is known that makes it stand still" in run("show", NAME).stdout


def test_a_worker_is_idle_only_since_it_came_back_from_a_wait(crew: Crew) -> None:
    """The time of a chief's long update must not count as its workers' idle time."""
    job.begin(crew, job.work, job.pause)
    until(lambda: inspection.describe(NAME).processes[0].activity == "waits for the step")
    (before,) = inspection.describe(NAME).processes
    a_tick = 0.02  # seconds: at least two ticks of the segments' clock
    until(lambda: time.time() > before.last_seen + a_tick)
    with shmacc.attach(NAME) as acc:
        acc.take(1)
        until(lambda: inspection.describe(NAME).processes[0].activity == "idle")
    (after,) = [each for each in inspection.describe(NAME).processes if each.pid == before.pid]
    assert after.last_applied is not None
    assert after.last_seen > before.last_seen >= after.last_applied - 1
