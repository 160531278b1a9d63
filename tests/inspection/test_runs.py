"""Inspection of runs: their segments, restarts of their processes, and what a dead run leaves."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.apart import run_apart
from helpers.inspect_tool import ask, run
from helpers.support import LONG, stop, until

import shmacc
from shmacc import inspection, testing
from shmacc._base import names
from shmacc._run import record
from shmacc._run.record import State
from shmacc._segment import run_records
from shmacc.inspection import _stall_facts

needs_root: Final = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
_PROGRAM: Final = """
    import os, sys
    from pathlib import Path
    import numpy as np
    import shmacc
    from helpers.support import until

    folder = Path(sys.argv[1])

    def work(rank):
        until(lambda: not (folder / "hold").exists())
        with shmacc.AccumulatorGroup.attach("model", timeout=60) as group:
            for step in group.steps(timeout=60):
                group.apply({"w": np.ones(2, np.float32)}, step, contributor=rank)

    def lead():
        adam = shmacc.optim.SGD(0.1)
        with shmacc.Parameters({"w": np.zeros(2, np.float32)}, "params", optimizer=adam) as params:
            with shmacc.AccumulatorGroup(params.member_specs(), "model") as group:
                while not (folder / "end").exists():
                    with group.round(2, timeout=60) as taken:
                        params.update(taken)
                group.finish()
                (folder / "steps").write_text(str(params.step))

    if __name__ == "__main__":
        name = sys.argv[2] if len(sys.argv) > 2 else None
        shmacc.run(lead, work, workers=2, context="fork", name=name)
"""


class Started:
    """A run in another process, with this name or, if it is None, without a name."""

    def __init__(self, folder: Path, name: str | None = "digits") -> None:
        self.folder = folder
        path = folder / "a program.py"
        path.write_text(textwrap.dedent(_PROGRAM))
        self.process = subprocess.Popen(
            [sys.executable, "-P", path, folder, *([name] if name else [])],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        self.pid = self.process.pid
        until(lambda: bool(self._find()))
        self.run = self._find()[0]
        until(lambda: len(self.workers()) == 2)

    def _find(self) -> list[str]:
        return [each.label for each in inspection.list_runs(names.current_namespace())]

    def _segments(self) -> tuple[inspection.Summary, ...]:
        return inspection.list_segments(namespace=names.current_namespace())

    def workers(self) -> list[int]:
        try:
            seen = inspection.describe(f"{self.run}/model")
        except shmacc.errors.ShmaccError:
            return []
        return [each.pid for each in seen.processes if each.alive and each.applied]

    def kill_a_worker(self) -> None:
        """Kill a worker. The worker that replaces it waits before it attaches."""
        (self.folder / "hold").touch()
        os.kill(self.workers()[0], signal.SIGKILL)

    def end(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)
        (self.folder / "end").touch()
        assert self.process.wait(LONG) == 0

    def kill(self) -> None:
        """Kill the process that called `run`: the children end, too."""
        self.process.kill()
        self.process.wait()
        until(lambda: not any(each.attached_alive for each in self._segments()))


@pytest.fixture
def start(tmp_path: Path, namespace: str) -> Iterator[Callable[..., Started]]:
    found: list[Started] = []

    def begin(name: str | None = "digits") -> Started:
        found.append(Started(tmp_path, name))
        return found[-1]

    yield begin
    for each in found:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGCONT)
            each.end()
    until(lambda: not testing.leaked_names(namespace))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let standstills be reported at once."""
    for patience in ("AT_THE_START", "AFTER_TAKES", "AFTER_GRADIENTS", "LONG_IDLE"):
        monkeypatch.setattr(_stall_facts, patience, 0.3)


