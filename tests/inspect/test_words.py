"""What `shmacc-inspect` says: once, to the point, in one unit, and of the thing that was given."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import inspect_tool
from helpers import segment_layout as layout
from helpers.inspect_tool import ask, idle, path_of, run, start, wait_in_line
from helpers.lock_holder import sleeps_in
from helpers.standing_still import stop
from helpers.support import until

from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors, inspection
from shmacc.inspection import _unlinked
from shmacc_inspect.parsers import VERBS

if TYPE_CHECKING:
    from helpers.apart import Crew

LONG_NAME = "n" * 5000


def test_clean_counts_the_same_things_before_and_after() -> None:
    for name in ("one", "two"):
        ConditionalAccumulator(np.float32, [2], name).close()
    assert "2 things to remove" in run("clean").stderr
    cleaned = run("clean", "--yes")
    assert len(cleaned.stdout.splitlines()) == 4, "with their semaphores"
    assert "2 things removed" in cleaned.stderr


def test_a_groups_round_has_no_shape_of_its_first_member() -> None:
    specs = {"a": TensorSpec((2, 3)), "b": TensorSpec((5,))}
    with AccumulatorGroup(specs, "group") as group:
        group.apply({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}, 0)
        assert ask("show", "group")["round_shape"] is None
        assert "of shape" not in run("show", "group").stdout
        group.unlink()


def test_what_is_unknown_is_empty_in_json(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        child = start(crew, idle, "acc")
        child.kill()
        (dead,) = [one for one in ask("show", "acc")["processes"] if not one["alive"]]
        assert (dead["condition"], dead["command"]) == ("", "")
        acc.unlink()


def test_findings_with_one_remedy_say_it_once(crew: Crew) -> None:
    made = [ConditionalAccumulator(np.float32, [2], f"acc-{number}") for number in range(3)]
    for acc in made:
        start(crew, idle, acc.shared_name).kill()
    said = run("check").stdout
    assert said.count("note   ") == 3
    assert said.count("the next process that attaches or waits sweeps them") == 1
    assert said.splitlines()[-1].startswith("       do: nothing")
    assert len({one["remedy"] for one in ask("check")["findings"]}) == 1
    for acc in made:
        acc.unlink()
        acc.close()


def test_dead_processes_are_counted_in_the_plural(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        children = [start(crew, idle, "acc") for _ in range(2)]
        pids = sorted(str(child.pid) for child in children)
        for child in children:
            child.kill()
        (found,) = [one for one in ask("check", "acc")["findings"] if one["kind"] == "dead_entries"]
        assert sorted(re.findall(r"\d+", found["problem"])) == pids
        assert found["problem"].startswith("entries of dead processes: pids ")
        acc.unlink()


def test_users_of_a_removed_segment_are_in_the_plural_and_its_memory_in_one_unit(
    crew: Crew,
) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        pids = sorted([os.getpid(), *(start(crew, idle, "acc").pid for _ in range(2))])
        path_of("acc").unlink()
        own = inspection.check_all(namespace=os.environ["SHMACC_NAMESPACE"])  # not other jobs'
        found = [one for one in own if one.kind == "removed_in_use"]
        assert len(found) == 1
        assert re.match(
            rf"pids {pids[0]}, {pids[1]}, {pids[2]} still use a segment of this name that was "
            r"removed, of [\d.]+ KiB;",
            found[0].problem,
        )
        acc.close()
    run("clean", "--yes")


def test_what_is_damaged_is_said_to_be_so_once() -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        path = path_of("acc")
        acc.apply_grad([1, 2])
    inspect_tool.scribble(path, layout.region("states"), b"\1" * 4096)
    said = run("remove", "acc").stderr
    assert f"{path.name} is damaged: " in said
    assert said.count("damaged") == 1
    inspection.remove("acc", force=True)


def test_a_name_of_5000_characters_is_shortened_wherever_it_is_given() -> None:
    for arguments in (
        ["show", LONG_NAME],
        ["show", f"{LONG_NAME}*"],
        ["show", f"shmacc.{LONG_NAME}"],
        ["list", "-n", LONG_NAME],
        ["wait", LONG_NAME, "--for", "gone"],
        ["wait", "x", "--for", LONG_NAME],
        [LONG_NAME],
        ["help", LONG_NAME],
    ):
        done = run(*arguments)
        assert done.returncode in {2, 3}, arguments
        assert len(done.stderr) < 1000, arguments
    with pytest.raises(errors.InvalidArgumentError, match="5002 characters") as refused:
        ConditionalAccumulator(np.float32, [2], LONG_NAME)
    assert len(str(refused.value)) < 500


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "x"
    done = run("metrics", "--output", str(missing))
    assert done.returncode == 1
    assert f"--output: {missing}: No such file or directory" in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("metrics", "--listen", address)
    assert done.returncode == 1
    assert f"--listen: http://{address}/metrics: Address already in use" in done.stderr


def test_an_option_is_blamed_for_what_it_says() -> None:
    done = run("list", "-n", "a/b")
    assert done.returncode == 2
    assert "--namespace must be 1 to 60" in done.stderr
    assert "SHMACC_NAMESPACE" not in done.stderr
    assert "SHMACC_NAMESPACE must be" in run("list", SHMACC_NAMESPACE="a/b").stderr


def test_help_is_a_verb() -> None:
    assert run("help").stdout == run("--help").stdout
    for verb in VERBS:
        assert run("help", verb).stdout == run(verb, "--help").stdout
    wrong = run("help", "lsit")
    assert wrong.returncode == 2
    assert "there is list" in wrong.stderr


def test_one_gradient_is_in_the_singular(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        taker = start(crew, wait_in_line, "acc", 1)
        until(lambda: sleeps_in("acc", taker.pid, "waits in the queue"))
        stop(taker)
        acc.apply_grad([1, 2])
        (stall,) = inspection.describe("acc").summary.stalls
        assert stall.problem.startswith(f"pid {taker.pid} waits for 1 gradient, which has arrived;")
        acc.unlink()


def test_a_long_command_line_is_shortened_in_findings() -> None:
    """`show` has all of it."""
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        program = (
            f"import shmacc, signal; acc = shmacc.attach('acc'); {'pass;' * 100} signal.pause()"
        )
        other = subprocess.Popen([sys.executable, "-P", "-c", program])
        until(lambda: acc.stats().attached == 2)
        stop(other)
        until(lambda: "process_stopped" in {each.kind for each in inspection.check("acc")})
        (found,) = [each for each in inspection.check("acc") if each.kind == "process_stopped"]
        assert len(found.problem) < 200
        assert f"pid {other.pid} ({sys.executable} -P -c import" in found.problem
        assert "pass;pass;" * 30 in run("show", "acc").stdout
        other.kill()
        other.wait()
        acc.unlink()


def completed(*words: str, described: bool = False) -> list[str]:
    """What is offered for the last word."""
    how = "--complete-described" if described else "--complete"
    return run(how, str(len(words)), *words).stdout.splitlines()


def test_values_of_options_are_completed() -> None:
    assert completed("wait", "x", "--for", "") == ["count=", "gone", "step="]
    assert completed("wait", "x", "--for", "st") == ["step="]
    assert completed("help", "wat") == ["watch"]


def test_fish_gets_descriptions() -> None:
    assert f"check\t{VERBS['check']}" in completed("", described=True)
    (orphaned,) = completed("list", "--orph", described=True)
    assert orphaned == "--orphaned\tonly those that no living process has attached"
    assert "--complete-described" in run("--completion", "fish").stdout
    assert "--complete-described" not in run("--completion", "bash").stdout


def test_removal_at_logout_is_noted_only_where_logind_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image has its folders, and nothing that would remove anything."""
    monkeypatch.setattr(_unlinked, "_LOGIND_USERS", str(tmp_path))
    look = inspection.Look()
    assert not _unlinked.goes_at_logout(1000, look)
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    monkeypatch.setattr(_unlinked, "_LOGIND", own)
    assert _unlinked.goes_at_logout(1000, inspection.Look())
    assert not _unlinked.goes_at_logout(0, inspection.Look())


def test_json_is_of_the_events_reasons(crew: Crew) -> None:
    """A reason that there is not is empty."""
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        start(crew, idle, "acc").kill()
        start(crew, idle, "acc")  # which sweeps
        until(lambda: bool(inspection.describe("acc").events))
        events: list[dict[str, Any]] = json.loads(run("show", "acc", "--json").stdout)["events"]
        assert [(one["kind"], one["reason"]) for one in events] == [("died", "")]
        acc.unlink()
