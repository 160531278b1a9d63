"""What pipes, closed streams and full disks get, and how shmacc-inspect ends by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import COMMAND, HEEDING_CTRL_C, ask, run, start
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew


@pytest.fixture
def table() -> Iterator[SparseConditionalAccumulator]:
    """A sparse accumulator with a gradient, gone after the test."""
    with SparseConditionalAccumulator(np.float32, [100, 4], "table") as acc:
        acc.apply_grad([3, 5], np.ones((2, 4), np.float32))
        yield acc
        acc.unlink()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which $I is the command."""
    return subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "I": str(COMMAND)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_in_a_pipe_each_cell_is_a_word(table: SparseConditionalAccumulator, crew: Crew) -> None:
    ConditionalAccumulator(np.float32, [2], "left").close()
    taker = start(crew, inspect_tool.wait_in_line, "table", 5)
    until(lambda: table.stats().waiting == 1)
    title, *rows = run("list").stdout.splitlines()
    columns = title.split()
    assert columns[-1] == "STATE"
    assert [len(row.split()) for row in rows] == [len(columns)] * 2
    by_title = dict(zip(columns, rows[1].split(), strict=True))
    assert by_title["WAITS_FOR"] == "5"
    assert re.fullmatch(r"\d+\.\d[KMG]iB", by_title["RESERVED"])
    assert re.fullmatch(r"\d+\.\ds", by_title["AGE"])
    # As `sort -h` takes them.
    sizes = "1.5KiB\n512B\n2.0MiB\n"
    ordered = subprocess.run(
        ["sort", "-h"], input=sizes, capture_output=True, text=True, check=True
    )
    assert ordered.stdout.split() == ["512B", "1.5KiB", "2.0MiB"]
    # Of `show`, but for the last column, which is a command line.
    shown = run("show", "table").stdout
    [processes] = re.findall(r"^ *PID.*(?:\n.+)+", shown, re.MULTILINE)[:1]
    heading, *lines = processes.splitlines()
    place = heading.split().index("COMMAND")
    assert place == len(heading.split()) - 1
    program, *_ = Path("/proc/self/cmdline").read_text().split("\0")  # the child is a fork of this
    assert all(line.split(maxsplit=place)[place].startswith(f"{program} ") for line in lines)
    table.cancel()
    taker.result()
    assert run("clean", "--yes", "left").returncode == 0


def test_a_quiet_list_has_names_only(table: SparseConditionalAccumulator) -> None:
    assert run("list", "--quiet").stdout == run("list", "-q").stdout == "table\n"
    assert table.stats().attached == 1


@pytest.mark.parametrize(
    "verb", ["list", "show table", "watch --count 1 --interval 0.05", "--help", "list --help"]
)
def test_a_stdout_that_cannot_be_written_is_a_failure(
    table: SparseConditionalAccumulator, verb: str
) -> None:
    for where, reason in ((">&-", "Bad file descriptor"), (">/dev/full", "No space left")):
        done = shell(f"$I {verb} {where}")
        assert done.returncode == 1, (verb, where)
        assert reason in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    assert table.stats().attached == 1


def test_closed_streams_that_are_not_needed_do_no_harm(table: SparseConditionalAccumulator) -> None:
    for line in ("$I check >&-", "$I check 2>&-", "$I check <&- >&- 2>&-", "$I clean table >&-"):
        done = shell(line)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), line
    # What stderr would have got is not on stdout instead.
    assert shell("$I show nobody 2>&-").stdout == ""
    assert table.stats().attached == 1


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


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("dataclasses", INTERRUPTED, ""),
        ("argparse", INTERRUPTED, ""),
        ("argparse", "", INTERRUPTED_PARSER),
    ],
)
def test_ctrl_c_while_it_starts(tmp_path: Path, module: str, before: str, after: str) -> None:
    """At the moment of an import, which is most of what happens in the first 100 ms; or later.

    Out of argparse, KeyboardInterrupt comes as another exception at times.
    """
    real = Path(subprocess.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    (tmp_path / f"{module}.py").write_text(before + real + after, encoding="utf-8")
    for arguments in (["list"], ["watch", "nobody"]):
        done = subprocess.run(
            [*HEEDING_CTRL_C, COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), arguments


def test_ctrl_c_where_it_is_ignored(table: SparseConditionalAccumulator) -> None:
    """As in the background of a shell without job control."""
    process = subprocess.Popen(
        ["env", "--ignore-signal=INT", COMMAND, "watch", "--interval", "0.05", "--count", "5"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(5):
        assert b"table" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 0
    process.stdout.close()
    assert table.stats().attached == 1


def test_cancel_says_what_else_it_ends(crew: Crew) -> None:
    """A take that waits for the lock is not in the queue yet, and is cancelled all the same."""
    with SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as acc:
        with inspect_tool.stopped_with_the_lock(crew, "table"):
            taker = start(crew, inspect_tool.wait_in_line, "table", 9)
            pid = taker.pid
            until(lambda: "waits-for-the-lock" in run("show", "table").stdout)
            rehearsal = run("cancel", "table")
            assert f"pid {pid}" in rehearsal.stdout
            assert "nobody waits" not in rehearsal.stderr
            answer = ask("cancel", "table", "--yes")
            assert pid in [process["pid"] for process in answer["lock_waiters"]]
            assert taker.result() is None
        acc.unlink()