def findings(*arguments: str) -> dict[str, dict[str, Any]]:
    done = run("check", "--json", *arguments)
    return {each["kind"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize("name", ["digits", None])
def test_each_verb_of_a_namespace_includes_its_runs(
    name: str | None, start: Callable[..., Started], namespace: str
) -> None:
    started = start(name)
    both = [f"{started.run}/model", f"{started.run}/params"]
    assert started.run == "digits" if name else started.run.startswith("run-")
    for given in ([], ["*"], [f"{started.run}/*"], ["[mp]*"]):
        listed = ask("list", *given)["segments"]
        assert [each["name"] for each in listed] == both
        assert [each["namespace"] for each in listed] == [f"{namespace}.{started.run}"] * 2
    assert both == run("list", "--quiet").stdout.split()
    for scope in (f"{namespace}*", f"{namespace}.{started.run}"):
        assert len(run("list", "--quiet", "-n", scope).stdout.split()) == 2
    assert ask("show", both[0])["summary"]["kind"] == "group"
    assert "2 segments checked: " in run("check").stderr
    assert "1 segment checked: " in run("check", both[0]).stderr
    assert both[0] in run("watch", "--count", "1", "--interval", "0.05").stdout
    assert run("wait", both[0], "--for", "step=1").returncode == 0
    assert ask("cancel", both[0])["dry_run"]
    for verb in (["show"], ["clean"], ["check"], ["wait", "--for", "gone"]):
        told = run(*verb, started.run)
        assert (told.returncode, f"'{started.run}/*'" in told.stderr) == (3, True)
    missing = run("show", "model")
    assert missing.returncode == 3
    assert f"; there is {both[0]}" in missing.stderr
    metrics = {each["name"]: each["samples"] for each in ask("metrics")["metrics"]}
    spaces = {each["labels"]["namespace"] for each in metrics["shmacc_step"]}
    assert spaces == {f"{namespace}.{started.run}"}
    restarts = {each["labels"]["role"]: each["value"] for each in metrics["shmacc_run_restarts"]}
    assert restarts == {"chief": 0, "worker 0": 0, "worker 1": 0}


def test_a_name_with_a_slash_is_a_segments_name_if_no_such_run_exists(namespace: str) -> None:
    with shmacc.ConditionalAccumulator("f4", (), "digits/model", unlink_on_close=True) as acc:
        assert run("list", "-q").stdout.split() == ["digits/model"]
        with record.kept(f"{namespace}.digits", ["chief"], named=True, restarts=3):
            written = f"shmacc.{namespace}:digits%2Fmodel"
            assert run("list", "-q").stdout.split() == [written]
            assert run("show", "digits/model").returncode == 3
            assert run("show", written).returncode == 0
        assert acc.num_accumulated() == 0
    run_records.remove_namespace(namespace)


def test_check_counts_the_segments_that_it_skipped(namespace: str) -> None:
    assert "0 segments checked: nothing to check" in run("check").stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMACC_NAMESPACE", f"{namespace}.no-run")
        acc = shmacc.ConditionalAccumulator("f4", (), "kept", unlink_on_close=True)
    with acc:
        told = run("check").stderr
        assert f"NOT checked: 1 in namespaces {namespace}.*, not in its runs" in told
        assert "1 segment checked" in run("check", "-n", f"{namespace}.*").stderr


@needs_root
def test_an_unreadable_record_of_a_run_is_counted_as_not_checked(namespace: str) -> None:
    def leave() -> None:
        with record.kept(f"{namespace}.digits", ["chief"], named=True, restarts=3):
            pass

    run_apart(leave)
    for file in testing.leaked_names(namespace):
        os.chown(f"/dev/shm/{file}", 65534, 65534)  # noqa: S108  it is no temporary file
    done = run("check", weak=True)
    assert done.returncode == 4
    assert "0 segments checked: " in done.stderr
    assert "1 could not be read: NOT checked" in done.stderr
    run_records.remove_namespace(namespace)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_its_run_starts_again_is_no_fault(start: Callable[..., Started]) -> None:
    started = start()
    started.kill_a_worker()
    until(lambda: "started_again" in findings())
    found = findings()
    assert all(each["severity"] == "note" for each in found.values()), found
    told = found["started_again"]["problem"]
    assert re.fullmatch(
        rf"worker . has ended: its run, pid {started.pid}, starts it again, 1 of 3", told
    )
    # If the run's process is stopped, it restarts no worker: all waits until it is continued.
    stop(started.pid)
    until(lambda: "quorum_out_of_reach" in findings() or started.workers() == [])
    found = findings()
    assert found["run_stopped"]["severity"] == "wrong"
    for kind in ("run_stopped", "quorum_out_of_reach"):
        assert found[kind]["command"] == f"kill -CONT {started.pid}"
    assert "started_again" not in found
    told = ask("show", "digits/model")["summary"]["stalls"][0]["problem"]
    assert told.endswith(f"; its run's process, pid {started.pid}, is stopped")
    subprocess.run(["sh", "-c", found["run_stopped"]["command"]], check=True)
    (started.folder / "hold").unlink()
    until(lambda: not any(each["severity"] == "wrong" for each in findings().values()))
    before = inspection.describe("digits/model").summary.global_step or 0
    assert run("wait", "digits/model", "--for", f"step={before + 3}").returncode == 0


def test_a_killed_named_run_goes_on_by_the_command_that_check_prints(
    start: Callable[..., Started], tmp_path: Path, namespace: str
) -> None:
    started = start()
    until(lambda: bool(inspection.describe("digits/params").summary.global_step))
    started.kill()
    step = inspection.describe("digits/params").summary.global_step or 0
    found = findings()
    assert "orphaned" not in found
    assert found == {**findings("digits/model"), **found}
    same = re.search(
        r"goes on with the run digits, in .*?: `(.*?)`; or", found["run_gone"]["remedy"]
    )
    assert same
    (tmp_path / "end").touch()
    without = {key: value for key, value in os.environ.items() if key != "SHMACC_NAMESPACE"}
    tests = str(Path(__file__).parents[1])
    subprocess.run(["sh", "-c", same[1]], env=without | {"PYTHONPATH": tests}, check=True)
    assert int((tmp_path / "steps").read_text()) >= step > 0
    assert testing.leaked_names(namespace) == ()


@needs_root
def test_another_users_command_is_not_shown(start: Callable[..., Started], namespace: str) -> None:
    started = start()
    started.kill()
    for file in testing.leaked_names(namespace):
        os.chown(f"/dev/shm/{file}", 65534, 65534)  # noqa: S108  it is no temporary file
    remedy = findings()["run_gone"]["remedy"]
    assert "the same call goes on" in remedy
    assert "a program.py" not in remedy
    assert run("clean", "--yes").returncode == 0


def test_no_remedy_starts_a_dead_run_without_a_name(namespace: str) -> None:
    def be_killed() -> None:
        kept = record.kept(f"{namespace}.run-1-ab", ["chief"], named=False, restarts=3)
        kept.__enter__()
        _make(f"{namespace}.run-1-ab")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="SIGKILL"):
        run_apart(be_killed)
    found = findings()
    assert list(found) == ["run_gone"]
    assert "start" not in found["run_gone"]["remedy"]
    assert "goes on" not in found["run_gone"]["remedy"]
    subprocess.run(["sh", "-c", found["run_gone"]["command"]], check=True, env=_with_tools())
    assert testing.leaked_names(namespace) == ()


def _killed_run(namespace: str, *segments: str) -> None:
    """Leave a named run whose process was killed, with these accumulators."""

    def be_killed() -> None:
        kept = record.kept(namespace, ["chief"], named=True, restarts=3)
        kept.__enter__()
        os.environ["SHMACC_NAMESPACE"] = namespace
        for name in segments:
            shmacc.ConditionalAccumulator("f4", (), name).close()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="SIGKILL"):
        run_apart(be_killed)


