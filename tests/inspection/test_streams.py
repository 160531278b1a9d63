"""`shmacc-inspect` with pipes, closed streams and full disks, and after Ctrl-C."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.apart import Crew
from helpers.inspect_tool import (
    COMMAND,
    HEEDING_CTRL_C,
    ask,
    run,
    start,
    stopped_with_the_lock,
    wait_in_queue,
)
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator


@pytest.fixture(autouse=True)
def table() -> Iterator[SparseConditionalAccumulator]:
    with SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as acc:
        acc.apply_grad([3, 5], np.ones((2, 16), np.float32))
        yield acc
        acc.unlink()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which $I is the command."""
    return run("-c", line, command=("bash",), I=str(COMMAND))


def test_in_a_pipe_each_cell_is_a_word(table: SparseConditionalAccumulator, crew: Crew) -> None:
    ConditionalAccumulator(np.float32, [2], "left").close()
    taker = start(crew, wait_in_queue, "table", 5)
    until(lambda: table.stats().waiting == 1)
    title, *rows = run("list").stdout.splitlines()
    columns = title.split()
    assert columns[-1] == "STATE"
    assert [len(row.split()) for row in rows] == [len(columns)] * 2
    by_title = dict(zip(columns, rows[1].split(), strict=True))
    assert by_title["WAITS_FOR"] == "5"
    assert re.fullmatch(r"\d+\.\d[KMG]iB", by_title["RESERVED"])  # `sort -h` can sort it
    assert re.fullmatch(r"\d+\.\ds", by_title["AGE"])
    # In `show`, the last column may have several words: it is a command line.
    shown = run("show", "table").stdout
    [processes] = re.findall(r"^ *PID.*(?:\n.+)+", shown, re.MULTILINE)[:1]
    heading, *lines = processes.splitlines()
    place = heading.split().index("COMMAND")
    assert place == len(heading.split()) - 1
    program, *_ = Path("/proc/self/cmdline").read_text().split("\0")  # the child's command is ours
    assert all(line.split(maxsplit=place)[place].startswith(f"{program} ") for line in lines)
    table.cancel()
    taker.result()
    assert run("clean", "--yes", "left").returncode == 0


@pytest.mark.parametrize(("verb", "where", "reason"), [
    ("list", ">&-", "Bad file descriptor"), ("list", ">/dev/full", "No space left"),
    ("watch --count 1 --interval 0.05", ">/dev/full", "No space left"),
    ("--help", ">&-", "Bad file descriptor"), ("list --help", ">/dev/full", "No space left"),
])  # fmt: skip
def test_a_stdout_that_cannot_be_written_is_a_failure(verb: str, where: str, reason: str) -> None:
    done = shell(f"$I {verb} {where}")
    assert done.returncode == 1, (verb, where)
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_closed_streams_that_are_not_needed_change_nothing() -> None:
    for line in ("$I check 2>&-", "$I check <&- >&- 2>&-"):
        done = shell(line)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), line
    # Messages for stderr must not go to stdout instead.
    assert shell("$I show nobody 2>&-").stdout == ""


INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
INTERRUPTED_PARSER = """

def _into_another_exception(*_):
    try:
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit("Ctrl-C came to nothing")
    except KeyboardInterrupt as interrupt:
        raise AttributeError("what it was in the middle of") from interrupt

ArgumentParser.parse_known_intermixed_args = _into_another_exception
"""


@pytest.mark.parametrize(("module", "before", "after", "line"), [
    ("dataclasses", INTERRUPTED, "", "list"), ("argparse", INTERRUPTED, "", "watch nobody"),
    ("argparse", "", INTERRUPTED_PARSER, "list"),
])  # fmt: skip
def test_ctrl_c_during_the_start_ends_the_command_quietly(
    tmp_path: Path, module: str, before: str, after: str, line: str
) -> None:
    """The signal comes during imports, which take most of the first 100 ms, or later."""
    real = Path(subprocess.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    (tmp_path / f"{module}.py").write_text(before + real + after, encoding="utf-8")
    done = run(*line.split(), before=HEEDING_CTRL_C, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def watching(*before: str, count: str = "1000000") -> subprocess.Popen[str]:
    """Start `watch` in pipes, and read its first line."""
    command = [*before, str(COMMAND), "watch", "table", "--interval", "0.05", "--count", count]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "table" in process.stdout.readline()
    return process


def test_ctrl_c_ends_a_watch_in_a_pipe_unless_it_is_ignored() -> None:
    """Shells without job control make background jobs ignore Ctrl-C."""
    heeding, ignoring = watching(*HEEDING_CTRL_C), watching("env", "--ignore-signal=INT", count="5")
    for process, status in ((heeding, 130), (ignoring, 0)):
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=LONG)
        assert (process.returncode, talk) == (status, "")


def test_a_reader_that_closes_its_pipe_ends_the_command_quietly() -> None:
    with watching() as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.wait(LONG) == -signal.SIGPIPE
        assert process.stderr.read() == ""  # type: ignore[union-attr]


def test_cancel_names_the_waits_for_the_lock_that_it_ends(crew: Crew) -> None:
    """A take that waits for the lock is not in the queue yet, and is cancelled too."""
    with stopped_with_the_lock(crew, "table"):
        taker = start(crew, wait_in_queue, "table", 9)
        until(lambda: "waits-for-the-lock" in run("show", "table").stdout)
        rehearsal = run("cancel", "table")
        assert f"pid {taker.pid}" in rehearsal.stdout
        assert "nobody waits" not in rehearsal.stderr
        answer = ask("cancel", "table", "--yes")
        assert taker.pid in [process["pid"] for process in answer["lock_waiters"]]
        assert taker.result() is None
