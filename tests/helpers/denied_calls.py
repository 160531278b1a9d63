"""System calls that a filter refuses for the rest of a process's life (seccomp)."""

import ctypes
import errno
import os
import platform
import struct
from functools import cache
from typing import Final

import pytest

# Per machine: the numbers of calls.
_NUMBERS: Final[dict[str, dict[str, int]]] = {
    "x86_64": {
        "mmap": 9, "mprotect": 10, "rt_sigaction": 13, "pread64": 17, "madvise": 28, "fcntl": 72,
        "statfs": 137, "mlock": 149, "munlock": 150, "futex": 202, "fallocate": 285,
        "getrandom": 318,
    },
    "aarch64": {
        "fcntl": 25, "statfs": 43, "fallocate": 47, "pread64": 67, "futex": 98,
        "rt_sigaction": 134, "mmap": 222, "mprotect": 226, "mlock": 228, "munlock": 229,
        "madvise": 233, "getrandom": 278,
    },
}  # fmt: skip
_NR: Final = _NUMBERS.get(platform.machine(), {})

MAP_ANEW: Final = 0x4012  # the flags of a private mapping in another's place

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_FIRST_ARGUMENT: Final = 16  # where it stands in struct seccomp_data; the lower half comes first

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny(call: str, code: int = errno.EPERM, **arguments: int) -> None:
    """Let this process's calls of that name fail from now on.

    Args:
        call: The call's name.
        code: The error that it fails with.
        arguments: Only calls with these arguments fail: ``a2=24`` means the third one.
    """
    conditions = [(0, _NR[call])]
    for name, value in arguments.items():
        conditions.append((_FIRST_ARGUMENT + 8 * int(name[1:]), value & 0xFFFFFFFF))
    program = b""
    for number, (place, value) in enumerate(conditions):
        program += struct.pack("HBBI", _LOAD, 0, 0, place)
        program += struct.pack("HBBI", _IS, 0, 2 * (len(conditions) - number) - 1, value)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | code)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    filtering = _Program(len(program) // 8, program)
    for request, value, given in (
        (_SET_NO_NEW_PRIVS, 1, None),
        (_SET_SECCOMP, _FILTER, ctypes.byref(filtering)),
    ):
        if _libc.prctl(request, value, given, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


@cache
def _cannot() -> bool:
    if not _NR:
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
