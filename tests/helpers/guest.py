"""Programs that call `shmacc.run`, each in a process and a namespace of its own.

A test writes the program's functions, says how it is launched, disturbs it, and waits for its end.
`Guest.ends` then asserts what must hold for every program: it ended in time, no process and no name
is left, and `run` has restored what it changed in its caller.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.support import LONG, SHM_DIRECTORY, START_METHODS

WAYS: Final = (*START_METHODS, "command")
every_way = pytest.mark.parametrize("way", WAYS)
every_start_method = pytest.mark.parametrize("way", START_METHODS)
fork_and_command = pytest.mark.parametrize("way", ["fork", "command"])

DEADLINE: Final = float(os.environ.get("GUEST_DEADLINE", LONG))
SERVERS: Final = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
TESTS: Final = Path(__file__).parents[1]
SHMACC_RUN: Final = str(Path(sys.executable).with_name("shmacc-run"))

Launcher = Callable[[list[str]], list[str]]


def prefixed(*words: str) -> Launcher:
    """Return a launcher that puts these words before the command."""
    return lambda command: [*words, *command]


_IN_OWN_PIDS: Final = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
AS_PID_1: Final = prefixed(*_IN_OWN_PIDS)
needs_pid_1: Final = pytest.mark.skipif(
    subprocess.run([*_IN_OWN_PIDS, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a namespace of pids (root)",
)

_HEAD: Final = """
import os, signal, subprocess, sys, threading, time
from contextlib import suppress
import shmacc
from helpers.guest_program import *
"""


# Each worker is killed once; the chief waits for all of them.
KILLED_ONCE: Final = """
    def work(rank):
        if once(f"killed {os.getppid()} {rank}"):
            os.kill(os.getpid(), signal.SIGKILL)
        with shmacc.ConditionalAccumulator("f4", (), "sums") as acc:
            acc.apply_grad(rank + 1.0)

    def lead():
        with shmacc.ConditionalAccumulator("f4", (), "sums", reduction_type="MEAN") as acc:
            return float(acc.take_grad(2, timeout=60))
