"""Gives a process a private /dev/shm of any size.

Run as a script, this file exits with status 0 if the system allows such a /dev/shm.
"""

import ctypes
import os
import subprocess
import sys
from typing import Any, Final

MIB: Final = 1 << 20

BIND: Final = 0x1000
REMOUNT: Final = 0x20
READ_ONLY: Final = 0x1

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWPID: Final = 0x20000000
_CLONE_NEWUSER: Final = 0x10000000
MS_REC_PRIVATE: Final = 0x4000 | 1 << 18


def enter_own_shm(size: int) -> None:
    """Give this process, and the processes that it starts later, a /dev/shm of `size` bytes."""
    enter_own_namespace()
    mount("tmpfs", "/dev/shm", "tmpfs", options=f"size={size},mode=1777")  # noqa: S108


def enter_own_namespace() -> None:
    """Enter a new mount namespace; without root's rights, in a new user namespace."""
    if os.geteuid() == 0:
        call("unshare", CLONE_NEWNS)
    else:
        ids = {"uid": os.geteuid(), "gid": os.getegid()}
        call("unshare", CLONE_NEWNS | _CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        for kind, number in ids.items():
            _write(f"/proc/self/{kind}_map", f"{number} {number} 1")
    mount("none", "/", flags=MS_REC_PRIVATE)


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    """Make the system call; this process must be in a mount namespace of its own."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def call(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123  no Path is needed
        file.write(text)


def available() -> bool:
    """Whether `enter_own_shm` works here."""
    # Try in a new process: this process may have threads, and then cannot enter a user namespace.
    probe = subprocess.run([sys.executable, __file__], capture_output=True, check=False)
    return probe.returncode == 0


if __name__ == "__main__":
    enter_own_shm(MIB)
