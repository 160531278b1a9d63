"""Stops a forked child before and after each of its system calls, by ptrace."""

import ctypes
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import pytest
from helpers.stepping_tracer import (
    EXITKILL,
    MARK,
    SETOPTIONS,
    SYSCALL,
    Mark,
    Traced,
    ptrace,
    refusal,
)

_TRACESYSGOOD: Final = 1
_GET_SYSCALL_INFO: Final = 0x420E
_POKEUSER: Final = 6
_AT_A_CALL: Final = 0x85

# Offsets of a stopped process's registers. Writing them makes a system call fail.
_MACHINE: Final = "x86_64"
_NUMBER, _RESULT = 15 * 8, 10 * 8

_F_GETLK: Final = 5
_F_SETLK: Final = 6

# The numbers of system calls that tests make fail.
NAMES: Final = {
    2: "open", 6: "lstat", 9: "mmap", 10: "mprotect", 12: "brk", 17: "pread64", 18: "pwrite64",
    21: "access", 25: "mremap", 28: "madvise", 72: "fcntl", 73: "flock", 77: "ftruncate",
    87: "unlink", 91: "fchmod", 137: "statfs", 257: "openat", 262: "newfstatat", 265: "linkat",
    269: "faccessat", 285: "fallocate", 318: "getrandom",
}  # fmt: skip


class _Info(ctypes.Structure):
    """The kernel's ``struct ptrace_syscall_info``, as it is before a call."""

    _fields_ = (
        ("op", ctypes.c_uint8), ("arch", ctypes.c_uint32), ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64), ("number", ctypes.c_uint64), ("arguments", ctypes.c_uint64 * 6),
    )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A system call before or after which the child is stopped.

    Attributes:
        before: Whether the child is stopped before the call.
        number: The machine's number of the call; valid only if `before`.
        arguments: The call's arguments; valid only if `before`.
    """

    before: bool
    number: int
    arguments: tuple[int, ...]


class Calling(Traced):
    """A child that runs ``function(mark)``, and stops before and after each system call."""

    def __init__(self, function: Callable[[Mark], object]) -> None:
        """Fork a process that stops before the first instruction of the function."""
        super().__init__(function)
        ptrace(SETOPTIONS, self.pid, EXITKILL | _TRACESYSGOOD)

    def calls_to_mark(self) -> Iterator[Call]:
        """Run to the next mark. Yield each system call twice, before and after it."""
        while True:
            self._go(SYSCALL, 0 if self.stopped_by == MARK else self.stopped_by)
            if self.stopped_by == MARK:
                return
            if self.stopped_by == _AT_A_CALL:
                info = _Info()
                ptrace(_GET_SYSCALL_INFO, self.pid, ctypes.addressof(info), ctypes.sizeof(info))
                yield Call(info.op == 1, info.number, tuple(info.arguments))

    def no_lock(self, call: Call) -> int:
        """Return the errno of this call in a kernel without memory for locks; 0: it works."""
        if NAMES.get(call.number) != "fcntl" or self.lets_go(call):
            return 0
        return {_F_GETLK: errno.ENOMEM, _F_SETLK: errno.ENOLCK}.get(call.arguments[1], 0)

    @staticmethod
    def asks(call: Call) -> bool:
        """Whether the system call asks who holds a record lock."""
        return call.before and NAMES.get(call.number) == "fcntl" and call.arguments[1] == _F_GETLK

    def lets_go(self, call: Call) -> bool:
        """Whether the call releases a record lock; the child is stopped before it."""
        if NAMES.get(call.number) != "fcntl" or call.arguments[1] != _F_SETLK:
            return False
        with open(f"/proc/{self.pid}/mem", "rb") as memory:  # noqa: PTH123  no text
            kind = os.pread(memory.fileno(), 2, call.arguments[2])
        return int.from_bytes(kind, sys.byteorder) == fcntl.F_UNLCK

    def fail(self, code: int) -> None:
        """Let the call before which the child is stopped fail with this errno; it is not made."""
        ptrace(_POKEUSER, self.pid, -1, _NUMBER)
        self._go(SYSCALL)
        assert self.stopped_by == _AT_A_CALL
        ptrace(_POKEUSER, self.pid, -code, _RESULT)


def _ask_and_mark(mark: Mark) -> None:
    os.getppid()
    mark()


@cache
def _cannot_stop() -> str | None:
    if refusal() is not None:
        return refusal()
    try:
        with Calling(_ask_and_mark) as child:
            assert sum(call.before for call in child.calls_to_mark()) > 1
            child.finish()
    except OSError as error:
        return f"system calls cannot be told apart here: {error}"
    return None


needs_calls = pytest.mark.skipif(_cannot_stop() is not None, reason=str(_cannot_stop()))
needs_failures = pytest.mark.skipif(
    _cannot_stop() is not None or platform.machine() != _MACHINE,
    reason=f"knows the registers of {_MACHINE} only, or: {_cannot_stop()}",
)

# Errors that tmpfs and other parts of the kernel may return, with EINTR for interruptible calls.
# Closing a file never fails, nor does fstat. brk reports failure not by an error number, but by a
# result that is too small: glibc takes any other result for memory.
_ANY_PATH: Final = (errno.ENOMEM,)
_PLAUSIBLE: Final[dict[str, tuple[int, ...]]] = {
    "open": (errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    "openat": (errno.EMFILE, errno.ENFILE, errno.ENOMEM), "lstat": _ANY_PATH, "access": _ANY_PATH,
    "faccessat": _ANY_PATH, "newfstatat": _ANY_PATH, "unlink": _ANY_PATH,
    "linkat": (errno.ENOSPC, errno.ENOMEM), "mmap": (errno.ENOMEM,), "mprotect": (errno.ENOMEM,),
    "mremap": (errno.ENOMEM,), "madvise": (errno.ENOMEM,), "statfs": _ANY_PATH,
    "getrandom": (errno.EINTR,), "pread64": (errno.ENOMEM,),
    "pwrite64": (errno.ENOSPC, errno.ENOMEM), "ftruncate": (errno.EFBIG, errno.ENOMEM),
    "fchmod": (errno.ENOMEM,), "flock": (errno.ENOLCK, errno.ENOMEM),
    "fallocate": (errno.EINTR, errno.ENOSPC, errno.ENOMEM),
}  # fmt: skip
_OF_FCNTL: Final = {_F_GETLK: (errno.ENOMEM, errno.EINTR), _F_SETLK: (errno.ENOLCK, errno.EINTR)}
_AT_EMPTY_PATH: Final = 0x1000
_O_TMPFILE: Final = 0o20000000


def plausible(call: Call) -> tuple[int, ...]:
    name = NAMES.get(call.number, "")
    if name == "fcntl":
        return _OF_FCNTL.get(call.arguments[1], ())
    if name == "newfstatat" and call.arguments[3] & _AT_EMPTY_PATH:
        return ()
    more = (errno.ENOSPC,) if name == "openat" and call.arguments[2] & _O_TMPFILE else ()
    return _PLAUSIBLE.get(name, ()) + more
