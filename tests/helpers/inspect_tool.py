"""Runs `shmacc-inspect`, in pipes or on terminals, and brings segments into odd states for it."""

import contextlib
import ctypes
import fcntl
import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import numpy as np
import pyte
from helpers.apart import Apart, Crew, run_apart
from helpers.support import LONG, run_to_end, stop, until

import shmacc
from shmacc import inspection
from shmacc_inspect.main import main

COMMAND: Final = Path(sys.executable).with_name("shmacc-inspect")
# A test runner in the background ignores SIGINT, and its children inherit that.
HEEDING_CTRL_C: Final = ("env", "--default-signal=INT")
OTHERS_FILES: Final = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER


def run(
    *arguments: str,
    before: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    weak: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `shmacc-inspect`: in this process, or in another one if the keywords require that.

    Args:
        arguments: The command line.
        before: A program that starts `shmacc-inspect`, and its arguments.
        command: The program to start instead of `COMMAND`, such as a copy of it.
        weak: Whether to run in a fork that first gives up root's rights to other users' files.
        environment: More environment variables. SHMACC_NAMESPACE alone needs no other process.
    """
    if weak:
        done: subprocess.CompletedProcess[str] = run_apart(_run_weak, arguments)
        return done
    if not (before or command or environment.keys() - {"SHMACC_NAMESPACE"}):
        return _run_here(arguments, environment)
    return run_to_end(
        [*before, *(command or (str(COMMAND),)), *arguments],
        status=None,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )


def _run_here(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    out, talk = io.BytesIO(), io.BytesIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGPIPE)}
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)),
        contextlib.redirect_stderr(io.TextIOWrapper(talk, "utf-8", write_through=True)),
    ):
        status = main(arguments)
        said = out.getvalue().decode(), talk.getvalue().decode()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, status, *said)


def _run_weak(arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    library = ctypes.CDLL(None, use_errno=True)
    header, powers = struct.pack("Ii", 0x20080522, 0), (ctypes.c_uint32 * 6)()
    for call in (library.capget, library.capset):
        assert call(header, powers) == 0, os.strerror(ctypes.get_errno())
        powers[0] &= ~OTHERS_FILES  # [0]: the effective capabilities
    return run(*arguments)


def ask(*arguments: str, status: int = 0, **how: Any) -> Any:
    """Run `shmacc-inspect` with --json; return its answer. `how` is as for `run`."""
    done = run(*arguments, "--json", **how)
    assert done.returncode == status, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    assert answer["schema_version"] == 4
    return answer


def run_here(*arguments: str) -> tuple[int, str]:
    """Run `shmacc-inspect` in this process; return its exit status and all that it printed."""
    done = run(*arguments)
    return done.returncode, done.stdout + done.stderr


class _Screen(pyte.Screen):
    """A screen that, like real terminals, leaves the cursor on a letter in the last column.

    Clearing the rest of the line, or of the screen, then clears that letter, too.
    """

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)
        super().erase_in_line(how, private)

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)
        super().erase_in_display(how, *args, **kwargs)


class Terminal:
    """`shmacc-inspect` on a terminal of its own."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 100,
        rows: int = 30,
        program: tuple[str, ...] = (str(COMMAND),),
        **env: str,
    ) -> None:
        """Start `shmacc-inspect`, or another program."""
        self._fd, theirs = os.openpty()
        self.screen = _Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns, rows)
        # Do not use pty.fork: a forked Python would attach to the test's open accumulators.
        self._process = subprocess.Popen(
            [*HEEDING_CTRL_C, "setsid", "--ctty", *program, *arguments],
            env={**os.environ, "TERM": "xterm-256color", **env},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.pid = self._process.pid
        self.raw = b""
        self.status: int | None = None

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read(self, seconds: float = 0.05) -> bool:
        """Read the program's output; return False at its end."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            written = os.read(self._fd, 65536)
        except OSError:  # nobody has the other side open any more
            return False
        self.raw += written
        self._stream.feed(written)
        return bool(written)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, *wanted: str) -> str:
        """Read until the screen shows all these texts; return the screen's text."""
        deadline = time.monotonic() + LONG
        while not all(word in self.text() for word in wanted):
            alive = self.read()
            assert alive or all(word in self.text() for word in wanted), self.text()
            assert time.monotonic() < deadline, f"{wanted} not in:\n{self.text()}"
        return self.text()

    def end(self) -> int:
        """Read to the end of the output; return the exit status."""
        if self.status is None:
            deadline = time.monotonic() + LONG
            while self.read():
                assert time.monotonic() < deadline, f"it does not end:\n{self.text()}"
            self.status = self._process.wait()
            os.close(self._fd)
        return self.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()
            os.close(self._fd)


# -- segments in shared memory --------------------------------------------------------------------


def path_of(name: str) -> Path:
    return Path(inspection.resolve(name).path)


def semaphore_of(name: str) -> Path:
    path, token = path_of(name), inspection.describe(name).token
    return path.with_name(f"sem.{path.name}.{token:016x}")


def scribble(path: Path, offset: int, data: bytes) -> None:
    # Use another process: closing the file here would release this process's record locks. Unset
    # LD_PRELOAD: with a sanitizer's library, dd finds no memory.
    place = [f"of={path}", "oflag=seek_bytes", f"seek={offset}", "conv=notrunc", "status=none"]
    subprocess.run(["env", "--unset=LD_PRELOAD", "dd", *place], input=data, check=True)


def header_of(path: Path) -> bytes:
    done = subprocess.run(["head", "-c", "8192", path], capture_output=True, check=True)
    return done.stdout


def other_version(path: Path) -> None:
    """Mark a segment as made by another version."""
    scribble(path, 8, struct.pack("<I", 999))


def idle(name: str) -> None:
    with shmacc.attach(name):
        signal.pause()


def wait_in_queue(name: str, num_required: int) -> None:
    """Wait in the queue with a take; return normally if it is cancelled."""
    with shmacc.attach(name) as acc:
        try:
            acc.take(num_required)
        except shmacc.errors.CancelledError:
            return


def make_as(uid: int, name: str) -> None:
    """Make a segment as another user, and close it."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    shmacc.ConditionalAccumulator(np.float32, [2], name).close()


def attached(name: str) -> int:
    """Return how many living processes have the accumulator open."""
    return inspection.describe(name).stats.attached


def start(crew: Crew, function: Any, name: str, *arguments: Any) -> Apart:
    """Start a child and wait until it is attached."""
    child = crew.start(function, name, *arguments)
    until(lambda: any(each.pid == child.pid for each in inspection.describe(name).processes))
    return child


def hold_the_lock_mostly(name: str, changes: bool) -> None:
    """Apply gradients for ever if `changes`; otherwise read the state for ever."""
    acc: Any
    with shmacc.attach(name) as acc:
        rows = np.arange(50_000), np.ones((50_000, 16), np.float32)
        while True:
            acc.apply_grad(*rows, local_step=shmacc.NEVER_STALE) if changes else acc.state()


@contextlib.contextmanager
def stopped_with_the_lock(crew: Crew, name: str, *, changes: bool = True) -> Iterator[int]:
    """Stop a process under the lock, in an apply (without `changes`: a read); yield its pid."""
    child = start(crew, hold_the_lock_mostly, name, changes)
    try:
        stop_within(child.pid, name, in_operation=changes)
        yield child.pid
    finally:
        child.kill()


def stop_within(pid: int, name: str, *, in_operation: bool = True) -> None:
    """Stop a busy process at a moment at which it has the segment's lock."""
    deadline = time.monotonic() + LONG
    while True:
        stop(pid)
        lock = inspection.describe(name).lock
        if lock.held and lock.in_operation == in_operation:
            return
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < deadline, "it is never caught with the lock"
        time.sleep(0.003)