"""


@dataclass(frozen=True)
class Ended:
    """The results of a program that has ended.

    Attributes:
        status: As `subprocess.Popen.returncode`.
        out: The text on the program's standard output.
        err: The text on the program's standard error.
        told: What the program reported by `guest_program.tell`, in order.
    """

    status: int
    out: str
    err: str
    told: list[dict[str, Any]]

    def all(self, fact: str) -> list[Any]:
        """Return all values that the program reported under this name."""
        return [each[fact] for each in self.told if fact in each]

    def __getitem__(self, fact: str) -> Any:
        """Return the only value that the program reported under this name."""
        found = self.all(fact)
        assert len(found) == 1, f"{fact} was told {len(found)} times: {self.told} {self.err}"
        return found[0]


class Guest:
    """A program that runs; its standard output and error are files."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        namespace: str,
        environment: Mapping[str, str],
        *,
        stdin: bytes = b"",
        terminal: int | None = None,
    ) -> None:
        self._folder, self._namespace = folder, namespace
        (folder / "stdin").write_bytes(stdin)
        with (
            (folder / "stdin").open("rb") as reading,
            (folder / "out").open("ab") as out,
            (folder / "err").open("ab") as err,
        ):
            streams = (reading, out, err) if terminal is None else (terminal,) * 3
            self.process = subprocess.Popen(
                command,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def marked(self, event: str) -> str:
        """Wait until the program marks this event; return the event's text."""
        deadline = time.monotonic() + DEADLINE
        while not (self._folder / event).exists():
            assert self.process.poll() is None, f"the program ended before {event}: {self._said()}"
            assert time.monotonic() < deadline, f"{event} never came: {self._said()}"
            time.sleep(0.002)
        return (self._folder / event).read_text()

    def mark(self, event: str) -> None:
        (self._folder / event).touch()

    def ends(
        self, status: int | None = 0, *, left: Collection[int] = (), names_stay: bool = False
    ) -> Ended:
        """Wait for the program's end; assert what must hold for every program.

        Args:
            status: The exit status that it must have; None: any.
            left: Processes that may be left, because no run has started them.
            names_stay: Whether a run that has a name may leave its segments' names.
        """
        try:
            got = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program does not end: {self._said()}") from None
        deadline = time.monotonic() + min(DEADLINE, 10.0)
        while (
            living := self.processes(servers=not left) - set(left)
        ) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not living, f"processes are left: {self._said()}"
        while not names_stay and self.names():  # the process that removes the names has ended
            assert time.monotonic() < deadline, f"names are left: {self.names()}: {self._said()}"
            time.sleep(0.002)
        told = []
        if (self._folder / "told").exists():
            told = [json.loads(line) for line in (self._folder / "told").read_text().splitlines()]
        ended = Ended(got, self._text("out"), self._text("err"), told)
        for changed in ended.all("changed"):
            assert changed == {}, f"`run` has changed its caller: {changed} {ended.err[-3000:]}"
        assert status in {None, got}, f"status {got} and not {status}: {self._said()}"
        return ended

    def processes(self, *, servers: bool = True) -> set[int]:
        """Return the program's living processes, recognised by their namespace or session.

        Args:
            servers: Include multiprocessing's servers, which end when no process has their pipes.
        """
        mark = f"SHMACC_NAMESPACE={self._namespace}".encode()
        found = set()
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            with suppress(OSError, ValueError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if pid == os.getpid() or fields[0] in "ZX":
                    continue
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if not servers and any(server in command for server in SERVERS):
                    continue
                if (
                    int(fields[3]) == self.process.pid
                    or mark in Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    found.add(pid)
        return found

    def names(self) -> list[str]:
        return sorted(path.name for path in Path(SHM_DIRECTORY).glob(f"*{self._namespace}*"))

    def kill(self) -> None:
        """Kill all processes that are left, and remove the program's names."""
        deadline = time.monotonic() + LONG
        strays = {int(path.read_text()) for path in self._folder.glob("stray*")}
        while living := self.processes() | {pid for pid in strays if _lives(pid)}:
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{living} cannot be killed"
            time.sleep(0.002)
        self.process.wait(LONG)
        for name in self.names():
            with suppress(FileNotFoundError):
                Path(SHM_DIRECTORY, name).unlink()

    def _text(self, stream: str) -> str:
        return (self._folder / stream).read_text(errors="replace")

    def _said(self) -> str:
        """Return the output that helps to understand a failure."""
        lines = [self._text("out")[-2000:], self._text("err")[-4000:]]
        for pid in sorted(self.processes()):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                lines.append(f"{pid} {status.split()[4]} {command.decode(errors='replace')[:150]}")
        return "\n".join(lines)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Guests:
    """Starts programs for a test, as the fixture `guest`."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder, self._namespace = folder, namespace
        self._started: list[Guest] = []

    def __call__(
        self,
        functions: str = "",
        *main: str,
        way: str = "fork",
        launcher: Launcher = list,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Guest:
        """Start a program with these functions.

        Args:
            functions: Their source text, which every process of the program executes.
            main: Source texts for the program's main block, in order; by default this block
                starts `lead` and `work`.
            way: A start method, or "command" for `shmacc-run`.
            launcher: Turns the program's command into the command that is started.
            flags: The interpreter's options.
            env: Environment variables in addition to the test's.
            options: Keyword arguments of `run`, or flags of `shmacc-run`.
        """
        path = self.write("program.py", functions, *main)
        if way == "command":
            command = [SHMACC_RUN, *_as_flags({"workers": 2} | options), str(path)]
        else:
            command = [sys.executable, *flags, str(path)]
        return self.command(launcher(command), way=way, env=env, **options)

    def write(self, name: str, functions: str, *main: str) -> Path:
        """Write a program; make its folder if there is none."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'{_HEAD}{textwrap.dedent(functions)}\nif __name__ == "__main__":\n'
            + "".join(
                textwrap.indent(textwrap.dedent(part).strip("\n") + "\n", "    ")
                for part in main or ["start(lead, work)"]
            )
        )
        return path

    def command(
        self,
        command: Sequence[str],
        *,
        way: str = "fork",
        stdin: bytes = b"",
        terminal: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Guest:
        """Start a command, in the folder of the program."""
        environment = {
            **{name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name},
            "PYTHONPATH": str(TESTS),
            "GUEST_WAY": way,
            "GUEST_FOLDER": str(self.folder),
            "GUEST_OPTIONS": json.dumps(options),
            "GUEST_NAMESPACE": self._namespace,
            **(env or {}),
        }
        started = Guest(
            command, self.folder, self._namespace, environment, stdin=stdin, terminal=terminal
        )
        self._started.append(started)
        return started

    def end(self) -> None:
        for started in self._started:
            started.kill()


def _as_flags(options: Mapping[str, Any]) -> list[str]:
    return [
        part
        for name, value in options.items()
        if value is not None
        for part in ("--" + name.replace("_", "-"), str(value))
    ]


@pytest.fixture
def guest(tmp_path: Path, namespace: str) -> Iterator[Guests]:
    guests = Guests(tmp_path, namespace)
    yield guests
    guests.end()
