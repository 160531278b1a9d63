"""The namespace of a run's children, and the process that cleans up after them (cleaner.py)."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from typing import NamedTuple

from shmacc._base import names
from shmacc._run import cleaner
from shmacc._run.record import Called, Record, kept
from shmacc._run.signals import masked
from shmacc._run.spawning import execute
from shmacc._segment import run_records
from shmacc.errors import ShmaccError

_TOKEN = re.compile(r"[0-9a-f]{16}")
_TOKENS = 13  # so many fit into the name of a file in memory, which has at most 249 bytes
_ANSWER = 10.0  # seconds within which a cleaner that lives has cleaned up, or a process has died


class Cleaner:
    """Starts and instructs the process that cleans up after a run (cleaner.py).

    Attributes:
        mark: The mark of the run's processes: the tokens of the innermost outer runs, then this
            run's token.
    """

    def __init__(
        self, namespace: str, *, named: bool, starter: int = 0, variables: tuple[str, ...] = ()
    ) -> None:
        given = os.urandom(8).hex(), names.SHM_DIRECTORY, namespace, named
        self._job = cleaner.Job(*given, starter, variables)
        outer = filter(_TOKEN.fullmatch, os.environ.get(cleaner.VARIABLE, "").split("/"))
        self.mark = "/".join([*outer, self._job.token][-_TOKENS:])
        self._unsent = b""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)  # noqa: FBT003  a stopped cleaner does not read
        # A program that embeds Python has told multiprocessing where Python is.
        python = None if getattr(sys, "frozen", False) else spawn.get_executable()
        with theirs:
            try:
                end = theirs.fileno()
                self._pid = self._executed(python, end) if python else self._forked(end)
            except BaseException:
                self._socket.close()
                raise
        self._pidfd: int | None = None
        with suppress(OSError):  # the kernel has no pidfds, or no descriptor is free
            self._pidfd = os.pidfd_open(self._pid)
        _in_use.add(self)

    def _executed(self, python: str, end: int) -> int:
        job = self._job
        named = "named" if job.named else "unnamed"
        arguments = [str(os.getpid()), job.token, job.folder, job.namespace, named]
        arguments += [str(job.starter), *job.variables]
        # Without the outer runs' mark, or their ends would kill it before it has removed names.
        environment = {**os.environ}
        environment.pop(cleaner.VARIABLE, None)
        streams = [(os.POSIX_SPAWN_DUP2, end, number) for number in (0, 1)]
        return execute(
            [python, "-I", "-S", cleaner.__file__, *arguments],
            environment,
            [],
            file_actions=[*streams, (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
            # A terminal's Ctrl-C must not end it, nor a signal to all processes of a job.
            setsid=True,
            setsigmask=signal.valid_signals(),
        )

    def _forked(self, end: int) -> int:
        """Fork the cleaner: a frozen program's ``sys.executable`` would start the program again."""
        parent = os.getpid()
        with masked(signal.SIG_BLOCK, signal.valid_signals()):
            pid = os.fork()
            if pid != 0:
                return pid
            try:
                os.setsid()
                os.dup2(end, 0)
                os.dup2(end, 1)
                os.closerange(2, os.sysconf("SC_OPEN_MAX"))
                cleaner.main(parent, self._job)
            finally:
                os._exit(0)

    def note_started(self, pid: int) -> None:
        """Tell the cleaner that a child, which leads a process group, has started."""
        self._send(f"+{pid}\n")

    def note_ended(self, pid: int) -> None:
        """Tell the cleaner that a child's group was killed."""
        self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        """Send a line, or as much as a cleaner takes that is stopped; the rest is sent later."""
        self._unsent += line.encode()
        with suppress(OSError):  # it takes no more now, or was killed
            while self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]

    def finish(self, *, remove: bool) -> None:
        """Let the cleaner end leftover processes, and remove the names if `remove`. Idempotent."""
        if self._socket.fileno() < 0:
            return
        inner: list[str] = []
        if remove and self._job.named:
            with suppress(OSError, ShmaccError):
                started = run_records.started_in(lambda outer: outer == self._job.namespace)
                inner = [name.namespace for name in started if name.namespace]
        answer, hangs = self._answer(" ".join(["remove", *inner]) if remove else "keep")
        answered = answer.endswith(b"\n")
        if not answered:  # the cleaner was killed, or is stopped
            answer = " ".join(map(str, cleaner.end(self._job))).encode()
            if remove:
                cleaner.remove_names(self._job, inner)
            self._kill(hangs=hangs)
        if self._pidfd is not None:
            _reap(os.P_PIDFD, self._pidfd)
        elif answered or hangs:
            _reap(os.P_PID, self._pid)
        # If this process is pid 1, it must reap the killed processes.
        for pid in map(int, answer.split()):
            _reap(os.P_PID, pid)
        self._close()

    def _answer(self, line: str) -> tuple[bytes, bool]:
        """Return what the cleaner answers to its last line, and whether it hangs."""
        answer = b""
        self._socket.settimeout(_ANSWER)
        try:
            self._socket.sendall(self._unsent + f"{line}\n".encode(), socket.MSG_NOSIGNAL)
            while not answer.endswith(b"\n") and (read := self._socket.recv(4096)):
                answer += read
        except TimeoutError:
            return answer, True
        except OSError:  # the cleaner was killed before it read all
            pass
        return answer, False

    def _kill(self, *, hangs: bool) -> None:
        """Kill the cleaner, which may have ended long ago.

        If other code has reaped it, its pid may be another process's by now, but its pidfd is not.
        Without a pidfd, kill it only if it `hangs`, which a process that has ended does not.
        """
        with suppress(OSError):  # it has ended
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif hangs:
                os.kill(self._pid, signal.SIGKILL)

    def _close(self) -> None:
        _in_use.discard(self)
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        self._socket.close()

    @staticmethod
    def close_in_child() -> None:
        """Close all cleaners' sockets after a fork.

        The child must not instruct its parent's cleaner. And it might keep the sockets open when
        its parent executes another program, which the cleaner sees only by the end of its input.
        """
        for each in tuple(_in_use):
            each._close()  # noqa: SLF001