def test_a_dead_run_without_segments_is_not_said_to_go_on(namespace: str) -> None:
    _killed_run(f"{namespace}.digits")
    assert re.search(r": no segments yet: run digits, pid [0-9]+: gone\n", run("list").stderr)
    remedy = findings()["run_gone"]["remedy"]
    assert "goes on" not in remedy
    assert remedy.startswith("nothing of it is left, so the same call begins anew: `cd ")
    assert "goes on" not in run("clean").stdout
    assert run("clean", "--yes").returncode == 0


@pytest.mark.parametrize("lives", [True, False])
def test_a_dead_inner_run_is_left_to_its_outer_run(namespace: str, lives: bool) -> None:
    outer = f"{namespace}.digits"
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if lives:
            stack.enter_context(record.kept(outer, ["chief"], named=True, restarts=3))
        else:
            _killed_run(outer)
        patch.setenv("SHMACC_NAMESPACE", outer)
        _killed_run(f"{outer}.inner", "kept")
        patch.setenv("SHMACC_NAMESPACE", f"{outer}.inner")
        with shmacc.attach("kept") as acc:
            acc.finish()
        patch.setenv("SHMACC_NAMESPACE", namespace)
        done = json.loads(run("check", "--json").stdout)["findings"]
        found = {each["subject"]: each for each in done if each["kind"] == "run_gone"}
        inner = found.pop(f"shmacc.{outer}.inner:%run")
        assert (inner["severity"], inner["command"]) == ("note", None)
        assert inner["remedy"].startswith("nothing: its run digits, pid ")
        of_outer = [each["remedy"][:15] for each in found.values()]
        assert of_outer == ([] if lives else ["it has finished"])
    run_records.remove_namespace(outer)
    assert testing.leaked_names(namespace) == ()


