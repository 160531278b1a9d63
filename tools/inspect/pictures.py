"""Makes the documentation's pictures of `shmacc-inspect` from a real run: docs/inspect/*.svg.

A chief and some workers train something; after a while one worker is killed and one is stopped, so
that there is something to see. Another job stands still: its chief is stopped with a round open.
The installed command runs on a terminal of its own, and what it wrote there becomes the picture.
"""

from __future__ import annotations

import contextlib
import fcntl
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

import numpy as np
import pyte

import shmacc
import terminal_picture
from shmacc import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

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
ANY_INDEX: Final = 1.3  # of the Zipf distribution: some rows are much more frequent than others
HOME: Final = b"\x1b[H"  # begins each picture of a live screen
ROWS_OF: Final = {"list": 20, "show": 60, "watch": 27}
COLUMNS: Final = 128
NOTHING_YET: Final = b"GRADIENTS\x1b[0m\r\n\r\n"  # a round that has just begun: no rows to show


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
    """Act as the chief of another job, which computes in its block for ever."""
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
    # Only the workers keep both open, and the pictures are to show that.
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
    path.write_text(terminal_picture.svg(screen, title), encoding="utf-8")
    print(path.relative_to(ROOT))


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