_in_use: set[Cleaner] = set()
os.register_at_fork(after_in_child=Cleaner.close_in_child)


def _reap(kind: int, number: int) -> None:
    """Reap a killed process, if it is a child of this one. The kernel may not end it in time."""
    deadline = time.monotonic() + _ANSWER
    with suppress(OSError):
        while os.waitid(kind, number, os.WEXITED | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)


class Surrounded(NamedTuple):
    """The namespace of a run's children, the run's cleaner and its record; see `of_children`."""

    namespace: str
    cleaner: Cleaner
    record: Record


@contextmanager
def of_children(
    name: str | None,
    roles: Sequence[str],
    restarts: int,
    called: Called | None = None,
    starter: int = 0,
    variables: tuple[str, ...] = (),
) -> Iterator[Surrounded]:
    """Yield a run's namespace, cleaner and record; then remove the names in the namespace.

    If a named run fails, its names stay. If this process is killed, they stay while the process
    `starter` lives (0: for good). `name` is the run's name; see `record.kept` for the rest.
    """
    outer = names.current_namespace()
    if name is None:
        # A long outer namespace is cut: runs still differ by their random numbers.
        own = f"run-{os.getpid()}-{os.urandom(6).hex()}"
        namespace = f"{outer[: names.LONGEST_NAMESPACE - len(own) - 1]}.{own}" if outer else own
    else:
        namespace = names.checked_namespace(name, "name")
        if outer:
            namespace = names.checked_namespace(f"{outer}.{name}", "name")
    named = name is not None
    cleaner = Cleaner(namespace, named=named, starter=starter, variables=variables)
    remove = not named
    try:
        with kept(namespace, roles, called, named=named, restarts=restarts) as record:
            try:
                yield Surrounded(namespace, cleaner, record)
                remove = True
            finally:  # while the record keeps others from beginning a run of this name
                cleaner.finish(remove=remove)
    finally:
        cleaner.finish(remove=False)
