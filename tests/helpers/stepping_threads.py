"""Runs one thread of another process by system calls or by single instructions.

The other threads of that process run as they like.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, Self

from helpers.stepping_tracer import CONT, DETACH, SINGLESTEP, SYSCALL, ptrace

if TYPE_CHECKING:
    from collections.abc import Callable

_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_WALL: Final = 0x40000000  # also wait for threads other than a process's first


class TracedThread:
    """A thread of a descendant process that is held, and runs only when told to."""

    def __init__(self, thread: int) -> None:
        """Hold the thread, wherever it is; this interrupts a system call in which it waits."""
        self.thread = thread
        self.held = False
        ptrace(_SEIZE, thread)
        ptrace(_INTERRUPT, thread)
        self._wait()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Go on, looking whenever a system call begins or ends, until the condition holds."""
        while not condition():
            self._go(SYSCALL)

    def step(self) -> None:
        self._go(SINGLESTEP)

    def let_go(self) -> None:
        if self.held:
            self.held = False
            ptrace(DETACH, self.thread)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing held."""
        self.let_go()

    def _go(self, request: int) -> None:
        ptrace(request, self.thread)
        self.held = False
        self._wait()

    def _wait(self) -> None:
        while True:
            _, status = os.waitpid(self.thread, _WALL)
            assert os.WIFSTOPPED(status), f"the traced thread has ended with status {status}"
            number = os.WSTOPSIG(status)
            if number == signal.SIGTRAP:
                self.held = True
                return
            ptrace(CONT, self.thread, number)  # passes on a signal sent to the thread
