"""Runs processes in pid namespaces of their own, where pids of other processes mean nothing."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
from helpers import own_shm
from helpers.apart import Apart, Pipe
from helpers.stepping_tracer import Mark
from helpers.stepping_walk import stopped

_CLONE_NEWPID: Final = 0x20000000


def leave_pids_behind() -> None:
    """Make the next child the first process of a new pid namespace, with mounts of its own."""
    own_shm.call("unshare", _CLONE_NEWPID | own_shm.CLONE_NEWNS)
    own_shm.mount("none", "/", flags=own_shm.MS_REC_PRIVATE)


def see_own_pids() -> None:
    """Give the namespace's first process a /proc in which it is process 1."""
    own_shm.mount("proc", "/proc", "proc")
    assert os.getpid() == 1
    assert os.readlink("/proc/self") == "1"  # noqa: PTH115  no path, a link's text


@dataclass(frozen=True)
class Elsewhere:
    """A process that is process 1 of a pid namespace of its own.

    Attributes:
        pid: The process's pid in the test's namespace.
        governor: The parent of the process, which passes on its result.
    """

    pid: int
    governor: Apart

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def result(self) -> Any:
        return self.governor.result()


@contextmanager
def elsewhere(govern: Callable[..., object], *args: Any) -> Iterator[Elsewhere]:
    """Start a process that is process 1 of a new pid namespace.

    Args:
        govern: Runs in a process whose next child is process 1; sends that child's pid by the pipe.
        args: Arguments of ``govern``; the pipe comes after them.
    """
    with Apart(_govern, govern, args) as governor:
        pid = governor.hear()
        try:
            yield Elsewhere(pid, governor)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _govern(govern: Callable[..., object], args: tuple[Any, ...], pipe: Pipe) -> object:
    leave_pids_behind()
    return govern(*args, pipe)


def perform(function: Callable[..., object], *args: Any) -> object:
    """Run a function in a child; send the child's pid after its first message. For `elsewhere`.

    Args:
        function: Gets the arguments, but its own pipe in place of the last argument.
        args: The function's arguments, and the pipe by which to send the pid.
    """
    *others, pipe = args
    with Apart(_see_and_run, function, others).ready() as process:
        pipe.say(process.pid)
        return process.result()


def _see_and_run(function: Callable[..., object], args: Sequence[Any], pipe: Pipe) -> object:
    see_own_pids()
    return function(*args, pipe)


def stop(act: Callable[[Mark], None], step: int, pipe: Pipe) -> int:
    """Stop a process under the lock, send its pid, return its exit status; for `elsewhere`."""

    def see_and_act(mark: Mark) -> None:
        see_own_pids()
        act(mark)

    with stopped(see_and_act, step) as process:
        pipe.say(process.pid)
        return process.end()


@cache
def refusal_of_pid_namespaces() -> str | None:
    """Return why tests cannot make pid namespaces here; None if they can."""
    try:
        with elsewhere(perform, lambda pipe: pipe.say()) as process:
            process.result()
    except OSError as error:
        return f"needs pid and mount namespaces, which takes root: {error}"
    return None


needs_pid_namespaces = pytest.mark.skipif(
    refusal_of_pid_namespaces() is not None, reason=str(refusal_of_pid_namespaces())
)
