"""What hurts stands where it is seen: on top of lists, at the end of a page, and at 80 columns."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import Terminal, ask, idle, path_of, run, start
from helpers.segment_layout import FILE_SIZE, header_of_version_1
from helpers.standing_still import stop
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew

NAMES: Final = ("a-fine-one", "b-fine-one", "z-stalled")
STALLED: Final = NAMES[-1]


@pytest.fixture
def three() -> Iterator[list[ConditionalAccumulator]]:
    """Three accumulators, of which the last one by name will stand still."""
    made = [ConditionalAccumulator(np.float32, [2], name) for name in NAMES]
    yield made
    for acc in made:
        acc.unlink()
        acc.close()


def have_a_round_open(name: str) -> None:
    """Be a chief that computes."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad([1, 2], local_step=shmacc.NEVER_STALE)
        with acc.round(1):
            signal.pause()


def stand_still(crew: Crew) -> int:
    """Stop a chief in its block; its pid."""
    chief = start(crew, have_a_round_open, STALLED)
    until(lambda: inspection.describe(STALLED).round_holder is not None)
    return stop(chief)


@pytest.mark.usefixtures("three")
def test_what_stands_still_is_listed_first_and_alone(crew: Crew) -> None:
    stand_still(crew)
    ConditionalAccumulator(np.float32, [2], "m-orphan").close()
    listed = run("list", "--sort", "state", "--quiet").stdout.split()
    assert listed == [STALLED, "m-orphan", *NAMES[:-1]]
    assert run("list", "--stalled", "--quiet").stdout.split() == [STALLED]
    assert [one["name"] for one in ask("list", "--stalled")["segments"]] == [STALLED]
    watched = run("watch", "--count", "1", "--interval", "0.05").stdout.splitlines()
    assert watched[0].split()[1] == STALLED
    inspection.remove("m-orphan")


@pytest.mark.usefixtures("three")
def test_watch_shows_at_80_columns_what_stands_still_on_top(crew: Crew) -> None:
    stand_still(crew)
    with Terminal("watch", "--interval", "0.1", columns=80, rows=24) as terminal:
        lines = terminal.wait_for("STALL", "round_holder_stopped").splitlines()
        (titles,) = [
            number for number, line in enumerate(lines) if "STEP" in line and "NAME" in line
        ]
        assert "STATE" in lines[titles]
        assert STALLED in lines[titles + 1]
        assert "round_holder_stopped" in lines[titles + 1]
        assert "sound" in lines[titles + 1]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("names", [(), (STALLED,)], ids=["all", "one"])
def test_watch_shows_the_cause_at_40_columns(crew: Crew, names: tuple[str, ...]) -> None:
    """And does not say "sound" of what stands still."""
    stand_still(crew)
    with Terminal("watch", *names, "--interval", "0.1", columns=40, rows=24) as terminal:
        lines = terminal.wait_for("round_holder_stopped").splitlines()
        about = [line for line in lines if STALLED in line]
        assert about
        assert all(line.rstrip().endswith("round_holder_stopped") for line in about)


@pytest.mark.usefixtures("three")
def test_show_at_80x24_ends_with_the_verdict(crew: Crew) -> None:
    pid = stand_still(crew)
    for _ in range(3):
        start(crew, idle, STALLED)
    with Terminal("show", STALLED, columns=80, rows=24) as terminal:
        assert terminal.end() == 0
        lines = [line for line in terminal.text().splitlines() if line]
    at_the_end = " ".join(" ".join(lines[-4:]).split())
    assert f"stands still pid {pid} has a round open and is stopped: no process can" in at_the_end
    assert f"kill -CONT {pid}" in at_the_end
    assert "OFFSET" not in run("show", STALLED).stdout
    assert "OFFSET" in run("show", STALLED, "--layout").stdout
    assert "nothing is known that makes it stand still" in run("show", NAMES[0]).stdout


def hold_open(path: str, read: int) -> None:
    """Have a file open, as a process of another version has."""
    descriptor = os.open(path, os.O_RDONLY)
    os.close(read)
    assert descriptor
    signal.pause()


def test_who_has_a_segment_of_another_version_open_is_named(crew: Crew) -> None:
    path = path_of("old")
    path.write_bytes(header_of_version_1(b"old"))
    os.truncate(path, FILE_SIZE)
    waiting, theirs = os.pipe()
    user = crew.start(hold_open, str(path), theirs)
    os.close(theirs)
    assert os.read(waiting, 1) == b"", "it has opened the file"
    os.close(waiting)
    who = f"pid {user.pid} has it open"
    (listed,) = ask("list", "old")["segments"]
    assert who in listed["detail"]
    (found,) = [
        one for one in ask("check", "old", status=1)["findings"] if one["severity"] == "wrong"
    ]
    assert who in found["problem"]
    remedy = f"shmacc-inspect remove {path.name} --force --yes"
    assert found["remedy"].endswith(f"end its users, then remove it: `{remedy}`")
    assert who in run("remove", "old").stderr
    user.kill()
    assert "has it open" not in ask("list", "old")["segments"][0]["detail"]
    assert run(*remedy.split()[1:]).returncode == 0, "the remedy, pasted"
    assert not path.exists()


def test_the_refusal_of_another_version_says_what_to_do() -> None:
    path = path_of("old")
    path.write_bytes(header_of_version_1(b"old"))
    os.truncate(path, FILE_SIZE)
    with pytest.raises(errors.DataLossError) as refused:
        ConditionalAccumulator(np.float32, [2], "old")
    said = str(refused.value)
    assert "which shmacc 1.0 reads" in said
    assert "another name or namespace (SHMACC_NAMESPACE)" in said
    assert f"shmacc-inspect remove {path.name} --force --yes" in said
    assert (refused.value.version, refused.value.segment) == (1, path.name)
    inspect_tool.other_version(path)
    with pytest.raises(errors.DataLossError, match="which a newer shmacc reads"):
        ConditionalAccumulator(np.float32, [2], "old")
    path.unlink()
