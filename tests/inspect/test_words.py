"""What `shmacc-inspect` says: once, to the point, in one unit, and of the thing that was given."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.inspect_tool import ask, idle, run, start
from helpers.support import until

from shmacc import ConditionalAccumulator, errors, inspection
from shmacc.inspection import _unlinked
from shmacc_inspect.parsers import VERBS

if TYPE_CHECKING:
    from helpers.apart import Crew

LONG_NAME = "n" * 5000


def test_what_is_unknown_is_empty_in_json(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        child = start(crew, idle, "acc")
        child.kill()
        (dead,) = [one for one in ask("show", "acc")["processes"] if not one["alive"]]
        assert (dead["condition"], dead["command"]) == ("", "")
        acc.unlink()


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
