"""shmacc-inspect on real terminals: what it looks like, its keys, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.inspect_tool import COMMAND, HEEDING_CTRL_C, Terminal, run, start
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.apart import Crew

ANY_STYLE = re.compile(rb"\x1b\[[0-9;]*m")
COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9]m")


@pytest.fixture
def embeddings() -> Iterator[SparseConditionalAccumulator]:
    """A sparse accumulator with two gradients."""
    with SparseConditionalAccumulator(np.float32, [100, 4], "embeddings") as acc:
        for _ in range(2):
            acc.apply_grad([3, 5], np.ones((2, 4), np.float32))
        yield acc
        acc.unlink()


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    """A dense one with a long name."""
    with ConditionalAccumulator(np.float64, [3], "tower.of.babel.layer7.bias") as acc:
        yield acc
        acc.unlink()


def test_a_table_fits_the_terminal(
    embeddings: SparseConditionalAccumulator, bias: ConditionalAccumulator
) -> None:
    with Terminal("list", columns=60) as narrow, Terminal("list", columns=170) as wide:
        assert narrow.end() == 0
        assert wide.end() == 0
        text = narrow.text()
        assert "embeddings" in text
        assert "STATE" in text
        assert "RESERVED" not in text.splitlines()[0]
        assert "too narrow for all columns; left out: " in text
        rows = [line for line in wide.text().splitlines() if line]
        assert len(rows) == 4  # with how full shared memory is
        assert "RESERVED" in rows[0]
        assert "tower.of.babel.layer7.bias" in rows[2]
        assert COLOUR.search(wide.raw)
    assert embeddings.stats().attached == bias.stats().attached == 1


def test_no_colour_and_no_terminal(embeddings: SparseConditionalAccumulator) -> None:
    with (
        Terminal("show", "embeddings", NO_COLOR="1") as plain,
        Terminal("list", TERM="dumb") as dumb,
    ):
        assert plain.end() == 0
        assert "Processes" in plain.text()
        assert not COLOUR.search(plain.raw)
        assert dumb.end() == 0
        assert b"\x1b" not in dumb.raw
    assert "\x1b" not in run("list", FORCE_COLOR="").stdout
    assert embeddings.stats().attached == 1


def test_watch_is_a_live_screen(
    embeddings: SparseConditionalAccumulator, bias: ConditionalAccumulator, crew: Crew
) -> None:
    taker = start(crew, inspect_tool.wait_in_line, "embeddings", 5)
    until(lambda: embeddings.stats().waiting == 1)
    with Terminal("watch", "--interval", "0.1") as terminal:
        terminal.wait_for("▶", "embeddings", "2/5", "2 of 5", f"pid {taker.pid}")
        embeddings.apply_grad([1], np.ones((1, 4), np.float32))
        terminal.wait_for("3/5", "3 of 5", "applied")
        terminal.press("\x1b[B")  # down
        terminal.wait_for("▶  tower", "nobody waits")
        bias.apply_grad([1, 2, 3])
        terminal.wait_for("1 gradient; nobody waits")
        terminal.press("1")
        terminal.wait_for("▶  embeddings", "3 of 5")
        terminal.resize(50, 12)
        terminal.wait_for("3 of 5")
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")
    embeddings.cancel()
    taker.result()


def test_a_line_as_wide_as_the_terminal_keeps_its_last_letter(
    embeddings: SparseConditionalAccumulator,
) -> None:
    for rows in (30, 1):  # the last line of the screen, too
        with Terminal("watch", "embeddings", "--interval", "0.1", rows=rows) as terminal:
            terminal.wait_for("q quit")
            assert terminal.text().splitlines()[0].endswith("q quit")
            terminal.press("q")
            assert terminal.end() == 0
    assert embeddings.stats().attached == 1


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "in a row"])
def test_watch_leaves_the_terminal_in_order(
    embeddings: SparseConditionalAccumulator, how: str
) -> None:
    with Terminal("watch", "embeddings", "--interval", "0.1") as terminal:
        terminal.wait_for("gradients/s")
        if how == "ctrl-c":
            terminal.press("\x03")
            assert terminal.end() == 130
        elif how == "sigterm":
            os.kill(terminal.pid, signal.SIGTERM)
            assert terminal.end() == 143
        else:
            terminal.press("\x1b[Bxk\x1b[Aq")
            assert terminal.end() == 0
        assert b"Traceback" not in terminal.raw
        assert b"\x1b[?1049l" in terminal.raw  # the screen from before is back
        assert b"\x1b[?25h" in terminal.raw
    assert embeddings.stats().attached == 1


def test_watch_can_be_suspended(embeddings: SparseConditionalAccumulator) -> None:
    with Terminal("watch", "embeddings", "--interval", "0.1") as terminal:
        terminal.wait_for("2 gradients; nobody waits")
        terminal.press("\x1a")
        assert os.WIFSTOPPED(os.waitpid(terminal.pid, os.WUNTRACED)[1])
        while terminal.read():
            if b"\x1b[?1049l" in terminal.raw:
                break
        embeddings.apply_grad([1], np.ones((1, 4), np.float32))
        os.kill(terminal.pid, signal.SIGCONT)
        terminal.wait_for("3 gradients; nobody waits")
        terminal.press("q")
        assert terminal.end() == 0


def test_ctrl_c_in_a_pipe(embeddings: SparseConditionalAccumulator) -> None:
    process = subprocess.Popen(
        [*HEEDING_CTRL_C, COMMAND, "watch", "embeddings", "--interval", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "embeddings" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert talk == ""
    assert embeddings.stats().attached == 1


def test_a_reader_that_goes_away(embeddings: SparseConditionalAccumulator) -> None:
    process = subprocess.Popen(
        [COMMAND, "watch", "embeddings", "--interval", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LONG) == -signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    assert embeddings.stats().attached == 1


@pytest.mark.parametrize("columns", [80, 60])
def test_show_fits_the_terminal(
    embeddings: SparseConditionalAccumulator, crew: Crew, columns: int
) -> None:
    """No line goes on in the next: wrapped tables are not to be read."""
    taker = start(crew, inspect_tool.wait_in_line, "embeddings", 5)
    until(lambda: embeddings.stats().waiting == 1)
    arguments = ("show", "embeddings", "--rows", "3", "--values")
    with Terminal(*arguments, columns=columns, rows=60) as terminal:
        assert terminal.end() == 0
        lines = [ANY_STYLE.sub(b"", line) for line in terminal.raw.splitlines()]
        assert max(len(line.decode().rstrip()) for line in lines) <= columns
        assert "Most touched rows" in terminal.text()
        # Where text goes on below itself, no word is lost.
        assert f"gradients that pid {taker.pid} waits for" in _unwrapped(terminal.text())
    embeddings.cancel()
    taker.result()


def _unwrapped(text: str) -> str:
    return re.sub(r"\n {14}", " ", text)


def test_watch_in_ascii(embeddings: SparseConditionalAccumulator, crew: Crew) -> None:
    taker = start(crew, inspect_tool.wait_in_line, "embeddings", 4)
    until(lambda: embeddings.stats().waiting == 1)
    with (
        Terminal("watch", "--interval", "0.1", "--ascii") as asked,
        Terminal("watch", "--interval", "0.1", PYTHONIOENCODING="latin-1") as needed,
    ):
        for terminal in (asked, needed):
            terminal.wait_for("####", "2 of 4")
            terminal.press("q")
            assert terminal.end() == 0
            assert terminal.raw.isascii()
    with Terminal("show", "embeddings", "--ascii") as terminal:
        assert terminal.end() == 0
        assert b"#####" in terminal.raw
        assert terminal.raw.isascii()
    embeddings.cancel()
    taker.result()


@pytest.fixture
def many() -> Iterator[list[ConditionalAccumulator]]:
    """Sixty of them."""
    made = [ConditionalAccumulator(np.float32, [2], f"seg{number:02}") for number in range(60)]
    yield made
    for acc in made:
        acc.unlink()
        acc.close()


def test_watch_of_many_segments(many: list[ConditionalAccumulator], crew: Crew) -> None:
    with Terminal("watch", "--interval", "0.1", columns=100, rows=30) as terminal:
        terminal.wait_for("60 segments", "▶  seg00")
        terminal.press("\x1b[6~")  # page down
        terminal.wait_for("▶  seg11")
        terminal.press("\x1b[6~\x1b[5~")
        terminal.wait_for("▶  seg11")
        terminal.press("\x1b[F")  # end
        terminal.wait_for("▶  seg59")
        terminal.press("\x1b[H")
        terminal.wait_for("▶  seg00")
        # The one that waits for longest comes first.
        taker = start(crew, inspect_tool.wait_in_line, "seg33", 4)
        terminal.press("ss")
        terminal.wait_for("by waited", "░░░░░░░░ 0/4")
        terminal.press("\x1b[H")
        terminal.wait_for("▶  seg33")
        terminal.press("r")
        terminal.wait_for("by waited reversed")
        terminal.press("\x1b[F")
        terminal.wait_for("▶  seg33")
        terminal.press("q")
        assert terminal.end() == 0
    many[33].cancel()
    taker.result()
    with Terminal("watch", "seg1*", "seg59", "--sort", "name", "--reverse") as terminal:
        terminal.wait_for("11 segments", "▶  seg59")
        terminal.press("q")
        assert terminal.end() == 0


def test_watch_names_the_lock_of_each(crew: Crew) -> None:
    with SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as acc:
        with (
            ConditionalAccumulator(np.float32, [2], "other") as other,
            inspect_tool.stopped_with_the_lock(crew, "table") as pid,
        ):
            with Terminal("watch", "--sort", "lock", "--interval", "0.1") as terminal:
                screen = terminal.wait_for("LOCK", "WAITED", "BEHIND", str(pid))
                [row] = [line for line in screen.splitlines() if line.lstrip().startswith("▶")]
                assert row.split()[1] == "table"
                assert str(pid) in row.split()
                terminal.press("q")
                assert terminal.end() == 0
            other.unlink()
        acc.unlink()


def test_nothing_is_left_over_from_another_size(
    embeddings: SparseConditionalAccumulator, bias: ConditionalAccumulator
) -> None:
    """What is on the screen after a change of size is what would be there without one."""
    with Terminal("watch", "--interval", "0.1", columns=150, rows=40, COLUMNS="150") as terminal:
        terminal.wait_for("BYTES/S", "drops/s")
        terminal.resize(72, 14)
        # A terminal wraps or cuts what it shows: here the worst, all is full of something.
        terminal.screen.reset()
        for row in range(14):
            terminal.screen.cursor_position(row + 1, 1)
            terminal.screen.draw("X" * 71)
        screen = terminal.wait_for("▶  embeddings", "by state")
        until(lambda: terminal.read() and "X" not in terminal.text())
        assert "X" not in screen.splitlines()[0]
        terminal.resize(150, 40)
        terminal.wait_for("BYTES/S", "drops/s")
        terminal.press("q")
        assert terminal.end() == 0
    assert embeddings.stats().attached == bias.stats().attached == 1


def test_bash_completes_names_with_a_colon(
    embeddings: SparseConditionalAccumulator, tmp_path: Path, namespace: str
) -> None:
    """In bash itself, whose readline takes a colon for the end of a word."""
    script = tmp_path / "bashrc"
    script.write_text(
        f'PATH="{COMMAND.parent}:$PATH"\nPS1="> "\n'
        'eval "$(shmacc-inspect --completion bash)"\nbind "set enable-bracketed-paste off"\n',
        encoding="utf-8",
    )
    bash = ("bash", "--noprofile", "--rcfile", str(script), "-i")
    path = inspect_tool.path_of("embeddings").name
    with Terminal(columns=200, program=bash) as terminal:
        terminal.wait_for(">")
        for typed, completed in (
            ("sho", "show "),
            ("show emb", "show embeddings "),
            (f"show shmacc.{namespace[:-2]}", f"show {path} "),
            (f"show {path[:-6]}", f"show {path} "),
            ("show list embed", "show list embeddings "),
            ("watch --int", "watch --interval "),
            ("list --sort wai", "list --sort waiting "),
            (f"list -n {namespace[:-2]}", f"list -n {namespace} "),
            ("show -n nowhere-at-all embeddi", "show -n nowhere-at-all embeddi"),
        ):
            terminal.press(f"shmacc-inspect {typed}\t#")
            terminal.wait_for(f"> shmacc-inspect {completed}#")
            terminal.press("\x15\x0c")  # erase the line, and the screen
            terminal.wait_for(">")
        terminal.press("exit\r")
        assert terminal.end() == 0
    assert embeddings.stats().attached == 1


def test_a_picture_of_a_crowd(crew: Crew) -> None:
    with SparseConditionalAccumulator(np.float32, [100, 4], "crowd") as acc:
        for _ in range(8):
            start(crew, inspect_tool.idle, "crowd")
        with Terminal("watch", "crowd", "--interval", "0.1", rows=16) as terminal:
            terminal.wait_for("… and", "more")
            assert len(terminal.text().splitlines()) <= 16
            began = time.monotonic()
            terminal.press("q")
            assert terminal.end() == 0
            assert time.monotonic() - began < LONG
        acc.unlink()
