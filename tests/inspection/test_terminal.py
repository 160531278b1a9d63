"""`shmacc-inspect` on real terminals: what it draws, its keys, and how it ends."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.apart import Apart, Crew
from helpers.standing_still import apply, begin, hold_a_round, pause, stop
from helpers.support import run_to_end, until

import shmacc
from shmacc import inspection, optim
from shmacc_inspect.parsers import VERBS

ANY_STYLE = re.compile(rb"\x1b\[[0-9;]*m")
COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9]m")
OFTEN = ("--interval", "0.1")


@pytest.fixture
def embeddings() -> Iterator[shmacc.SparseConditionalAccumulator]:
    with shmacc.SparseConditionalAccumulator(np.float32, [100, 4], "embeddings") as acc:
        for _ in range(2):
            acc.apply_grad([3, 5], np.ones((2, 4), np.float32))
        yield acc
        acc.unlink()


@pytest.fixture
def bias() -> Iterator[shmacc.ConditionalAccumulator]:
    with shmacc.ConditionalAccumulator(np.float64, [3], "tower.of.babel.layer7.bias") as acc:
        yield acc
        acc.unlink()


@pytest.fixture
def taker(embeddings: shmacc.SparseConditionalAccumulator, crew: Crew) -> Apart:
    child = inspect_tool.start(crew, inspect_tool.wait_in_queue, "embeddings", 5)
    until(lambda: embeddings.stats().waiting == 1)
    return child


def quit_of(terminal: inspect_tool.Terminal) -> None:
    terminal.press("q")
    assert terminal.end() == 0


@pytest.mark.usefixtures("embeddings", "bias")
def test_list_leaves_out_columns_that_do_not_fit() -> None:
    with (
        inspect_tool.Terminal("list", columns=60) as narrow,
        inspect_tool.Terminal("list", columns=170) as wide,
    ):
        assert narrow.end() == wide.end() == 0
    text = narrow.text()
    assert "embeddings" in text
    assert "STATE" in text
    assert "RESERVED" not in text.splitlines()[0]
    assert "too narrow for all columns; left out: " in text
    rows = [line for line in wide.text().splitlines() if line]
    assert len(rows) == 4  # titles, two segments, and how full shared memory is
    assert "RESERVED" in rows[0]
    assert "tower.of.babel.layer7.bias" in rows[2]
    assert COLOUR.search(wide.raw)


@pytest.mark.usefixtures("embeddings")
def test_no_color_a_dumb_terminal_and_a_pipe_turn_off_colour() -> None:
    with (
        inspect_tool.Terminal("show", "embeddings", NO_COLOR="1") as plain,
        inspect_tool.Terminal("list", TERM="dumb") as dumb,
    ):
        assert plain.end() == dumb.end() == 0
    assert "Processes" in plain.text()
    assert not COLOUR.search(plain.raw)
    assert b"\x1b" not in dumb.raw
    assert "\x1b" not in inspect_tool.run("list", FORCE_COLOR="").stdout


def test_watch_updates_its_screen_and_follows_keys_and_sizes(
    embeddings: shmacc.SparseConditionalAccumulator,
    bias: shmacc.ConditionalAccumulator,
    taker: Apart,
) -> None:
    with inspect_tool.Terminal("watch", *OFTEN) as terminal:
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
        quit_of(terminal)
        assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")


@pytest.mark.usefixtures("embeddings")
def test_a_line_as_wide_as_the_terminal_keeps_its_last_letter() -> None:
    for rows in (30, 1):  # with 1 row, the line is the screen's last
        with inspect_tool.Terminal("watch", "embeddings", *OFTEN, rows=rows) as terminal:
            terminal.wait_for("q quit")
            assert terminal.text().splitlines()[0].endswith("q quit")


@pytest.mark.parametrize(("keys", "status"), [("\x03", 130), ("", 143), ("\x1b[Bxk\x1b[Aq", 0)])
def test_watch_restores_the_terminal_however_it_ends(
    embeddings: shmacc.SparseConditionalAccumulator, keys: str, status: int
) -> None:
    """`watch` ends by Ctrl-C, SIGTERM, or several keys in a row; or it is suspended."""
    with inspect_tool.Terminal("watch", "embeddings", *OFTEN) as terminal:
        terminal.wait_for("2 gradients; nobody waits")
        if not status:
            terminal.press("\x1a")
            assert os.WIFSTOPPED(os.waitpid(terminal.pid, os.WUNTRACED)[1])
            while b"\x1b[?1049l" not in terminal.raw:
                assert terminal.read()
            embeddings.apply_grad([1], np.ones((1, 4), np.float32))
            os.kill(terminal.pid, signal.SIGCONT)
            terminal.wait_for("3 gradients; nobody waits")
        if keys:
            terminal.press(keys)
        else:
            os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == status
        assert b"Traceback" not in terminal.raw
        on, off = b"\x1b[?1049h", b"\x1b[?1049l"  # the screen from before is back
        assert terminal.raw.rindex(off) > terminal.raw.rindex(on)
        assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")


@pytest.mark.usefixtures("bias")
@pytest.mark.parametrize("columns", [80, 60, 40])
def test_no_line_wraps(taker: Apart, columns: int) -> None:
    """A table leaves out columns or shortens the widest: wrapped lines are unreadable."""
    group = shmacc.AccumulatorGroup(
        {"w": shmacc.TensorSpec([3]), "emb": shmacc.IndexedSlicesSpec([9, 2])}, "a-group"
    )
    contents = {"w": np.zeros(3, np.float32), "emb": shmacc.TableSpec((2,))}
    parameters = shmacc.Parameters(contents, "some.params", optimizer=optim.Adam(0.1))
    arrays = shmacc.SharedArrays({"count": np.zeros((), np.int64)}, "arrays")
    sums, layout = ("--rows", "3", "--values"), ("--layout",)
    for arguments in (
        ("list", "--sort", "state"), ("show", "embeddings", *sums, *layout),
        ("show", "a-group", *layout), ("show", "some.params"), ("show", "arrays"),
    ):  # fmt: skip
        with inspect_tool.Terminal(*arguments, columns=columns, rows=100) as terminal:
            assert terminal.end() == 0
        lines = [ANY_STYLE.sub(b"", line).decode().rstrip() for line in terminal.raw.splitlines()]
        tables = [line for line in lines if not line.startswith("shmacc-inspect: ")]
        assert max(map(len, tables)) <= columns, "\n".join(tables)
        if sums[0] in arguments:
            assert "Most touched rows" in terminal.text()
            # Join the lines of a wrapped text: no word of it may be lost.
            unwrapped = re.sub(r"\n {14}", " ", terminal.text())
            assert f"gradients that pid {taker.pid} waits for" in unwrapped
    for segment in (group, parameters, arrays):
        segment.unlink()
        segment.close()


@pytest.mark.usefixtures("taker")
def test_watch_uses_ascii_where_the_terminal_has_nothing_else() -> None:
    with (
        inspect_tool.Terminal("watch", *OFTEN, PYTHONIOENCODING="latin-1") as watched,
        inspect_tool.Terminal("show", "embeddings", PYTHONIOENCODING="ascii") as shown,
    ):
        watched.wait_for("####", "2 of 5")
        quit_of(watched)
        assert shown.end() == 0
        for terminal in (watched, shown):
            assert b"####" in terminal.raw
            assert terminal.raw.isascii()


@pytest.fixture
def many() -> Iterator[list[shmacc.ConditionalAccumulator]]:
    made = [
        shmacc.ConditionalAccumulator(np.float32, [2], f"seg{number:02}") for number in range(60)
    ]
    yield made
    for acc in made:
        acc.unlink()
        acc.close()


@pytest.mark.usefixtures("many")
def test_watch_scrolls_and_sorts_many_segments(crew: Crew) -> None:
    with inspect_tool.Terminal("watch", *OFTEN, columns=100, rows=30) as terminal:
        terminal.wait_for("60 segments", "▶  seg00")
        for keys, selected in (
            ("\x1b[6~", "seg11"),  # page down
            ("\x1b[6~\x1b[5~", "seg11"),
            ("\x1b[F", "seg59"),  # end
            ("\x1b[H", "seg00"),
        ):
            terminal.press(keys)
            terminal.wait_for(f"▶  {selected}")
        # The segment with the longest wait comes first.
        inspect_tool.start(crew, inspect_tool.wait_in_queue, "seg33", 4)
        terminal.press("ss")
        terminal.wait_for("by waited", "░░░░░░░░ 0/4")
        terminal.press("\x1b[H")
        terminal.wait_for("▶  seg33")
        quit_of(terminal)
    with inspect_tool.Terminal("watch", "seg1*", "seg59", "--sort", "name") as terminal:
        terminal.wait_for("11 segments", "▶  seg10")


def test_watch_names_the_owner_of_each_segments_lock(crew: Crew) -> None:
    with (
        shmacc.SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as acc,
        shmacc.ConditionalAccumulator(np.float32, [2], "other") as other,
    ):
        with (
            inspect_tool.stopped_with_the_lock(crew, "table") as pid,
            inspect_tool.Terminal("watch", "--sort", "lock", *OFTEN) as terminal,
        ):
            screen = terminal.wait_for("LOCK", "WAITED", "BEHIND", str(pid))
            [row] = [line for line in screen.splitlines() if line.lstrip().startswith("▶")]
            assert row.split()[1] == "table"
            assert str(pid) in row.split()
        other.unlink()
        acc.unlink()


@pytest.mark.usefixtures("embeddings", "bias")
def test_watch_redraws_the_whole_screen_after_a_change_of_size() -> None:
    with inspect_tool.Terminal("watch", *OFTEN, columns=150, rows=40, COLUMNS="150") as terminal:
        terminal.wait_for("BYTES/S", "drops/s")
        terminal.resize(72, 14)
        # After a change of size a terminal may show anything: here it fills every cell.
        terminal.screen.reset()
        for row in range(14):
            terminal.screen.cursor_position(row + 1, 1)
            terminal.screen.draw("X" * 71)
        screen = terminal.wait_for("▶  embeddings", "by state")
        until(lambda: terminal.read() and "X" not in terminal.text())
        assert "X" not in screen.splitlines()[0]
        terminal.resize(150, 40)
        terminal.wait_for("BYTES/S", "drops/s")


@pytest.mark.usefixtures("embeddings")
def test_bash_completes_names_with_a_colon(tmp_path: Path, namespace: str) -> None:
    """The test runs bash itself, where readline ends a word at a colon."""
    script = tmp_path / "bashrc"
    script.write_text(
        f'PATH="{inspect_tool.COMMAND.parent}:$PATH"\nPS1="> "\n'
        'eval "$(shmacc-inspect --completion bash)"\nbind "set enable-bracketed-paste off"\n',
        encoding="utf-8",
    )
    bash = ("bash", "--noprofile", "--rcfile", str(script), "-i")
    path = inspect_tool.path_of("embeddings").name
    with inspect_tool.Terminal(columns=200, program=bash) as terminal:
        terminal.wait_for(">")
        for typed, completed in (
            ("sho", "show "),
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


@pytest.mark.usefixtures("embeddings")
@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(namespace: str, tmp_path: Path) -> None:
    """The test runs fish itself. In its answers, a tab separates a word from its description."""
    (tmp_path / "shmacc.prom").touch()
    for line, completed in (
        ("sho", [f"show\t{VERBS['show']}"]),
        ("list --sort wai", ["waiting"]),
        ("watch --sort b", ["behind"]),
        ("watch --int", ["--interval\thow often to look: 0.5, 10s, 5m (1)"]),
        ("show emb", ["embeddings"]),
        (f"list -n {namespace[:-2]}", [namespace]),
        (f"metrics --output {tmp_path}/sh", [f"{tmp_path}/shmacc.prom"]),
        ("--completion ", ["bash", "fish", "zsh"]),
    ):
        done = run_to_end(
            [
                *("fish", "--no-config", "--command"),
                f"shmacc-inspect --completion fish | source; complete -C 'shmacc-inspect {line}'",
            ],
            env={**os.environ, "PATH": f"{inspect_tool.COMMAND.parent}:{os.environ['PATH']}"},
        )
        assert done.stdout.splitlines() == completed, line


@pytest.mark.usefixtures("embeddings")
def test_a_crowded_screen_says_how_many_more_there_are(crew: Crew) -> None:
    for _ in range(8):
        begin(crew, pause, name="embeddings")
    with inspect_tool.Terminal("watch", "embeddings", *OFTEN, rows=16) as terminal:
        terminal.wait_for("… and", "more")
        quit_of(terminal)


# -- standstills are shown where users see them ---------------------------------------------------

NAMES: Final = ("a-fine-one", "b-fine-one", "z-stalled")
STALLED: Final = NAMES[-1]


@pytest.fixture
def stalled(crew: Crew) -> Iterator[int]:
    """Make three accumulators, the last of which stands still; yield its chief's pid."""
    made = [shmacc.ConditionalAccumulator(np.float32, [2], name) for name in NAMES]
    chief = begin(crew, apply, hold_a_round, name=STALLED)
    until(lambda: inspection.describe(STALLED).round_holder is not None)
    yield stop(chief)
    for acc in made:
        acc.unlink()
        acc.close()


