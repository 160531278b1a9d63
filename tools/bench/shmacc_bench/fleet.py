"""The peers' processes, seen from the runner: start, ask, and give up on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shmacc_bench.peers import MODULES, RELEASED
from shmacc_bench.peers.base import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_SECONDS = 120.0  # TensorFlow and torch import at once on two cores
REQUEST_SECONDS = 180.0  # the slowest request fills 10,000,000 rows
STOP_SECONDS = 15.0
TERMINATE_SECONDS = 3.0
ACCEPT_SLICE_SECONDS = 0.2
POLL_SECONDS = 0.01
MOST_RESTARTS = 2  # a peer that crashes once may do the next case; one that always does may not


PYTHON_OF_RELEASED = Path(__file__).parents[3] / ".venv-bench-1.0" / "bin" / "python"


class PeerFailedError(Exception):
    """The peer's process raised, died, or did not answer; the message says which."""


class Member:
    """One peer's process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Take over a process that has connected; its first message is still to be read."""
        self.name = name
        self.process = process
        self.connection = connection
        self.alive = True

    def receive(self, seconds: float) -> Any:
        """Return the next answer; UnsupportedError or PeerFailedError if there is none to use."""
        try:
            if not self.connection.poll(seconds):
                self.kill()
                raise PeerFailedError(f"no answer within {seconds:g} s")
            status, result = self.connection.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise PeerFailedError(f"ended with status {self.process.returncode}") from error
        if status == "done":
            return result
        if status == "unsupported":
            raise UnsupportedError(result)
        raise PeerFailedError(result)

    def ask(self, request: str, *arguments: Any, seconds: float = REQUEST_SECONDS) -> Any:
        """Send a request and return its answer."""
        if not self.alive:
            raise PeerFailedError("ended earlier")
        try:
            self.connection.send((request, arguments))
        except OSError as error:
            self.kill()
            raise PeerFailedError("went away") from error
        return self.receive(seconds)

    def stop(self) -> None:
        """Let the process end by itself, then end what is left of it."""
        if self.alive:
            with contextlib.suppress(OSError):
                self.connection.send(("stop", ()))
                self._wait(STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """End the process now, with all that it has started: it leads a session of its own."""
        self.alive = False
        if self.process.returncode is None:
            # mpiexec sweeps its ranks' shared memory if it is given the chance.
            os.killpg(self.process.pid, signal.SIGTERM)
            self._wait(TERMINATE_SECONDS)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.connection.close()

    def _wait(self, seconds: float) -> None:
        """Wait until the process has ended, but leave it unreaped: its number stays its own."""
        deadline = time.monotonic() + seconds
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.process.pid, options) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)


class Fleet:
    """The members that started, and why the others did not."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.restarts: dict[str, int] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.directory = tempfile.TemporaryDirectory(prefix="shmacc-bench-")

    @classmethod
    @contextmanager
    def of(cls, names: Sequence[str]) -> Iterator[Self]:
        """Start the peers called `names`, and stop them in the end."""
        fleet = cls()
        try:
            for name in names:
                fleet.start(name)
            yield fleet
            for member in fleet.members.values():
                member.stop()
        finally:
            for member in fleet.members.values():
                if member.alive:
                    member.kill()
            fleet.directory.cleanup()

    def start(self, name: str) -> None:
        """Start one peer; if it cannot run here, `about` says why and it is left out."""
        times = self.restarts.get(name, 0)
        address = str(Path(self.directory.name) / f"{name}.{times}.socket")
        # -P: `import shmacc` must find the installed one, not a source tree that we are started in.
        python = str(PYTHON_OF_RELEASED) if name == RELEASED else sys.executable
        if not Path(python).exists():
            self.about[name] = {"status": "missing", "reason": f"no {python}"}
            return
        command = [python, "-P", "-m", "shmacc_bench.worker", name, address]
        if name == "mpi":
            launcher = self._mpiexec()
            if launcher is None:
                self.about[name] = {"status": "missing", "reason": "no mpiexec"}
                return
            command = [launcher, "-n", "2", *command]
        tools = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": tools}
        log = Path(self.directory.name) / f"{name}.log"
        with _listen(address) as listener, log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            connection = _accept(listener, process)
        if connection is None:
            self.about[name] = {"status": "missing", "reason": _tail(log)}
            return
        member = Member(name, process, connection)
        try:
            about = member.receive(START_SECONDS)
        except PeerFailedError as failure:
            self.about[name] = {"status": "missing", "reason": str(failure)}
            member.kill()
            return
        self.about[name] = {"status": "measured", **about}
        self.members[name] = member

    def ready(self, names: Sequence[str]) -> dict[str, Member]:
        """Return the members among `names`, those that died since started again."""
        for name, member in list(self.members.items()):
            if name in names and not member.alive and self.restarts.get(name, 0) < MOST_RESTARTS:
                self.restarts[name] = self.restarts.get(name, 0) + 1
                self.start(name)
        return {name: self.members[name] for name in names if name in self.members}

    @staticmethod
    def _mpiexec() -> str | None:
        beside = Path(sys.executable).parent / "mpiexec"  # where the mpich wheel puts it
        return str(beside) if beside.exists() else shutil.which("mpiexec")


def known_peers(names: Sequence[str]) -> list[str]:
    """Return `names` in the tables' order, all of them if none are given; ValueError if unknown."""
    unknown = sorted(set(names) - set(MODULES))
    if unknown:
        raise ValueError(f"no such peer: {', '.join(unknown)} (there are: {', '.join(MODULES)})")
    return [name for name in MODULES if name in names or not names]


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(1)
    listener.settimeout(ACCEPT_SLICE_SECONDS)
    return listener


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> Connection | None:
    """Wait for the process to connect; None if it ends before, or does not within its time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return Connection(listener.accept()[0].detach())
        except TimeoutError:
            continue
    process.kill()
    process.wait()
    return None


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "ended without a word"
