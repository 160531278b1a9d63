"""Makes the documentation's pictures of `shmacc-inspect` from a real run: docs/inspect/*.svg.

A chief and some workers train something; after a while one worker is killed and one is stopped, so
that there is something to see. Another job stands still: its chief is stopped with a round open.
The installed command runs on a terminal of its own, and what it wrote there becomes the picture.
No font is fetched, but the picture looks the same everywhere: text is set in any monospaced font
and stretched to exactly its columns. The characters of bars are drawn as rectangles, since many
fonts lack them.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

import numpy as np
import pyte

import shmacc
from shmacc import testing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyte.screens import Char

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "docs" / "inspect"
BIN: Final = Path(sys.executable).parent
STALLED: Final = "decoder"
WORKERS: Final = 5
REQUIRED: Final = 16
ROWS: Final = 100_000
WIDTH: Final = 64
BATCH: Final = 400
SETTLING: Final = 5.0  # seconds
WATCHING: Final = 30.0
INTERVAL: Final = 0.5
ANY_INDEX: Final = 1.3  # exponent of the Zipf distribution: a few rows are very frequent
HOME: Final = b"\x1b[H"  # begins each picture of a live screen
ROWS_OF: Final = {"list": 20, "show": 60, "watch": 27}
COLUMNS: Final = 128
NOTHING_YET: Final = b"GRADIENTS\x1b[0m\r\n\r\n"  # a round that has just begun: no rows to show
FONTS: Final = (
    "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,Liberation Mono,monospace"
)
CELL: Final = (8.4, 18.0)  # width and height
BASELINE: Final = 13.2
MARGIN: Final = 14.0
HEAD: Final = 34.0
PAPER: Final = "#1b1d23"
INK: Final = "#d3d7de"
FAINT: Final = "#868c98"
START: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
    f'font-family="{FONTS}" font-size="14" xml:space="preserve" role="img">'
)
HEADING: Final = f'<text x="{{x:g}}" y="22" fill="{FAINT}" text-anchor="middle">{{title}}</text>'
COLOURS: Final = {
    "default": INK,
    "red": "#ef6b73",
    "green": "#8cc570",
    "brown": "#dfb65f",  # pyte's name for what terminals show as yellow
    "magenta": "#c983dd",
    "cyan": "#5bb8c4",
}
_BARS: Final = {mark: eighths / 8 for eighths, mark in enumerate("▁▂▃▄▅▆▇█", start=1)}
_SHADE: Final = "░"
_TALL: Final = 0.86  # height of a full bar in cells: lines of bars must not touch


def open_both() -> tuple[shmacc.SparseConditionalAccumulator, shmacc.ConditionalAccumulator]:
    """Return the accumulators of the job; the first process makes them."""
    return (
        shmacc.SparseConditionalAccumulator("float32", [ROWS, WIDTH], "embeddings"),
        shmacc.ConditionalAccumulator("float64", [256], "tower.bias"),
    )


def work(number: int) -> None:
    """Act as a worker: apply gradients for as long as the process lives."""
    rng = np.random.default_rng(number)
    embeddings, bias = open_both()
    while True:
        step = embeddings.global_step
        time.sleep(rng.uniform(0.01, 0.12))
        rows = (rng.zipf(ANY_INDEX, BATCH) - 1) % ROWS
        values = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        embeddings.apply_grad(rows, values, local_step=step)
        bias.apply_grad(rng.normal(size=256), local_step=shmacc.NEVER_STALE)


def lead() -> None:
    """Act as the chief: take the means."""
    embeddings, bias = open_both()
    while True:
        embeddings.take(REQUIRED)
        bias.take(REQUIRED // 2)


def hang() -> None:
    """Act as the chief of another job: open a round, and never end it."""
    with shmacc.ConditionalAccumulator("float32", [64], STALLED) as acc:
        acc.apply_grad(np.ones(64, np.float32))
        with acc.round(1):
            signal.pause()


def start(*role: str) -> subprocess.Popen[bytes]:
    """Return a process of the job, whose command line does not depend on where this runs."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    command = ["python", str(Path(__file__).relative_to(ROOT)), *role]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PATH": path})


