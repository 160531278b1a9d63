"""`shmacc-inspect` on training loops: failed workers, final rounds, finished runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import standing_still as job
from helpers.apart import Crew
from helpers.half_loads import half_loaded, loading
from helpers.inspect_tool import ask, run, stop_within
from helpers.standing_still import impatience as impatience
from helpers.stepping_tracer import refusal
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, Parameters, TensorSpec, inspection
from shmacc.inspection import StallKind, _stall_facts
from shmacc.optim import SGD, Adagrad

PARAMS: Final = "run.params"
LARGE: Final = 2**21  # numbers


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    """Make an accumulator and its parameters; the test itself has attached neither."""
    ConditionalAccumulator(np.float32, [4], job.NAME).close()
    Parameters({"w": np.zeros(4, np.float32)}, PARAMS, optimizer=SGD(0.5)).close()
    yield
    for name in (job.NAME, PARAMS):
        inspection.remove(name, force=True)


def fail(error: Exception) -> Callable[[Any], None]:

    def deed(_: Any) -> None:
        raise error

    return deed


def failed(crew: Crew, error: Exception, *before: Callable[[Any], Any]) -> int:
    """Let a process fail after some actions; return its pid."""
    worker = crew.start(job.do, job.NAME, *before, fail(error))
    with pytest.raises(type(error)):
        worker.result()
    return worker.pid


def update_and_stay_in_the_block(acc: Any) -> None:
    """Update the parameters and stay in the block: the round is final."""
    with Parameters.attach(PARAMS) as arrays, acc.round(1) as taken:
        arrays.update(taken)
        job.pause(acc)


def notes(name: str = job.NAME) -> dict[str, Any]:
    """Return the notes of `check` by kind; it must report nothing wrong."""
    found = ask("check", name)["findings"]
    assert {each["severity"] for each in found} <= {"note"}
    return {each["kind"]: each for each in found}


def samples(name: str) -> list[dict[str, Any]]:
    (metric,) = [one for one in ask("metrics")["metrics"] if one["name"] == name]
    return list(metric["samples"])


def shown(name: str = job.NAME) -> str:
    return " ".join(run("show", name).stdout.split())


BAD_BATCH: Final = ValueError("a bad batch")
NO_FILE: Final = OSError("no such file: data/7")


def test_workers_that_failed_are_shown_with_their_exceptions(crew: Crew) -> None:
    pids = [failed(crew, BAD_BATCH, job.apply), failed(crew, NO_FILE), failed(crew, NO_FILE)]
    with shmacc.attach(job.NAME):  # attaching finds the deaths
        pass
    found = [
        each for each in ask("check", job.NAME, status=1)["findings"] if each["kind"] == "failed"
    ]
    assert [each["problem"] for each in found] == [
        f"pid {pids[0]} has failed: ValueError: a bad batch",
        f"pids {pids[1]}, {pids[2]} have failed: OSError: no such file: data/7",
    ]
    assert "ValueError: a bad batch" in shown()
    assert "OSError: no such file: data/7" in shown()
    answer = ask("show", job.NAME)
    events = [(one["kind"], one["pid"], one["reason"]) for one in answer["events"]]
    assert ("failed", pids[0], "ValueError: a bad batch") in events
    (departed,) = answer["departed"]
    assert (departed["pid"], departed["died"], departed["applied"]) == (pids[0], False, 1)
    assert departed["reason"] == "ValueError: a bad batch"
    labels = [each["labels"] for each in samples("shmacc_failure_timestamp_seconds")]
    assert [one["pid"] for one in labels] == [str(pid) for pid in pids]
    # The label is only the type: texts have byte counts and file names, and each would be a series.
    assert [one["reason"] for one in labels] == ["ValueError", "OSError", "OSError"]


@job.impatient
def test_a_take_that_waits_for_failed_workers_names_them(crew: Crew) -> None:
    """A parent that only keeps the segment open is not expected to apply."""
    job.begin(crew, job.pause)
    job.once(crew, job.apply, job.take(1))
    pid = failed(crew, ValueError("a bad\n\x1b[2Jbatch"), job.apply)
    job.begin(crew, job.take(2))
    job.named(StallKind.QUORUM_OUT_OF_REACH)
    assert f"pid {pid} has failed: ValueError: a bad\n\x1b[2Jbatch" in job.problem()
    assert f"pid {pid} has failed: ValueError: a bad??[2Jbatch" in shown()


@job.impatient
def test_a_chief_that_failed_is_named_with_its_exception(crew: Crew) -> None:
    pid = failed(crew, KeyError("lr"), job.apply, job.take(1))
    job.begin(crew, job.wait_for_ever)
    job.named(StallKind.NOBODY_TAKES)
    assert job.problem().endswith(f"pid {pid}, which did, has failed: KeyError: 'lr'")
    (stall,) = inspection.describe(job.NAME).summary.stalls
    assert stall.remedy.startswith("mend what it failed with, then start the process")


@job.impatient
def test_the_death_of_a_chief_in_its_first_block_is_reported(crew: Crew) -> None:
    """The chief has opened its first round; a parent keeps the segment open."""
    job.begin(crew, job.pause)
    chief = job.begin(crew, job.apply, job.hold_a_round)
    until(lambda: inspection.describe(job.NAME).round_holder is not None)
    job.begin(crew, job.wait_for_ever)
    job.kill(chief)
    job.named(StallKind.NOBODY_TAKES)


def test_a_dead_chiefs_final_round_is_shown_with_its_remedy(crew: Crew) -> None:
    job.begin(crew, job.pause)
    chief = job.begin(crew, job.apply, update_and_stay_in_the_block)
    until(lambda: inspection.describe(job.NAME).stats.update == "in")
    final = ask("show", job.NAME)["final_round"]
    assert (final["is_in"], final["pid"], final["held"]) == (True, chief.pid, True)
    assert f"its update, of pid {chief.pid}, is in since" in shown()
    assert "final_round_without_holder" not in notes()
    assert [each["value"] for each in samples("shmacc_round_final")] == [1]
    pid = job.kill(chief)
    assert ask("show", job.NAME)["final_round"]["held"] is False
    assert f"its update, of pid {pid}, is in since" in shown()
    assert "no process has it open: the next one that takes gets it" in shown()
    found = notes()["final_round_without_holder"]
    assert f"pid {pid}" in found["problem"]
    assert "step 0 is final" in found["problem"]
    assert "the next process that takes gets the same gradients" in found["remedy"]
    with Parameters.attach(PARAMS) as arrays, shmacc.attach(job.NAME) as acc, acc.round(5) as taken:
        assert not arrays.update(taken)  # the remedy
    assert "final_round_without_holder" not in notes()
    assert ask("show", job.NAME)["final_round"] is None


def test_a_finished_run_is_no_standstill(crew: Crew) -> None:
    chief = job.begin(crew, job.apply, job.hold_a_round)
    until(lambda: inspection.describe(job.NAME).round_holder is not None)
    job.stop(chief)
    assert job.kinds() == [StallKind.ROUND_HOLDER_STOPPED]
    with shmacc.attach(job.NAME) as acc:
        acc.finish()
    assert job.kinds() == []
    (listed,) = ask("list", job.NAME)["segments"]
    assert (listed["state"], listed["finished"]) == ("finished", True)
    assert run("list", job.NAME).stdout.split()[-1] == "finished"
    assert "the run is over" in shown()
    assert [each["value"] for each in samples("shmacc_finished")] == [1]
    assert run("check", job.NAME, "--quiet").returncode == 0
    refused = run("remove", job.NAME)
    assert (refused.returncode, "in use by pid" in refused.stderr) == (1, True)
    assert run("clean", job.NAME).stdout == ""


@pytest.mark.parametrize(("deeds", "says"), [
    ((job.apply, job.take(1), job.pause), "pid {}, which took before, is alive (sleeping)"),
    ((job.apply, job.hold_a_round), "pid {}, which has a round open"),
])  # fmt: skip
def test_a_chief_that_computes_while_others_wait_is_only_noted(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, deeds: tuple[Callable[[Any], Any], ...], says: str
) -> None:
    """The chief may be computing, so this is no proof of a standstill."""
    chief = job.begin(crew, *deeds)
    job.begin(crew, job.wait_for_ever)
    assert inspection.describe(job.NAME).suspected is None, "others have not waited for long"
    monkeypatch.setattr(_stall_facts, "LONG_IDLE", 0.3)
    until(lambda: inspection.describe(job.NAME).suspected is not None)
    assert job.kinds() == []
    suspected = inspection.describe(job.NAME).suspected
    assert suspected is not None
    assert says.format(chief.pid) in suspected.problem
    (found,) = [each for each in inspection.check(job.NAME) if each.kind == StallKind.TAKER_IDLE]
    assert found.severity is inspection.Severity.NOTE
    job.stop(chief)  # a stopped chief is proof
    assert job.kinds() != []
    assert inspection.describe(job.NAME).suspected is None


def test_parameters_are_shown_with_optimizers_and_slots() -> None:
    contents = {"table": np.zeros((100, 8), np.float32), "ids": np.arange(3)}
    optimizers = {"table": Adagrad(0.05)}
    with Parameters(contents, "table.params", optimizer=optimizers) as params:
        answer = ask("show", "table.params")
        table, ids = answer["members"]
        assert table["optimizer"] == repr(Adagrad(0.05))
        assert table["slots"] == [{"name": "accumulator", "bytes_used": 3200}]
        assert (ids["optimizer"], ids["slots"]) == (None, [])
        used = {region["name"]: region["used"] for region in answer["regions"]}
        assert (used["rows 0"], used["index 0"]) == (3200 + 24, 3200)
        assert answer["summary"]["bytes_used"] >= 6424
        assert (answer["summary"]["kind"], answer["summary"]["global_step"]) == ("parameters", 0)
        said = shown("table.params")
        assert "Adagrad(learning_rate=0.05, initial_accumulator_value=0.1" in said
        assert "accumulator:3.1KiB" in said
        params.unlink()


def update_for_ever(acc: Any) -> None:
    with Parameters.attach("large.params") as arrays:
        while True:
            job.apply(acc, acc.global_step)
            with acc.round(1) as taken:
                arrays.update(taken)


def test_running_and_interrupted_updates_are_shown(crew: Crew) -> None:
    with (
        ConditionalAccumulator(np.float32, [LARGE], "large") as acc,
        Parameters({"w": TensorSpec((LARGE,))}, "large.params", optimizer=SGD(0.5)) as arrays,
    ):
        chief = job.begin(crew, update_for_ever, name="large")
        stop_within(chief.pid, "large.params")
        update = ask("show", "large.params")["update"]
        assert (update["is_interrupted"], update["pid"]) == (False, chief.pid)
        assert f"one runs: pid {chief.pid}" in shown("large.params")
        answer = ask("check", "large.params", status=1)
        (found,) = [each for each in answer["findings"] if each["severity"] == "wrong"]
        assert found["kind"] == StallKind.LOCK_HOLDER_STOPPED
        assert found["problem"] == (
            f"pid {chief.pid} is stopped and holds the lock: no process can update or copy them"
        )
        pid = job.kill(chief)
        update = ask("show", "large.params")["update"]
        assert (update["is_interrupted"], update["pid"]) == (True, pid)
        assert f"one was interrupted by the death of pid {pid}" in shown("large.params")
        noted = notes("large.params")
        assert "operation_interrupted" not in noted, "said once"
        assert f"the death of pid {pid}" in noted["update_interrupted"]["problem"]
        assert noted["update_interrupted"]["remedy"].startswith("nothing: the next update")
        arrays.snapshot()
        assert ask("show", "large.params")["update"] is None
        assert "update_interrupted" not in notes("large.params")
        acc.unlink()
        arrays.unlink()


@pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}")
def test_an_interrupted_load_is_wrong_until_it_is_repeated(tmp_path: Path) -> None:
    def attach() -> dict[str, Any]:
        return {"params": Parameters.attach(PARAMS), "acc": shmacc.attach(job.NAME)}

    with Parameters.attach(PARAMS) as arrays, shmacc.attach(job.NAME) as acc:
        saved = {"params": arrays, "acc": acc}
        shmacc.save(tmp_path / "saved.npz", saved)
        with half_loaded(arrays, loading(tmp_path / "saved.npz", attach)) as loader:
            assert f"of a checkpoint: pid {loader.pid};" in shown(PARAMS)
            found = {one["kind"] for one in ask("check", PARAMS, status=1)["findings"]}
            assert "load_interrupted" not in found, "it is only stopped"
            loader.kill()
        assert "of a checkpoint was interrupted" in shown(PARAMS)
        wrong = {one["kind"]: one for one in ask("check", PARAMS, status=1)["findings"]}
        assert wrong["load_interrupted"]["severity"] == "wrong"
        assert wrong["load_interrupted"]["remedy"].startswith("load the checkpoint again")
        shmacc.load(tmp_path / "saved.npz", saved)
        assert "load_interrupted" not in notes(PARAMS)
        assert "of a checkpoint" not in shown(PARAMS)


def test_parameters_have_metrics_of_their_own() -> None:
    with ConditionalAccumulator(np.float32, [4], "own") as acc, Parameters.attach(PARAMS) as arrays:
        job.apply(acc)
        with acc.round(1) as taken:
            arrays.update(taken)
        acc.unlink()
    (updates,) = samples("shmacc_updates")
    assert (updates["name"], updates["value"]) == ("shmacc_updates_total", 1)
    assert updates["labels"]["name"] == PARAMS
    steps = {each["labels"]["name"]: each["value"] for each in samples("shmacc_step")}
    assert steps[PARAMS] == 1
