"""What was not read is no success: `check` counts it apart, with an exit status of its own."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

import pytest
from helpers.inspect_tool import WITHOUT_ROOTS_POWERS, ask, make_as, run

from shmacc import ConditionalAccumulator

if TYPE_CHECKING:
    from helpers.apart import Crew

NOBODY: Final = 65534
NOT_READ: Final = 4
WEAK: Final = WITHOUT_ROOTS_POWERS

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv"),
]


@pytest.mark.parametrize("asked", [(), ("others*",), ("others0",), ("--quiet",)], ids=str)
def test_segments_that_cannot_be_read_are_no_success(crew: Crew, asked: tuple[str, ...]) -> None:
    for number in range(2):
        crew.start(make_as, NOBODY, f"others{number}").result()
    unread = 1 if asked == ("others0",) else 2
    done = run("check", *asked, before=WEAK)
    assert done.returncode == NOT_READ
    assert "0 segments checked: nothing wrong" in done.stderr
    assert f"{unread} could not be read: NOT checked" in done.stderr
    if "--quiet" not in asked:
        answer = ask("check", *asked, before=WEAK, status=NOT_READ)
        assert (answer["checked"], answer["not_read"], answer["wrong"]) == (0, unread, 0)
    as_root = run("check", *asked)  # as whom they are only orphans
    assert as_root.returncode == 1
    assert "could not be read" not in as_root.stderr
    assert len(ask("clean", "--yes")["removed"]) == 4


def test_what_is_wrong_goes_before_what_was_not_read(crew: Crew) -> None:
    crew.start(make_as, NOBODY, "others").result()
    ConditionalAccumulator("f4", [2], "own").close()
    done = run("check", before=WEAK)
    assert done.returncode == 1
    assert "1 segment checked: 1 wrong" in done.stderr
    assert "1 could not be read: NOT checked" in done.stderr
    ask("clean", "--yes")


def test_what_cannot_be_read_may_stand_still(crew: Crew) -> None:
    crew.start(make_as, NOBODY, "others").result()
    listed = run("list", "--stalled", "--quiet", before=WEAK)
    assert (listed.stdout, listed.returncode) == ("", 0)
    assert "1 segment could not be read: look as root" in listed.stderr
    ask("clean", "--yes")


def test_what_can_be_read_is_a_success(crew: Crew) -> None:
    with ConditionalAccumulator("f4", [2], "own") as acc:
        assert run("check", before=WEAK).returncode == 0
        crew.start(make_as, NOBODY, "others").result()
        assert run("check", "own", before=WEAK).returncode == 0
        assert run("check", before=WEAK).returncode == NOT_READ
        acc.unlink()
    ask("clean", "--yes")
