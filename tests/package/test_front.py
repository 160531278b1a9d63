"""The README's programs, typed as they stand, do what it says, even while processes are killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from helpers import pages
from helpers.support import LONG, until

from shmacc import testing

LEARNT: Final = "100% of the table is learnt\n"
WORKERS: Final = 4


def _without_what_varies(printed: str) -> list[list[str]]:
    """Return the words of each line, without sizes, times and this user's name."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    return [
        [word for word in line.split() if not re.fullmatch(rf"[\d.]+(s|.iB)|root|{user}", word)]
        for line in printed.splitlines()
    ]


def test_the_two_programs_print_what_it_shows(tmp_path: Path) -> None:
    pages.run_page(pages.README, tmp_path, Path(sys.prefix), compared=_without_what_varies)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "train.py").write_text(pages.program_of_readme("train.py"))
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "error", str(tmp_path / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def _children(of: subprocess.Popen[str]) -> list[int]:
    """The children that `pkill -f multiprocessing-fork` would find."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{of.pid}\n" in status.read_text():
                command = status.with_name("cmdline").read_bytes()
                if b"multiprocessing-fork" in command:
                    found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return sorted(found)


def test_the_training_goes_on_whichever_process_is_killed(
    training: subprocess.Popen[str], namespace: str
) -> None:
    until(lambda: len(_children(training)) == WORKERS + 1)
    for pid in _children(training):  # chief and workers, each in turn
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pid not in _children(training))  # type: ignore[misc]
        until(lambda: len(_children(training)) == WORKERS + 1)
    for pid in _children(training):  # all at once
        os.kill(pid, signal.SIGKILL)
    printed, told = training.communicate(timeout=LONG)
    assert printed == LEARNT
    assert len(re.findall("was killed by SIGKILL, and is started again", told)) == 2 * (WORKERS + 1)
    assert "chief (pid" in told
    assert testing.leaked_names(namespace) == ()


def test_the_end_of_the_training_ends_all_processes(training: subprocess.Popen[str]) -> None:
    until(lambda: len(_children(training)) == WORKERS + 1)
    children = _children(training)
    training.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
