"""Segments in use whose name was removed, or will be by systemd."""

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass

from shmacc import _names as names
from shmacc._names import SegmentName

_DELETED = " (deleted)"
_LOGIND_SETTINGS = "/etc/systemd/logind.conf"
_LOGIND_USERS = "/run/systemd/users"
_LINGERING = "/var/lib/systemd/linger"
_FIRST_ORDINARY_UID = 1000  # systemd spares system users


@dataclass(frozen=True, slots=True)
class UnlinkedUse:
    """A process that uses a segment whose name was removed.

    Attributes:
        name: The segment's former name.
        pid: The process.
    """

    name: SegmentName
    pid: int


def unlinked_uses() -> tuple[UnlinkedUse, ...]:
    """List processes that use a segment without a name, as far as this user may see.

    That is normal after ``unlink()``, and a problem after an ``rm`` or systemd's RemoveIPC:
    processes that attach from now on make a new segment and do not share it with these.
    """
    found = {
        UnlinkedUse(name, pid)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        for name in _unlinked_of(pid)
    }
    return tuple(sorted(found, key=lambda use: (use.name.system_name, use.pid)))


def goes_at_logout(uid: int) -> bool:
    """Whether systemd will remove this user's segments when the user's last session ends."""
    if uid < _FIRST_ORDINARY_UID or not os.path.isdir(_LOGIND_USERS):
        return False
    with contextlib.suppress(KeyError):
        if os.path.exists(f"{_LINGERING}/{pwd.getpwuid(uid).pw_name}"):
            return False
    removes = True  # systemd's default
    with contextlib.suppress(OSError), open(_LOGIND_SETTINGS, encoding="utf-8") as settings:
        for line in settings:
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                removes = value.strip().lower() not in {"no", "false", "0", "off"}
    return removes


def _unlinked_of(pid: int) -> Iterator[SegmentName]:
    start = f"{names.SHM_DIRECTORY}/{names.PREFIX}"
    with contextlib.suppress(OSError):  # it ended, or is another user's
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(start) and target.endswith(_DELETED):
                    file_name = os.path.basename(target.removesuffix(_DELETED))
                    name = names.parse_segment_file(file_name)
                    if name is not None:
                        yield name
