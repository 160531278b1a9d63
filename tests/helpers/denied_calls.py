"""Makes chosen system calls of a process fail for the rest of its life, by a seccomp filter."""

import ctypes
import errno
import os
import platform
import struct
from functools import cache
from typing import Final

import pytest

# The numbers of the system calls, for each machine type.
_NUMBERS: Final[dict[str, dict[str, int]]] = {
    "x86_64": {
        "mmap": 9, "mprotect": 10, "rt_sigaction": 13, "pread64": 17, "madvise": 28, "fcntl": 72,
        "statfs": 137, "mlock": 149, "munlock": 150, "futex": 202, "fallocate": 285,
        "seccomp": 317, "getrandom": 318, "pidfd_send_signal": 424, "pidfd_open": 434,
    },
    "aarch64": {
        "fcntl": 25, "statfs": 43, "fallocate": 47, "pread64": 67, "futex": 98,
        "rt_sigaction": 134, "mmap": 222, "mprotect": 226, "mlock": 228, "munlock": 229,
        "madvise": 233, "seccomp": 277, "getrandom": 278, "pidfd_send_signal": 424,
        "pidfd_open": 434,
    },
}  # fmt: skip
_NUMBERS["riscv64"] = _NUMBERS["aarch64"]
NUMBERS: Final = _NUMBERS.get(platform.machine(), {})

MAP_ANEW: Final = 0x4012  # MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, as mmap's flags

_SET_NO_NEW_PRIVS, _SET_MODE_FILTER = 38, 1
LOAD, IS, RETURN = 0x20, 0x15, 0x06
ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_FIRST_ARGUMENT: Final = 16  # its offset in struct seccomp_data; the lower half comes first

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(*lines: tuple[int, int, int, int], flags: int = 0) -> int:
    """Install a filter for this thread, and for all threads that it starts later."""
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    filtering = ctypes.byref(_Program(len(lines), code))
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, None, 0, 0) == 0:
        result = _libc.syscall(NUMBERS["seccomp"], _SET_MODE_FILTER, flags, filtering)
        if result >= 0:
            return int(result)
    raise OSError(ctypes.get_errno(), "seccomp")


def deny(call: str, code: int = errno.EPERM, **arguments: int) -> None:
    """Let this process's system calls with that name fail from now on.

    Args:
        call: The call's name.
        code: The errno with which the call fails.
        arguments: Only calls with these arguments fail; ``a2=24``: the third argument is 24.
    """
    conditions = [(0, NUMBERS[call])]
    for name, value in arguments.items():
        conditions.append((_FIRST_ARGUMENT + 8 * int(name[1:]), value & 0xFFFFFFFF))
    program = []
    for number, (place, value) in enumerate(conditions):
        otherwise = 2 * (len(conditions) - number) - 1
        program += [(LOAD, 0, 0, place), (IS, 0, otherwise, value)]
    install(*program, (RETURN, 0, 0, _ERRNO | code), (RETURN, 0, 0, ALLOW))


@cache
def _cannot() -> bool:
    if not NUMBERS:
        return True
    pid = os.fork()
    if pid == 0:
        try:
            deny("mlock")
            os._exit(0 if _libc.mlock(0, 0) == -1 else 1)
        except BaseException:  # noqa: BLE001  the child must not go on
            os._exit(1)
    return os.waitpid(pid, 0)[1] != 0


needs_denials = pytest.mark.skipif(_cannot(), reason="needs seccomp, on a machine that it knows")
