"""In a terminal Ctrl-Z stops all of a run, `fg` continues it, and Ctrl-C ends it."""

import os
import pty
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from helpers.guest import SHMACC_RUN, Ended, Guests
from helpers.support import until

# Makes its standard input the session's terminal, and becomes a shell with job control.
_SHELL: Final = """
import fcntl, os, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's `&` has the tests ignore it
os.execvp("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"])
"""
three_ways: Final = pytest.mark.parametrize("way", ["fork", "spawn", "command"])


class Shell:
    """An interactive shell in a terminal; what it shows is read and dropped."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests
        self._master, self._slave = pty.openpty()
        self._closed, self._reader = threading.Event(), threading.Thread(target=self._drain)
        self._reader.start()

    def run(
        self, functions: str, way: str, *, setting: str = "stty -tostop", end: str = ""
    ) -> None:
        """Start a program in the shell's foreground, after a setting of the terminal."""
        path = self._guests.write("program.py", functions)
        program = f"{SHMACC_RUN} --workers 2" if way == "command" else sys.executable
        self.guest = self._guests.command(
            [sys.executable, "-c", _SHELL], way=way, terminal=self._slave
        )
        os.close(self._slave)
        self.type(f"ulimit -c 0; {setting}; {program} {path} {end}\n")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ends(self, status: int | None = 0) -> Ended:
        """Wait until the program has ended, with this status, and the shell with it."""
        self.type("exit $?\n")
        return self.guest.ends(status)

    def close(self) -> None:
        """Close the terminal's window, after the thread that reads from it has ended."""
        if not self._closed.is_set():
            self._closed.set()
            self._reader.join()
            os.close(self._master)

    def _drain(self) -> None:
        with suppress(OSError):  # nobody has the other side any more
            while not self._closed.is_set():
                if select.select([self._master], [], [], 0.02)[0]:
                    os.read(self._master, 65_536)


@pytest.fixture
def shell(guest: Guests) -> Iterator[Shell]:
    opened = Shell(guest)
    yield opened
    guest.end()
    opened.close()


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"


# Programs that use the terminal

TOUCHING: Final = {
    "sets it": 'subprocess.run(["stty", "sane"], stdin=open("/dev/tty"), check=True)',
    "prints": 'print("line", flush=True); subprocess.run(["echo", "line"], check=True)',
    "reads it": """
        with suppress(OSError):
            os.read(os.open("/dev/tty", os.O_RDWR), 1)""",
    "has a program that reads it": 'subprocess.run(["head", "-1"], stdin=open("/dev/tty"))',
}


@three_ways
@pytest.mark.parametrize("touch", TOUCHING.values(), ids=TOUCHING)
def test_a_worker_that_uses_the_terminal_is_not_stopped(touch: str, way: str, shell: Shell) -> None:
    shell.run(
        f"""
def work(rank):
    {touch.strip()}
    mark(f"done{{rank}}")
def lead():
    marked("done0"), marked("done1")
    return "done"
""",
        way,
        setting="stty tostop",
    )
    assert shell.ends()["result"] == "done"


def test_a_run_in_the_background_is_not_stopped(shell: Shell) -> None:
    shell.run(
        """
        def work(rank): print("line", flush=True), mark(f"done{rank}")
        def lead():
            marked("done0"), marked("done1")
            return "done"
        """,
        "fork",
        setting="stty tostop",
        end="& wait $!",
    )
    assert shell.ends()["result"] == "done"


# Keys

COUNTING: Final = """
    def begin(role):
        program = subprocess.Popen(["sleep", "600"])
        came = []
        def interrupted(*_):
            came.append(1)
        if HANDLES:
            signal.signal(signal.SIGINT, interrupted)
        mark(f"{role} program", program.pid)
        mark(role, os.getpid())
        return came
    def work(rank):
        came = begin(f"worker{rank}")
        until(lambda: came or has_marked("over"))
        if came:
            time.sleep(0.3)  # in which a second one would come
            mark(f"interrupts{rank}", len(came))
    def lead():
        mark("caller", os.getppid())
        came = begin("chief")
        until(lambda: came or has_marked("over"))
        if came:
            time.sleep(0.3)
            mark("interrupts", len(came))
        return "done"
"""
EVENTS: Final = ("caller", "chief", "worker0", "worker1")
PROGRAMS: Final = ("chief program", "worker0 program", "worker1 program")


def _begun(shell: Shell, way: str, *, handles: bool = False) -> list[int]:
    """Start the program; return the pids of all its processes, the caller's first."""
    shell.run(f"\n    HANDLES = {handles}\n{COUNTING}", way)
    return [int(shell.guest.marked(event)) for event in EVENTS + PROGRAMS]


def _until_all(pids: list[int], *, stopped: bool) -> None:
    until(lambda: all((_state(pid) == "T") == stopped for pid in pids), 20)


@three_ways
def test_ctrl_z_stops_all_and_fg_continues_all(way: str, shell: Shell) -> None:
    pids = _begun(shell, way)
    for _ in range(2):
        shell.type("\x1a")
        _until_all(pids, stopped=True)
        shell.type("fg\n")
        _until_all(pids, stopped=False)
    shell.guest.mark("over")
    assert shell.ends()["result"] == "done"


@pytest.mark.parametrize("end", ["kill %1", "kill -INT %1; fg", "kill -9 %1", "close"])
def test_a_stopped_run_ends_by_a_signal_or_a_closed_window(end: str, shell: Shell) -> None:
    pids = _begun(shell, "fork")
    shell.type("\x1a")
    _until_all(pids, stopped=True)
    if end == "close":
        shell.close()
        shell.guest.ends(None)
        return
    shell.type(end + "\n")
    until(lambda: all(_state(pid) in {"gone", "Z"} for pid in pids))
    # A shell refuses to exit until it has collected a job that was stopped.
    until(lambda: _state(pids[0]) == "gone", 20)
    shell.ends(None)


@three_ways
def test_ctrl_c_reaches_each_child_once(way: str, shell: Shell) -> None:
    _begun(shell, way, handles=True)
    shell.type("\x03")
    for event in ("interrupts", "interrupts0", "interrupts1"):
        assert shell.guest.marked(event) == "1"
    shell.ends(130)


@three_ways
def test_ctrl_c_ends_a_run(way: str, shell: Shell) -> None:
    pids = _begun(shell, way)
    shell.type("\x03")
    until(lambda: all(_state(pid) in {"gone", "Z"} for pid in pids))
    shell.ends(130)


def test_ctrl_backslash_ends_a_run(shell: Shell) -> None:
    pids = _begun(shell, "fork")
    shell.type("\x1c")
    until(lambda: all(_state(pid) in {"gone", "Z"} for pid in pids))
    shell.ends(128 + signal.SIGQUIT)


@three_ways
def test_a_closed_window_ends_a_run(way: str, shell: Shell) -> None:
    _begun(shell, way)
    shell.close()
    shell.guest.ends(None)
