"""The run as `shmacc-inspect` shows it: who failed, rounds that are final, runs that are over."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.half_loads import half_loaded, loading
from helpers.inspect_tool import ask, idle, run, start, wait_in_line
from helpers.standing_still import kill, stop
from helpers.stepping_tracer import refusal
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, Parameters, TensorSpec, inspection
from shmacc.inspection import StallKind, _nobody_takes, _standstill
from shmacc.optim import SGD, Adagrad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.apart import Crew

NAME: Final = "run"
PARAMS: Final = "run.params"
LARGE: Final = 2**21  # numbers


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    """An accumulator and its parameters, which the test itself does not have attached."""
    ConditionalAccumulator(np.float32, [4], NAME).close()
    Parameters({"w": np.zeros(4, np.float32)}, PARAMS, optimizer=SGD(0.5)).close()
    yield
    for name in (NAME, PARAMS):
        inspection.remove(name, force=True)


def fail(error: Exception) -> None:
    """Have a bug."""
    raise error


def fail_after_a_gradient(name: str) -> None:
    """Be a worker with a bug; return as if it were the end of the process."""
    try:
        with shmacc.attach(name) as acc:
            assert isinstance(acc, ConditionalAccumulator)
            acc.apply_grad(np.ones(4, np.float32))
            fail(ValueError("a bad batch"))
    except ValueError:
        return


def fail_at_once(name: str) -> None:
    """Fail before the first gradient."""
    try:
        with shmacc.attach(name):
            fail(OSError("no such file: data/7"))
    except OSError:
        return


def wait_for_the_step(name: str) -> None:
    """Wait for a step that never comes."""
    with shmacc.attach(name) as acc:
        acc.wait_step(10**6)


def update_and_stay_in_the_block(name: str, params: str) -> None:
    """Be a chief whose round is final."""
    with shmacc.attach(name) as acc, Parameters.attach(params) as arrays:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(np.ones(4, np.float32))
        with acc.round(1) as taken:
            arrays.update(taken)
            signal.pause()


def have_a_round_open(name: str) -> None:
    """Be a chief that computes in its first block."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(np.ones(4, np.float32))
        with acc.round(1):
            signal.pause()


def take_and_idle(name: str) -> None:
    """Take once, then compute for ever."""
    with shmacc.attach(name) as acc:
        acc.take(1)
        signal.pause()


def notes(name: str = NAME) -> dict[str, Any]:
    """What `check` notes, by its kind; nothing is wrong."""
    found = ask("check", name)["findings"]
    assert {each["severity"] for each in found} <= {"note"}
    return {each["kind"]: each for each in found}


def samples(name: str) -> list[dict[str, Any]]:
    """The samples of a metric."""
    (metric,) = [one for one in ask("metrics")["metrics"] if one["name"] == name]
    return list(metric["samples"])


def final_round_open(crew: Crew) -> Any:
    """A chief that has made its update, in the block."""
    chief = start(crew, update_and_stay_in_the_block, NAME, PARAMS)
    until(lambda: inspection.describe(NAME).stats.update == "in")
    return chief


def test_workers_that_failed_are_shown_with_their_exceptions(crew: Crew) -> None:
    pids = []
    for function in (fail_after_a_gradient, fail_at_once):
        worker = crew.start(function, NAME)
        pids.append(worker.pid)
        worker.result()
    with shmacc.attach(NAME):  # which sweeps
        pass
    found = [each for each in ask("check", NAME, status=1)["findings"] if each["kind"] == "failed"]
    assert [each["problem"] for each in found] == [
        f"pid {pids[0]} has failed: ValueError: a bad batch",
        f"pid {pids[1]} has failed: OSError: no such file: data/7",
    ]
    shown = run("show", NAME).stdout
    assert "ValueError: a bad batch" in shown
    assert "OSError: no such file: data/7" in shown
    answer = ask("show", NAME)
    events = [(one["kind"], one["pid"], one["reason"]) for one in answer["events"]]
    assert ("failed", pids[0], "ValueError: a bad batch") in events
    (departed,) = answer["departed"]
    assert (departed["pid"], departed["died"], departed["applied"]) == (pids[0], False, 1)
    assert departed["reason"] == "ValueError: a bad batch"
    labels = [each["labels"] for each in samples("shmacc_failure_timestamp_seconds")]
    assert [(one["pid"], one["reason"]) for one in labels] == [
        (str(pids[0]), "ValueError: a bad batch"),
        (str(pids[1]), "OSError: no such file: data/7"),
    ]