def _with_tools() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _make(namespace: str) -> None:
    os.environ["SHMACC_NAMESPACE"] = namespace
    shmacc.ConditionalAccumulator("f4", (), "kept").close()


def test_nothing_of_a_living_run_is_removed(start: Callable[..., Started], namespace: str) -> None:
    started = start()
    in_use = run("remove", "digits/model", "--yes").stderr
    assert "is in use by" in in_use
    assert "--force" not in in_use
    stop(started.pid)  # so that the run starts no process again
    for pid in started.workers():
        os.kill(pid, signal.SIGKILL)
    chief = inspection.list_runs(namespace)[0].roles[0].pid
    os.kill(chief, signal.SIGKILL)
    until(lambda: all(each["state"] == "orphaned" for each in ask("list")["segments"]))
    before = testing.leaked_names(namespace)
    told = run("clean", "--yes")
    assert "0 things removed" in told.stderr
    assert f"its run digits, pid {started.pid}, lives" in told.stderr
    for leftover in inspection.leftovers(namespace=namespace):
        assert inspection.clean(leftover) == ()
    for given in (["digits/model"], ["digits/*"]):
        refused = run("remove", *given, "--yes")
        assert refused.returncode == 1
        assert f"pid {started.pid}, lives" in refused.stderr
        assert "--force" not in refused.stderr
    assert testing.leaked_names(namespace) == before


def test_a_dead_run_is_not_removed_in_parts(start: Callable[..., Started], namespace: str) -> None:
    start().kill()
    before = testing.leaked_names(namespace)
    for arguments in (
        ["clean", "digits/model", "--yes"],
        ["clean", "mod*", "--yes"],
        ["clean", "--older-than", "1h", "--yes"],
        ["remove", "digits/model", "--yes"],
    ):
        run(*arguments)
        assert testing.leaked_names(namespace) == before, arguments
    assert "all of it goes, or nothing" in run("clean", "mod*").stderr
    whole = ask("clean")["would_remove"]
    assert [each["file_name"] for each in whole] == [f"shmacc.{namespace}.digits:%run"]
    with shmacc.ConditionalAccumulator("f4", (), "other") as own:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHMACC_NAMESPACE", f"{namespace}.digits")
            used = shmacc.attach("params")
        assert "in use" in run("clean", "--yes").stderr
        assert set(before) < set(testing.leaked_names(namespace))
        used.close()
        assert set(ask("clean", "--yes")["removed"]) == set(before)
        own.unlink()


