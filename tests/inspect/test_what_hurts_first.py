"""What hurts stands where it is seen: on top of lists, at the end of a page, and at 80 columns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import Terminal, ask, path_of, run
from helpers.segment_layout import FILE_SIZE, header_of_version_1
from helpers.standing_still import apply, begin, hold_a_round, pause, stop
from helpers.support import until

from shmacc import ConditionalAccumulator, errors, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.apart import Crew

NAMES: Final = ("a-fine-one", "b-fine-one", "z-stalled")
STALLED: Final = NAMES[-1]


@pytest.fixture
def stalled(crew: Crew) -> Iterator[int]:
    """Three accumulators, of which the last one by name stands still: its chief's pid."""
    made = [ConditionalAccumulator(np.float32, [2], name) for name in NAMES]
    chief = begin(crew, apply, hold_a_round, name=STALLED)
    until(lambda: inspection.describe(STALLED).round_holder is not None)
    yield stop(chief)
    for acc in made:
        acc.unlink()
        acc.close()


@pytest.mark.usefixtures("stalled")
def test_what_stands_still_is_listed_first_and_alone() -> None:
    ConditionalAccumulator(np.float32, [2], "m-orphan").close()
    listed = run("list", "--sort", "state", "--quiet").stdout.split()
    assert listed == [STALLED, "m-orphan", *NAMES[:-1]]
    assert run("list", "--stalled", "--quiet").stdout.split() == [STALLED]
    assert [one["name"] for one in ask("list", "--stalled")["segments"]] == [STALLED]
    watched = run("watch", "--count", "1", "--interval", "0.05").stdout.splitlines()
    assert watched[0].split()[1] == STALLED
    inspection.remove("m-orphan")


@pytest.mark.usefixtures("stalled")
def test_watch_shows_what_stands_still_on_top_at_80_columns_and_its_cause_at_40() -> None:
    """And does not say "sound" of what stands still, unless it says that, too."""
    with Terminal("watch", "--interval", "0.1", columns=80, rows=24) as terminal:
        lines = terminal.wait_for("STALL", "round_holder_stopped").splitlines()
        (titles,) = [n for n, line in enumerate(lines) if "STEP" in line and "NAME" in line]
        assert "STATE" in lines[titles]
        for words in (STALLED, "round_holder_stopped", "sound"):
            assert words in lines[titles + 1]
    for names in ((), (STALLED,)):
        with Terminal("watch", *names, "--interval", "0.1", columns=40, rows=24) as terminal:
            lines = terminal.wait_for("round_holder_stopped").splitlines()
            about = [line.rstrip() for line in lines if STALLED in line]
            assert about
            assert all(line.endswith("round_holder_stopped") for line in about)


def test_show_at_80x24_ends_with_the_verdict(stalled: int, crew: Crew) -> None:
    for _ in range(3):
        begin(crew, pause, name=STALLED)
    with Terminal("show", STALLED, columns=80, rows=24) as terminal:
        assert terminal.end() == 0
        lines = [line for line in terminal.text().splitlines() if line]
    at_the_end = " ".join(" ".join(lines[-4:]).split())
    verdict = f"stands still pid {stalled} has a round open and is stopped: no process can"
    assert verdict in at_the_end
    assert f"kill -CONT {stalled}" in at_the_end
    assert "OFFSET" not in run("show", STALLED).stdout
    assert "nothing is known that makes it stand still" in run("show", NAMES[0]).stdout


@pytest.fixture
def old() -> Iterator[Path]:
    """A segment of version 1."""
    path = path_of("old")
    path.write_bytes(header_of_version_1(b"old"))
    os.truncate(path, FILE_SIZE)
    yield path
    path.unlink(missing_ok=True)


def hold_open(path: str, read: int) -> None:
    """Have a file open, as a process of another version has."""
    assert os.open(path, os.O_RDONLY)
    os.close(read)
    pause(None)


def test_who_has_a_segment_of_another_version_open_is_named(crew: Crew, old: Path) -> None:
    waiting, theirs = os.pipe()
    user = crew.start(hold_open, str(old), theirs)
    os.close(theirs)
    assert os.read(waiting, 1) == b"", "it has opened the file"
    os.close(waiting)
    who = f"pid {user.pid} has it open"
    (listed,) = ask("list", "old")["segments"]
    assert who in listed["detail"]
    findings = ask("check", "old", status=1)["findings"]
    (found,) = [one for one in findings if one["severity"] == "wrong"]
    assert who in found["problem"]
    remedy = f"shmacc-inspect remove {old.name} --force --yes"
    assert found["remedy"].endswith(f"end its users, then remove it: `{remedy}`")
    assert who in run("remove", "old").stderr
    user.kill()
    assert "has it open" not in ask("list", "old")["segments"][0]["detail"]


def test_the_refusal_of_another_version_says_what_to_do(old: Path) -> None:
    with pytest.raises(errors.DataLossError) as refused:
        ConditionalAccumulator(np.float32, [2], "old")
    said = str(refused.value)
    assert "which shmacc 1.0 reads" in said
    assert "another name or namespace (SHMACC_NAMESPACE)" in said
    assert f"shmacc-inspect remove {old.name} --force --yes" in said
    assert (refused.value.version, refused.value.segment) == (1, old.name)
    inspect_tool.other_version(old)
    with pytest.raises(errors.DataLossError, match="which a newer shmacc reads"):
        ConditionalAccumulator(np.float32, [2], "old")
