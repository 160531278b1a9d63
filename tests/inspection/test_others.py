"""A verb that cannot read other users' segments fails, and suggests no forbidden command."""

import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from helpers.apart import Crew, needs_root
from helpers.inspect_tool import ask, make_as, path_of, run

import shmacc
from shmacc import ConditionalAccumulator

NOBODY: Final = 65534
NOT_READ: Final = 4

pytestmark = needs_root


@pytest.fixture(autouse=True)
def theirs(crew: Crew) -> Iterator[None]:
    crew.start(make_as, NOBODY, "theirs").result()
    yield
    ask("clean", "--yes")


@pytest.mark.parametrize("asked", [(), ("the*",), ("theirs",), ("--quiet",)], ids=str)
def test_unreadable_segments_make_a_verb_fail(asked: tuple[str, ...]) -> None:
    done = run("check", *asked, weak=True)
    assert done.returncode == NOT_READ
    assert "0 segments checked: nothing wrong" in done.stderr
    assert "1 could not be read: NOT checked" in done.stderr
    if "--quiet" not in asked:
        answer = ask("check", *asked, weak=True, status=NOT_READ)
        assert (answer["checked"], answer["not_read"], answer["wrong"]) == (0, 1, 0)
    as_root = run("check", *asked)  # root reads it: it is only an orphan
    assert as_root.returncode == 1
    assert "could not be read" not in as_root.stderr


def test_a_fault_decides_the_exit_status_even_if_segments_are_unreadable() -> None:
    with ConditionalAccumulator("f4", [2], "own"):
        assert run("check", "own", weak=True).returncode == 0
        assert run("check", weak=True).returncode == NOT_READ
    done = run("check", weak=True)
    assert done.returncode == 1
    assert "1 segment checked: 1 wrong" in done.stderr
    assert "1 could not be read: NOT checked" in done.stderr


def test_unreadable_segments_are_listed_with_an_unknown_state() -> None:
    said = ask("list")["segments"][0]
    assert (said["owner_uid"], said["state"]) == (NOBODY, "orphaned")
    said = ask("list", weak=True)["segments"][0]
    assert (said["owner_uid"], said["state"]) == (NOBODY, "not ours to read")
    assert said["kind"] is None
    assert f"uid {NOBODY}" in ask("show", "theirs", weak=True, status=1)["error"]
    listed = run("list", "--stalled", "--quiet", weak=True)
    assert (listed.stdout, listed.returncode) == ("", 0)
    assert "1 segment could not be read: look as root" in listed.stderr


def _update_as(uid: int) -> None:
    os.setuid(uid)
    with (
        shmacc.Parameters({"w": np.ones(2)}, "params", optimizer=shmacc.optim.SGD(0.5)) as params,
        shmacc.AccumulatorGroup(params.member_specs(), "acc", mode=0o644) as group,
    ):
        group.apply({"w": np.ones(2)}, 0)
        with group.round(1) as taken:
            assert params.update(taken)


def test_unreadable_parameters_are_not_said_to_be_removed(crew: Crew) -> None:
    """The remedy for removed parameters would throw the round away."""
    crew.start(_update_as, NOBODY).result()
    kinds = [each["kind"] for each in ask("check", "acc", weak=True, status=1)["findings"]]
    assert "orphaned" in kinds
    assert "of_other_parameters" not in kinds


def test_clean_reports_other_users_segments_in_one_line() -> None:
    done = run("clean", "--yes", weak=True)
    assert (done.returncode, done.stdout) == (0, "")
    left = [line.split()[2] for line in done.stderr.splitlines() if " left " in line]
    assert left == [f"{path_of('theirs').name}:"]
    assert len(ask("clean", "--yes")["removed"]) == 2


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_dry_run_promises_nothing_that_is_refused(mode: int) -> None:
    path_of("theirs").chmod(mode)
    for verb in (["remove", "theirs"], ["remove", "theirs", "--force"], ["cancel", "theirs"]):
        rehearsed, done = run(*verb, weak=True), run(*verb, "--yes", weak=True)
        assert (rehearsed.returncode, done.returncode) == (1, 1), verb
        assert "would" not in rehearsed.stdout
    answer = ask("remove", "theirs", status=1, weak=True)
    assert (answer["refused"], answer["would_remove"]) == (True, [])
    assert "--force" not in run("remove", "theirs", weak=True).stderr  # it would not help
    assert ask("clean", weak=True)["would_remove"] == []
    if mode == 0o644:
        (left,) = ask("clean", weak=True)["left"]
        assert f"it belongs to uid {NOBODY}" in left["why"]
    rehearsed = run("remove", "theirs")
    assert rehearsed.stdout.splitlines() == [
        f"would remove {name}" for name in ask("remove", "theirs", "--yes")["removed"]
    ]


def test_the_remedy_for_another_users_segment_names_its_owner_or_root() -> None:
    path = path_of("theirs")
    os.truncate(path, 100)
    path.chmod(0o644)
    findings = ask("check", "theirs", status=1, weak=True)["findings"]
    (finding,) = [each for each in findings if each["severity"] == "wrong"]
    assert "as its owner or as root" in finding["remedy"]
    assert run("remove", "theirs", "--force", "--yes").returncode == 0