def test_failures_of_one_cause_are_one_note(crew: Crew) -> None:
    start(crew, idle, NAME)
    pids = []
    for _ in range(3):
        worker = crew.start(fail_at_once, NAME)
        pids.append(str(worker.pid))
        worker.result()
    assert notes()["failed"]["problem"] == (
        f"pids {', '.join(pids)} have failed: OSError: no such file: data/7"
    )


def test_a_take_that_failed_workers_leave_waiting_names_them(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that only keeps it open is not counted on, as after a death."""
    monkeypatch.setattr(_standstill, "_AFTER_GRADIENTS", 0.0)
    start(crew, idle, NAME)
    with shmacc.attach(NAME) as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(np.ones(4, np.float32))
        acc.take(1)
    worker = crew.start(fail_after_a_gradient_of_step_one, NAME)
    worker.result()
    start(crew, wait_in_line, NAME, 2)
    until(lambda: [one.kind for one in stalls()] == [StallKind.QUORUM_OUT_OF_REACH])
    assert f"pid {worker.pid} has failed: ValueError: a bad batch" in stalls()[0].problem


def fail_after_a_gradient_of_step_one(name: str) -> None:
    """The same, whatever the step."""
    try:
        with shmacc.attach(name) as acc:
            assert isinstance(acc, ConditionalAccumulator)
            acc.apply_grad(np.ones(4, np.float32), local_step=shmacc.NEVER_STALE)
            fail(ValueError("a bad batch"))
    except ValueError:
        return


def stalls() -> tuple[inspection.Stall, ...]:
    """Why it stands still."""
    return inspection.describe(NAME).summary.stalls


def test_a_chief_that_failed_is_named_with_its_exception(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nobody_takes, "_AFTER_TAKES", 0.0)
    chief = crew.start(take_and_fail, NAME)
    pid = chief.pid
    chief.result()
    start(crew, wait_for_the_step, NAME)
    until(lambda: [one.kind for one in stalls()] == [StallKind.NOBODY_TAKES])
    assert stalls()[0].problem.endswith(f"pid {pid}, which did, has failed: KeyError: 'lr'")
    assert stalls()[0].remedy.startswith("mend what it failed with, then start the process")


def take_and_fail(name: str) -> None:
    """Be a chief with a bug."""
    try:
        with shmacc.attach(name) as acc:
            assert isinstance(acc, ConditionalAccumulator)
            acc.apply_grad(np.ones(4, np.float32))
            acc.take(1)
            fail(KeyError("lr"))
    except KeyError:
        return


def test_a_chief_that_dies_in_its_first_block_is_missed_beside_a_parent(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had taken nothing yet, but it had opened a round."""
    monkeypatch.setattr(_nobody_takes, "AT_THE_START", 0.0)
    start(crew, idle, NAME)
    chief = start(crew, have_a_round_open, NAME)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    start(crew, wait_for_the_step, NAME)
    kill(chief)
    until(lambda: [one.kind for one in stalls()] == [StallKind.NOBODY_TAKES])


def test_a_final_round_that_a_process_holds_is_shown(crew: Crew) -> None:
    chief = final_round_open(crew)
    final = ask("show", NAME)["final_round"]
    assert (final["is_in"], final["pid"], final["held"]) == (True, chief.pid, True)
    assert f"its update, of pid {chief.pid}, is in since" in run("show", NAME).stdout
    assert "final_round_without_holder" not in notes()
    assert [each["value"] for each in samples("shmacc_round_final")] == [1]


def test_a_final_round_whose_chief_is_dead_is_noted_with_what_ends_it(crew: Crew) -> None:
    start(crew, idle, NAME)
    chief = final_round_open(crew)
    pid = kill(chief)
    assert ask("show", NAME)["final_round"]["held"] is False
    shown = " ".join(run("show", NAME).stdout.split())
    assert f"its update, of pid {pid}, is in since" in shown
    assert "no process has it open: the next one that takes gets it" in shown
    found = notes()["final_round_without_holder"]
    assert f"pid {pid}" in found["problem"]
    assert "step 0 is final" in found["problem"]
    assert "the next process that takes gets the same gradients" in found["remedy"]
    with shmacc.attach(NAME) as acc, Parameters.attach(PARAMS) as arrays:  # the remedy
        assert isinstance(acc, ConditionalAccumulator)
        with acc.round(5) as taken:
            assert not arrays.update(taken)
    assert "final_round_without_holder" not in notes()
    assert ask("show", NAME)["final_round"] is None


def test_a_run_that_is_over_is_finished_and_stands_still_for_nobody(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nobody_takes, "AT_THE_START", 0.0)
    chief = start(crew, have_a_round_open, NAME)
    until(lambda: inspection.describe(NAME).round_holder is not None)
    start(crew, idle, NAME)
    stop(chief)
    assert [one.kind for one in stalls()] == [StallKind.ROUND_HOLDER_STOPPED]
    with shmacc.attach(NAME) as acc:
        acc.finish()
    assert stalls() == ()
    (listed,) = ask("list", NAME)["segments"]
    assert (listed["state"], listed["finished"]) == ("finished", True)
    assert run("list", NAME).stdout.split()[-1] == "finished"
    assert "the run is over" in run("show", NAME).stdout
    assert [each["value"] for each in samples("shmacc_finished")] == [1]
    assert run("check", NAME, "--quiet").returncode == 0
    refused = run("remove", NAME)
    assert refused.returncode == 1
    assert "in use by pids" in refused.stderr
    assert run("clean", NAME).stdout == ""


def test_a_chief_that_is_in_no_call_while_others_wait_is_noted(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, so it may compute: it is named, and not called wrong."""
    monkeypatch.setattr(_nobody_takes, "LONG_IDLE", 0.3)
    chief = start(crew, take_and_idle, NAME)
    crew.start(apply_a_gradient, NAME).result()
    until(lambda: inspection.describe(NAME).stats.takes == 1)
    start(crew, wait_for_the_step, NAME)
    until(lambda: inspection.describe(NAME).suspected is not None)
    assert stalls() == ()
    suspected = inspection.describe(NAME).suspected
    assert suspected is not None
    assert f"pid {chief.pid}, which took before, is alive (sleeping)" in suspected.problem
    (found,) = [each for each in inspection.check(NAME) if each.kind == StallKind.TAKER_IDLE]
    assert found.severity is inspection.Severity.NOTE
    stop(chief)  # which is proof
    assert [one.kind for one in stalls()] == [StallKind.NOBODY_TAKES]
    assert inspection.describe(NAME).suspected is None


def apply_a_gradient(name: str) -> None:
    """Be a worker for a moment."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(np.ones(4, np.float32))


def test_a_process_that_is_in_its_block_while_others_wait_is_noted(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nobody_takes, "LONG_IDLE", 0.3)
    chief = start(crew, have_a_round_open, NAME)
    start(crew, wait_for_the_step, NAME)
    until(lambda: inspection.describe(NAME).suspected is not None)
    suspected = inspection.describe(NAME).suspected
    assert suspected is not None
    assert f"pid {chief.pid}, which has a round open" in suspected.problem


def test_nobody_is_suspected_before_others_have_waited_for_long(crew: Crew) -> None:
    start(crew, take_and_idle, NAME)
    crew.start(apply_a_gradient, NAME).result()
    start(crew, wait_for_the_step, NAME)
    assert inspection.describe(NAME).suspected is None


def test_parameters_are_shown_with_optimizers_and_slots() -> None:
    contents = {"table": np.zeros((100, 8), np.float32), "ids": np.arange(3)}
    optimizers = {"table": Adagrad(0.05)}
    with Parameters(contents, "table.params", optimizer=optimizers) as params:
        shown = ask("show", "table.params")
        table, ids = shown["members"]
        assert table["optimizer"] == repr(Adagrad(0.05))
        assert table["slots"] == [{"name": "accumulator", "bytes_used": 3200}]
        assert (ids["optimizer"], ids["slots"]) == (None, [])
        used = {region["name"]: region["used"] for region in shown["regions"]}
        assert (used["rows 0"], used["index 0"]) == (3200 + 24, 3200)
        assert shown["summary"]["bytes_used"] >= 6424
        assert (shown["summary"]["kind"], shown["summary"]["global_step"]) == ("parameters", 0)
        said = run("show", "table.params").stdout
        assert "Adagrad(learning_rate=0.05, initial_accumulator_value=0.1" in said
        assert "accumulator:3.1KiB" in said
        assert run("list", "table.params").stdout.splitlines()[1].split()[1] == "parameters"
        params.unlink()


@contextmanager
def stopped_in_an_update(crew: Crew) -> Iterator[Any]:
    """A process that stands still in the middle of an update of an array of 8 MiB."""
    with (
        ConditionalAccumulator(np.float32, [LARGE], "large") as acc,
        Parameters({"w": TensorSpec((LARGE,))}, "large.params", optimizer=SGD(0.5)) as arrays,
    ):
        chief = start(crew, update_for_ever, "large.params", "large")
        deadline = time.monotonic() + LONG
        while True:
            stop(chief)
            seen = inspection.describe("large.params")
            if seen.lock.held and seen.lock.in_operation:
                break
            os.kill(chief.pid, signal.SIGCONT)
            assert time.monotonic() < deadline, "it is never caught in an update"
            time.sleep(0.003)
        try:
            yield chief
        finally:
            chief.kill()
            acc.unlink()
            arrays.unlink()


def update_for_ever(params: str, name: str) -> None:
    """Be a chief, and the only worker."""
    with shmacc.attach(name) as acc, Parameters.attach(params) as arrays:
        assert isinstance(acc, ConditionalAccumulator)
        while True:
            acc.apply_grad(np.ones(LARGE, np.float32), acc.global_step)
            with acc.round(1) as taken:
                arrays.update(taken)


def test_an_update_that_runs_is_shown_with_its_process(crew: Crew) -> None:
    with stopped_in_an_update(crew) as chief:
        update = ask("show", "large.params")["update"]
        assert (update["is_interrupted"], update["pid"]) == (False, chief.pid)
        assert f"one runs: pid {chief.pid}" in run("show", "large.params").stdout
        (found,) = [
            each
            for each in ask("check", "large.params", status=1)["findings"]
            if each["severity"] == "wrong"
        ]
        assert found["kind"] == StallKind.LOCK_HOLDER_STOPPED
        assert found["problem"] == (
            f"pid {chief.pid} is stopped and holds the lock: no process can update or copy them"
        )


def test_an_update_that_a_death_interrupted_waits_to_be_put_back(crew: Crew) -> None:
    with stopped_in_an_update(crew) as chief:
        pid = kill(chief)
        update = ask("show", "large.params")["update"]
        assert (update["is_interrupted"], update["pid"]) == (True, pid)
        assert f"one was interrupted by the death of pid {pid}" in " ".join(
            run("show", "large.params").stdout.split()
        )
        found = notes("large.params")
        assert "operation_interrupted" not in found, "said once"
        assert f"the death of pid {pid}" in found["update_interrupted"]["problem"]
        assert found["update_interrupted"]["remedy"].startswith("nothing: the next update")
        with Parameters.attach("large.params") as arrays:
            arrays.snapshot()
        assert ask("show", "large.params")["update"] is None
        assert "update_interrupted" not in notes("large.params")


@pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}")
def test_a_load_that_a_death_interrupted_is_wrong_until_it_is_made_again(tmp_path: Path) -> None:
    def attach() -> dict[str, Any]:
        return {"params": Parameters.attach(PARAMS), "acc": shmacc.attach(NAME)}

    with Parameters.attach(PARAMS) as arrays, shmacc.attach(NAME) as acc:
        saved = {"params": arrays, "acc": acc}
        shmacc.save(tmp_path / "saved.npz", saved)
        with half_loaded(arrays, loading(tmp_path / "saved.npz", attach)) as loader:
            assert f"of a checkpoint: pid {loader.pid};" in run("show", PARAMS).stdout
            found = {one["kind"] for one in ask("check", PARAMS, status=1)["findings"]}
            assert "load_interrupted" not in found, "it is only stopped"
            loader.kill()
        assert "of a checkpoint was interrupted" in run("show", PARAMS).stdout
        wrong = {one["kind"]: one for one in ask("check", PARAMS, status=1)["findings"]}
        assert wrong["load_interrupted"]["severity"] == "wrong"
        assert wrong["load_interrupted"]["remedy"].startswith("load the checkpoint again")
        shmacc.load(tmp_path / "saved.npz", saved)
        assert "load_interrupted" not in notes(PARAMS)
        assert "of a checkpoint" not in run("show", PARAMS).stdout


def test_parameters_have_metrics_of_their_own() -> None:
    with ConditionalAccumulator(np.float32, [4], "own") as acc, Parameters.attach(PARAMS) as arrays:
        acc.apply_grad(np.ones(4, np.float32))
        with acc.round(1) as taken:
            arrays.update(taken)
        acc.unlink()
    (updates,) = samples("shmacc_updates")
    assert (updates["name"], updates["value"]) == ("shmacc_updates_total", 1)
    assert updates["labels"]["name"] == PARAMS
    steps = {each["labels"]["name"]: each["value"] for each in samples("shmacc_step")}
    assert steps[PARAMS] == 1
