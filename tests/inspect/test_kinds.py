"""`shmacc-inspect` on shared arrays, which have no steps and no gradients, and on what happened."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import COMMAND, Terminal, ask, run, start, stopped_with_the_lock
from helpers.support import until

from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    SharedArrays,
    SparseConditionalAccumulator,
    TensorSpec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew


@pytest.fixture
def parameters() -> Iterator[SharedArrays]:
    """Two arrays of 520 bytes in all, gone after the test."""
    with SharedArrays(
        {"w": np.zeros((10, 12), np.float32), "on": np.ones(40, np.bool_)}, "p"
    ) as it:
        yield it
        it.unlink()


def test_arrays_that_are_one_integer_are_shown_with_what_they_are() -> None:
    contents = {
        "many": np.int64(2**40),
        "less": np.int8(-3),
        "top": np.uint64(2**64 - 1),
        "real": np.float64(1.5),
        "row": np.arange(3),
    }
    with SharedArrays(contents, "counts") as arrays:
        assert {one["name"]: one["value"] for one in ask("show", "counts")["members"]} == {
            "many": 2**40,
            "less": -3,
            "top": 2**64 - 1,
            "real": None,
            "row": None,
        }
        arrays["many"][...] += 1
        said = run("show", "counts").stdout
        [line] = [line for line in said.splitlines() if line.strip().startswith("many")]
        assert line.split()[-1] == str(2**40 + 1)
        arrays.unlink()


def test_arrays_are_shown_with_their_bytes_and_nothing_else(parameters: SharedArrays) -> None:
    [segment] = ask("list")["segments"]
    assert [
        segment[field] for field in ("global_step", "num_accumulated", "rows", "waiting_for")
    ] == [None] * 4
    assert (segment["kind"], segment["members"], segment["reduction_type"]) == ("arrays", 2, None)
    titles, row = (line.split() for line in run("list").stdout.splitlines())
    cells = dict(zip(titles, row, strict=True))
    assert [cells[title] for title in ("SHAPE", "REDUCE", "STEP", "GRADS", "ROWS")] == ["-"] * 5
    shown = ask("show", "p")
    assert {one["name"]: one["bytes_used"] for one in shown["members"]} == {"w": 480, "on": 40}
    [used] = [region["used"] for region in shown["regions"] if region["name"] == "rows 0"]
    assert used == 520
    said = run("show", "p").stdout
    assert "2 shared arrays, 520 B" in said
    for word in ("GRADIENTS", "APPLIED", "TOOK", "waits", "undo"):
        assert word not in said
    samples = [each for metric in ask("metrics")["metrics"] for each in metric["samples"]]
    names = {sample["name"] for sample in samples}
    assert "shmacc_bytes_used" in names
    assert not names & {"shmacc_step", "shmacc_gradients", "shmacc_applied_total"}
    assert parameters["w"].shape == (10, 12)


@pytest.mark.usefixtures("parameters")
def test_what_arrays_have_not_is_refused() -> None:
    for arguments in (
        ["wait", "p", "--for", "step=1"],
        ["wait", "p", "--for", "count=1"],
        ["show", "p", "--rows", "1"],
        ["show", "p", "--values"],
        ["cancel", "p"],
        ["cancel", "p", "--yes"],
    ):
        done = run(*arguments)
        assert (done.returncode, "shared arrays" in done.stderr) == (2, True), arguments


def test_a_glob_skips_what_the_verb_is_not_for(crew: Crew) -> None:
    """Nothing is left half done: what is named is judged before."""
    with (
        SharedArrays({"a": np.zeros(3)}, "c1") as arrays,
        ConditionalAccumulator(np.float32, [2], "c0") as first,
        ConditionalAccumulator(np.float32, [2], "c2") as last,
    ):
        takers = [start(crew, inspect_tool.wait_in_line, name, 3) for name in ("c0", "c2")]
        until(lambda: first.stats().waiting == last.stats().waiting == 1)
        named = run("cancel", "c0", "c1", "--yes")
        assert (named.returncode, named.stdout) == (2, "")
        assert "nobody takes from shared arrays" in named.stderr
        assert first.stats().waiting == 1, "nothing was done"
        assert run("cancel", "c*", "--yes").returncode == 0
        for taker in takers:
            taker.result()
        assert run("wait", "c*", "--for", "count=0", "--timeout", "10").returncode == 0
        assert run("show", "c*", "--values").returncode == 0
        assert [run("show", glob, "--rows", "1").returncode for glob in ("c*", "c1*")] == [2, 2]
        for acc in (first, last, arrays):
            acc.unlink()


def test_clean_of_a_name_that_is_not_there_says_so() -> None:
    done = run("clean", "typo")
    assert (done.returncode, done.stdout) == (3, "")
    assert "There is no segment named 'typo'" in done.stderr
    assert run("clean", "typo*").returncode == 0
    with ConditionalAccumulator(np.float32, [2], "used") as acc:
        assert "0 things to remove" in run("clean", "used").stderr
        acc.unlink()


@pytest.mark.usefixtures("parameters")
def test_arrays_are_watched() -> None:
    [line] = run("watch", "--count", "1", "--interval", "0.05").stdout.splitlines()
    assert line.endswith(" p state=sound")
    with Terminal("watch", "p", "--interval", "0.1") as terminal:
        seen = terminal.wait_for("2 shared arrays, 520 B")
        for word in ("nobody waits", "APPLIED", "steps/s"):
            assert word not in seen
        terminal.press("q")
        assert terminal.end() == 0


def test_a_group_shows_what_its_members_use() -> None:
    with AccumulatorGroup(
        {"a": TensorSpec([4], np.float32), "b": TensorSpec([2], "f8")}, "g"
    ) as it:
        it.apply({"a": np.ones(4, np.float32)}, local_step=0)
        members = {one["name"]: one["bytes_used"] for one in ask("show", "g")["members"]}
        assert members["a"] >= 16
        assert members["b"] == 0
        it.unlink()


def test_watch_shows_what_happened(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        acc.cancel()
        with Terminal("watch", "acc", "--interval", "0.1", rows=24) as terminal:
            terminal.wait_for("WHEN", "cancelled")
            dead = start(crew, inspect_tool.idle, "acc")
            dead.kill()
            with ConditionalAccumulator.attach("acc"):  # which sweeps it
                terminal.wait_for("died", str(dead.pid))
            screen = terminal.text()
            assert screen.index("died") < screen.index("cancelled")  # the last one first
            terminal.resize(100, 10)
            terminal.wait_for("dead" if "dead" in screen else "idle")
            terminal.press("q")
            assert terminal.end() == 0
        acc.unlink()


def test_watch_in_a_pipe_tells_what_happened_meanwhile(crew: Crew) -> None:
    with SparseConditionalAccumulator(np.float32, [50_000, 16], "acc") as acc:
        acc.cancel()  # before: `show` has it
        with stopped_with_the_lock(crew, "acc"):
            watching = subprocess.Popen(
                [COMMAND, "watch", "acc", "--json", "--interval", "0.2"],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["events"] == []
        acc.cancel()
        acc.apply_grad([1], np.ones((1, 16), np.float32))  # which undoes what was interrupted
        seen: dict[str, int] = {}
        while not seen.keys() >= {"cancelled", "recovered"}:
            for event in json.loads(watching.stdout.readline())["events"]:
                assert event["kind"] not in seen
                seen[event["kind"]] = event["pid"]
        assert seen["cancelled"] == seen["recovered"] == os.getpid()
        watching.kill()
        watching.communicate()
        remembered = ask("show", "acc")["events"]
        assert [event["kind"] for event in remembered].count("recovered") == 1
        acc.unlink()


def test_a_segment_remembers_the_last_64_events() -> None:
    with ConditionalAccumulator(np.float32, [2], "acc") as acc:
        for step in range(70):
            acc.set_global_step(step)
            acc.cancel()
        assert [event["step"] for event in ask("show", "acc")["events"]] == list(range(6, 70))
        acc.unlink()
