"""README's programs, run as it says, do what it says, even while processes are killed."""

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
from helpers.support import LONG, run_to_end, until

from shmacc import testing

LEARNT: Final = "100% of the table is learnt\n"
ROLES: Final = {"chief", *(f"worker {rank}" for rank in range(4))}


def _without_what_varies(printed: str) -> list[list[str]]:
    """Return the words of each line, without sizes, times and this user's name."""
    user = run_to_end(["id", "-un"]).stdout.strip()
    return [
        [word for word in line.split() if not re.fullmatch(rf"[\d.]+(s|.iB)|root|{user}", word)]
        for line in printed.splitlines()
    ]


def test_the_readmes_programs_are_those_of_the_examples() -> None:
    shown = [block for kind, block in pages.blocks_of(pages.README) if kind == "python"]
    files = [pages.FIRST / f"{name}.py" for name in ("worker", "chief", "train")]
    assert shown == [path.read_text() for path in files]


def test_the_readmes_commands_print_what_it_shows() -> None:
    [commands] = [block for kind, block in pages.blocks_of(pages.README) if kind == "console"]
    pages.run_commands(commands, pages.ROOT, Path(sys.prefix), compared=_without_what_varies)


class Training:
    """README's third program, and what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.printed = process.stdout

    def next_start(self) -> tuple[str, int]:
        """Return role and pid of the next process that has started."""
        for line in self.printed:
            if started := re.fullmatch(r"(.*) has started \(pid (\d+)\)\n", line):
                return started[1], int(started[2])
        raise AssertionError("no process has started")

    def starts(self) -> dict[str, int]:
        return dict(self.next_start() for _ in ROLES)


@pytest.fixture
def training() -> Iterator[Training]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", pages.FIRST / "train.py"],
        cwd=pages.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield Training(process)


def test_training_goes_on_whichever_process_is_killed(training: Training, namespace: str) -> None:
    pids = training.starts()
    assert set(pids) == ROLES
    for role, pid in pids.items():
        os.kill(pid, signal.SIGKILL)
        again, pids[role] = training.next_start()
        assert again == role
    for pid in pids.values():  # all at once
        os.kill(pid, signal.SIGKILL)
    assert set(training.starts()) == ROLES
    *_, last = training.printed
    assert last == LEARNT
    assert training.process.wait(LONG) == 0
    assert testing.leaked_names(namespace) == ()


def test_a_fourth_kill_of_the_same_process_ends_the_training(training: Training) -> None:
    pid = training.starts()["worker 2"]
    for _ in range(3):
        os.kill(pid, signal.SIGKILL)
        role, pid = training.next_start()
        assert role == "worker 2"
    os.kill(pid, signal.SIGKILL)
    *_, last = training.printed
    assert last.startswith("shmacc.errors.WorkerDiedError: worker 2")
    assert training.process.wait(LONG) == 1


def test_the_end_of_the_training_ends_all_processes(training: Training) -> None:
    pids = training.starts().values()
    training.process.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
