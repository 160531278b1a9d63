"""Runs a forked child instruction by instruction, by ptrace.

Nothing here depends on the processor. To learn how far a child has come, ask the kernel (who holds
a lock?) or let the child send a signal; its registers are never read.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, Final, Self

import pytest

Mark = Callable[[], None]

_TRACEME: Final = 0
CONT: Final = 7
SINGLESTEP: Final = 9
DETACH: Final = 17
SYSCALL: Final = 24
SETOPTIONS: Final = 0x4200
EXITKILL: Final = 0x100000  # the child ends with its tracer
MARK: Final = signal.SIGUSR1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long] * 4


def ptrace(request: int, pid: int, data: int = 0, address: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace({request}): {os.strerror(code)}")


class EndedError(Exception):
    """The child ran to its end."""


class Traced:
    """A child that runs ``function(mark)``, and only as far as it is told to.

    A call of ``mark()`` in the child is a place where `run_to_mark` stops.
    """

    def __init__(self, function: Callable[[Mark], object]) -> None:
        """Fork a process that stops before the first instruction of the function."""
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(function)
        self._wait()
        ptrace(SETOPTIONS, self.pid, EXITKILL)

    def run_to_mark(self) -> None:
        self._go(CONT)
        while self.stopped_by != MARK:
            self._go(CONT, self.stopped_by)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds; check it before and after each system call."""
        while not condition():
            self._go(SYSCALL)

    def step(self) -> None:
        self._go(SINGLESTEP)

    def steps(self, condition: Callable[[], bool]) -> Iterator[int]:
        """Step by instructions until the condition fails after a step; yield each step's number."""
        for number in count(1):
            self.step()
            yield number
            if not condition():
                return

    def steps_to_mark(self) -> Iterator[int]:
        """Step by instructions to the next mark; yield each step's number."""
        return self.steps(lambda: self.stopped_by != MARK)

    def finish(self) -> None:
        """Let the process run to its end; it must not fail."""
        try:
            while True:
                self._go(CONT, 0 if self.stopped_by == MARK else self.stopped_by)
        except EndedError:
            assert self.status == 0, f"the traced child ended with status {self.status}"

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def stop(self) -> None:
        """Stop the child where it is, as SIGSTOP does, and trace it no longer."""
        ptrace(DETACH, self.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def resume(self) -> None:
        """Continue the child after `stop`, wait for its end, and check that it did not fail."""
        os.kill(self.pid, signal.SIGCONT)
        status = self.end()
        assert status == 0, f"the continued child ended with status {status}"

    def end(self) -> int:
        """Wait for the child's end after `stop`; return its status, as from `os.waitpid`."""
        while self.status is None:
            self._collect()
        return self.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _go(self, request: int, number: int = 0) -> None:
        # A stop at a system call shows SIGTRAP with one more bit: that is no signal to deliver.
        ptrace(request, self.pid, 0 if number & 0x7F == signal.SIGTRAP else number)
        self._wait()

    def _wait(self) -> None:
        self._collect()
        if self.status is not None:
            raise EndedError

    def _collect(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSTOPPED(status):
            self.stopped_by = os.WSTOPSIG(status)
        else:
            self.status = status


def mark_call(module: Any, function: str, mark: Mark) -> None:
    """Make a module's function call `mark` before and after its work, in this process."""
    real = getattr(module, function)

    def marked(*args: Any) -> Any:
        mark()
        made = real(*args)
        mark()
        return made

    setattr(module, function, marked)


def _run(function: Callable[[Mark], object]) -> None:
    status = 1
    try:
        # The tracer sees ignored signals, too; without a tracer, marks must do nothing.
        signal.signal(MARK, signal.SIG_IGN)
        ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        function(lambda: os.kill(os.getpid(), MARK))
        status = 0
    except BaseException:  # noqa: BLE001  the child must not go on as the test runner
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process and its new children on one core, which halves the time of a step.

    The core is the one on which this process runs, so that two stepping tests rarely share a core.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_libc.sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@cache
def refusal() -> str | None:
    """Return why this machine does not let a process trace its child; None if it does."""
    pid = os.fork()
    if pid == 0:
        try:
            ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return f"ptrace is refused here: {os.strerror(os.waitstatus_to_exitcode(status))}"
    try:
        ptrace(SINGLESTEP, pid)
        os.waitpid(pid, 0)
    except OSError as error:
        return f"single steps are refused here: {error}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


needs_ptrace = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