@pytest.mark.usefixtures("stalled")
def test_segments_that_stand_still_are_listed_first_and_can_be_listed_alone() -> None:
    shmacc.ConditionalAccumulator(np.float32, [2], "m-orphan").close()
    listed = inspect_tool.run("list", "--sort", "state", "--quiet").stdout.split()
    assert listed == [STALLED, "m-orphan", *NAMES[:-1]]
    assert inspect_tool.run("list", "--stalled", "--quiet").stdout.split() == [STALLED]
    assert [one["name"] for one in inspect_tool.ask("list", "--stalled")["segments"]] == [STALLED]
    watched = inspect_tool.run("watch", "--count", "1", "--interval", "0.05").stdout.splitlines()
    assert watched[0].split()[1] == STALLED
    inspection.remove("m-orphan")


@pytest.mark.usefixtures("stalled")
def test_watch_shows_standstills_on_top_even_at_40_columns() -> None:
    """Where such a segment's state, "sound", is shown, the cause of the standstill is beside it."""
    with inspect_tool.Terminal("watch", "--interval", "0.1", columns=80, rows=24) as terminal:
        lines = terminal.wait_for("STALL", "round_holder_stopped").splitlines()
        (titles,) = [n for n, line in enumerate(lines) if "STEP" in line and "NAME" in line]
        assert "STATE" in lines[titles]
        for words in (STALLED, "round_holder_stopped", "sound"):
            assert words in lines[titles + 1]
    for names in ((), (STALLED,)):
        with inspect_tool.Terminal(
            "watch", *names, "--interval", "0.1", columns=40, rows=24
        ) as terminal:
            lines = terminal.wait_for("round_holder_stopped").splitlines()
            about = [line.rstrip() for line in lines if STALLED in line]
            assert about
            assert all(line.endswith("round_holder_stopped") for line in about)


def test_show_at_80x24_ends_with_the_verdict(stalled: int, crew: Crew) -> None:
    for _ in range(3):
        begin(crew, pause, name=STALLED)
    with inspect_tool.Terminal("show", STALLED, columns=80, rows=24) as terminal:
        assert terminal.end() == 0
        lines = [line for line in terminal.text().splitlines() if line]
    at_the_end = " ".join(" ".join(lines[-4:]).split())
    verdict = f"stands still pid {stalled} has a round open and is stopped: no process can"
    assert verdict in at_the_end
    assert f"kill -CONT {stalled}" in at_the_end
    assert "OFFSET" not in inspect_tool.run("show", STALLED).stdout
    assert "nothing is known that makes it stand still" in inspect_tool.run("show", NAMES[0]).stdout
