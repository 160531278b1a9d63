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

    from helpers.support import Crew

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
        terminal.wait_for("▶", "embeddings", "2/5", "2 of 5", f"pid {taker.process.pid}")
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