def test_a_dead_run_can_be_removed_by_the_names_of_its_segments(
    start: Callable[..., Started], namespace: str
) -> None:
    start().kill()
    assert run("remove", "digits/model", "digits/params", "--yes").returncode == 0
    assert testing.leaked_names(namespace) == ()


def test_a_crash_loop_is_a_fault_and_has_metrics(namespace: str) -> None:
    with record.kept(f"{namespace}.digits", ["chief", "worker 0"], named=True, restarts=9) as kept:
        for end in range(1, 5):
            assert "run_crash_loop" not in findings()
            kept.note(1, State.RUNNING, pid=1)
            kept.note(1, State.DUE, ends=end, due=1.0)
        kept.note(1, State.RUNNING, pid=1, ends=4)
        found = findings()["run_crash_loop"]
        assert found["severity"] == "wrong"
        assert found["problem"].startswith("worker 0 has ended 4 times within ")
        metrics = {each["name"]: each["samples"] for each in ask("metrics")["metrics"]}
        assert {
            "name": "shmacc_run_restarts_total",
            "labels": {"run": f"{namespace}.digits", "role": "worker 0"},
            "value": 4.0,
        } in metrics["shmacc_run_restarts"]
        states = {each["labels"]["state"]: each["value"] for each in metrics["shmacc_run_state"]}
        assert states == {"lives": 1.0, "stopped": 0.0, "gone": 0.0, "unreadable": 0.0}
    run_records.remove_namespace(namespace)


def test_a_name_chosen_by_a_user_runs_no_command_in_a_remedy() -> None:
    """This holds for labels, names on a terminal or in a pipe, and texts of alerts."""
    hostile = "x$(id>ran)`id>ran`;id>ran 'id' \"id\""
    with shmacc.ConditionalAccumulator("f4", (), hostile, unlink_on_close=True):
        labels = {
            key: value
            for metric in ask("metrics")["metrics"]
            for sample in metric["samples"]
            for key, value in sample["labels"].items()
        }
        assert all(
            shlex.split(each) == ([each] if each else []) or " " in each for each in labels.values()
        )
        (name,) = run("list", "--quiet").stdout.split()
        assert shlex.split(f"x {name}") == ["x", name]
        assert not re.search(r"[$`;|&<>(){}'\"*?]", "".join(labels.values()) + name)
        alert = f"shmacc.{labels['namespace']}:{labels['name']}"
        assert run("show", alert).returncode == 0
    alerts = Path(__file__).parents[2] / "docs" / "inspect" / "alerts.yml"
    for line in re.findall(r"^ +do: \"(.*)\"}$", alerts.read_text("utf-8"), re.MULTILINE):
        assert "$labels" not in re.sub(r"'[^']*'", "", line), line


def test_a_damaged_record_of_a_run_is_reported(namespace: str) -> None:
    path = Path(names.of_run(f"{namespace}.digits").path)
    path.write_bytes(b"no record" * 100)
    found = findings()
    assert found["damaged"]["subject"] == path.name
    subprocess.run(["sh", "-c", found["damaged"]["command"]], check=True, env=_with_tools())
    assert not path.exists()


def test_a_run_in_a_long_namespace_is_included(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = ("n" * 60)[: 60 - len(str(os.getpid()))] + str(os.getpid())
    monkeypatch.setenv("SHMACC_NAMESPACE", outer)
    assert shmacc.run(_listed, args=(outer,), context="fork") == ["kept"]


def _listed(outer: str) -> list[str]:
    with shmacc.ConditionalAccumulator("f4", (), "kept"):
        return [each.shared_name for each in inspection.list_names(namespace=outer)]


def test_a_segment_in_a_run_is_resolved_by_its_label(namespace: str) -> None:
    with record.kept(f"{namespace}.digits", ["chief"], named=True, restarts=3):
        found = inspection.resolve("digits/a b")
        assert found.system_name == f"shmacc.{namespace}.digits:a%20b"
        assert inspection.in_run(found) == "digits/a b"
        assert inspection.resolve("others/a").shared_name == "others/a"
    run_records.remove_namespace(namespace)