@contextlib.contextmanager
def job() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return the processes of a running job, the workers first."""
    embeddings, bias = open_both()
    # This process closes both below: the pictures are to show the job's processes only.
    processes = [start("work", str(number)) for number in range(WORKERS)] + [start("lead")]
    while embeddings.stats().attached <= len(processes):
        time.sleep(INTERVAL)
    hanging = start("hang")
    processes.append(hanging)
    with shmacc.attach(STALLED, timeout=SETTLING) as stalled:
        while stalled.stats().round_pid is None:
            time.sleep(INTERVAL)
    hanging.send_signal(signal.SIGSTOP)
    embeddings.close()
    bias.close()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def photograph(arguments: list[str], seconds: float) -> bytes:
    """Return what the command writes on a terminal in this time; then terminate it."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS_OF[arguments[0]], COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", BIN / "shmacc-inspect", *arguments],
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written, end = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):  # it has ended
        while time.monotonic() < end:
            if select.select([ours], [], [], INTERVAL)[0]:
                written += os.read(ours, 65536)
    process.terminate()
    process.wait()
    os.close(ours)
    return written


def save(name: str, title: str, written: bytes) -> None:
    """Make the picture."""
    screen = pyte.Screen(COLUMNS, ROWS_OF[name])
    pyte.ByteStream(screen).feed(written)
    path = PICTURES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(screen, title), encoding="utf-8")
    print(path.relative_to(ROOT))


def svg(screen: pyte.Screen, title: str) -> str:
    """Return the picture of a screen, below a title, without empty lines at its end."""
    used = [y for y, line in enumerate(screen.display) if line.strip()]
    height = HEAD + (max(used, default=0) + 1) * CELL[1] + MARGIN
    width = screen.columns * CELL[0] + 2 * MARGIN
    parts = [
        START.format(width=width, height=height),
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>',
        HEADING.format(x=width / 2, title=escape(title)),
    ]
    for y in used:
        cells = [screen.buffer[y][x] for x in range(screen.columns)]
        parts += _line(cells, y)
    return "\n".join([*parts, "</svg>", ""])


def _line(cells: Sequence[Char], y: int) -> Iterator[str]:
    place = 0

    def look(cell: Char) -> tuple[object, ...]:
        kind = "bar" if cell.data in _BARS else "shade" if cell.data == _SHADE else "text"
        return cell.fg, cell.bold, cell.reverse, kind, cell.data if kind == "bar" else ""

    for _, run in itertools.groupby(cells, look):
        characters = list(run)
        yield from _run(characters, place, y)
        place += len(characters)


def _run(cells: list[Char], x: int, y: int) -> Iterator[str]:
    first, text = cells[0], "".join(cell.data for cell in cells)
    left, top = MARGIN + x * CELL[0], HEAD + y * CELL[1]
    width, height = len(cells) * CELL[0], CELL[1]
    colour = COLOURS.get(first.fg, INK)
    if first.data in _BARS:
        tall = height * _BARS[first.data] * _TALL
        yield _rectangle(left, top + height - tall, width, tall, colour)
    elif first.data == _SHADE:
        tall = height * _TALL
        yield _rectangle(left, top + height - tall, width, tall, colour, ' opacity="0.25"')
    elif first.reverse:
        yield _rectangle(left, top, width, height, colour)
        colour = PAPER
    if first.data in _BARS or first.data == _SHADE:
        return
    bold = ' font-weight="bold"' if first.bold else ""
    left += (len(text) - len(text.lstrip())) * CELL[0]
    if text := text.strip():
        yield (
            f'<text x="{left:g}" y="{top + BASELINE:g}" textLength="{len(text) * CELL[0]:g}" '
            f'lengthAdjust="spacingAndGlyphs" fill="{colour}"{bold}>{escape(text)}</text>'
        )


def _rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def main() -> None:
    """Make all pictures."""
    os.chdir(ROOT)
    with testing.isolated_namespace(), job() as workers:
        time.sleep(SETTLING)
        workers[3].kill()
        save("list", "shmacc-inspect list", photograph(["list"], SETTLING))
        shown = b""
        while NOTHING_YET in shown or not shown:
            shown = photograph(["show", "embeddings", "--rows", "4", "--values"], SETTLING)
        save("show", "shmacc-inspect show embeddings --rows 4 --values", shown)
        workers[3] = start("work", "3")
        watcher = photograph_while_one_stops(workers)
        # Up to the last complete picture.
        save("watch", "shmacc-inspect watch", watcher.rpartition(HOME)[0])


def photograph_while_one_stops(workers: list[subprocess.Popen[bytes]]) -> bytes:
    """Return the live screen; some seconds before the end a worker is stopped."""
    stop = subprocess.Popen(
        ["sh", "-c", f"sleep {WATCHING - 2 * SETTLING}; kill -STOP {workers[1].pid}"]
    )
    try:
        return photograph(["watch", "--interval", str(INTERVAL)], WATCHING)
    finally:
        stop.wait()
        workers[1].send_signal(signal.SIGCONT)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work", number]:
            work(int(number))
        case ["lead"]:
            lead()
        case ["hang"]:
            hang()
        case _:
            main()
