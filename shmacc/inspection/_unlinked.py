"""Segments in use whose name was removed, or will be removed by systemd."""

import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shmacc import _core
from shmacc._base import names
from shmacc._base.names import SegmentName
from shmacc.errors import ShmaccError
from shmacc.inspection._processes import Look, open_files

_DELETED = " (deleted)"
_LOGIND_FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")
_LOGIND_USERS = "/run/systemd/users"
_LOGIND = "systemd-logind"
_LINGERING = "/var/lib/systemd/linger"
_FIRST_ORDINARY_UID = 1000  # systemd spares system users


@dataclass(frozen=True, slots=True)
class UnlinkedUse:
    """A process that uses a segment whose name was removed.

    Attributes:
        name: The segment's former name.
        pid: The process.
        inode: The inode of the segment's file, which is the same for all its users.
        bytes_reserved: Bytes of memory that the segment occupies.
        under_users: Whether another program, such as `rm`, removed the name: this library would
            have marked the segment as removed. False if this user may not read the segment.
    """

    name: SegmentName
    pid: int
    inode: int
    bytes_reserved: int
    under_users: bool


def unlinked_uses() -> tuple[UnlinkedUse, ...]:
    """List processes that use a segment without a name, as far as this user may see.

    That is normal after ``unlink()``, and a problem after an ``rm`` or systemd's RemoveIPC:
    processes that attach from now on make a new segment, which these processes do not use.
    """
    if not _some_memory_has_no_name():
        return ()
    device = os.stat(names.SHM_DIRECTORY).st_dev
    found = set(_unlinked_of_all(device))
    return tuple(
        sorted(found, key=lambda use: (use.name.system_name, use.under_users, use.pid, use.inode))
    )


def _some_memory_has_no_name() -> bool:
    """Whether more of /dev/shm is used than its files occupy.

    This test is cheap, and usually says no. The search through the open files of all processes is
    slow. The files are counted first: if one grows meanwhile, the search is in vain, but no segment
    is missed.
    """
    named = {}
    with os.scandir(names.SHM_DIRECTORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                named[status.st_ino] = status.st_blocks * 512
    space = os.statvfs(names.SHM_DIRECTORY)
    used = (space.f_blocks - space.f_bfree) * space.f_frsize
    return space.f_blocks == 0 or used > sum(named.values())  # 0 blocks: no limit


def unlinked_memory(uses: Iterable[UnlinkedUse]) -> int:
    """Return the bytes of memory that these processes keep from being freed.

    Args:
        uses: From `unlinked_uses`; a segment that several processes use counts once.
    """
    return sum({use.inode: use.bytes_reserved for use in uses}.values())


def goes_at_logout(uid: int, look: Look) -> bool:
    """Whether systemd will remove this user's segments when the user's last session ends.

    systemd's folders alone prove nothing: a container's image has them, but no logind runs there.
    """
    if uid < _FIRST_ORDINARY_UID or not os.path.isdir(_LOGIND_USERS) or not look.sees(_LOGIND):
        return False
    with contextlib.suppress(KeyError):
        if os.path.exists(f"{_LINGERING}/{pwd.getpwuid(uid).pw_name}"):
            return False
    removes = True  # systemd's default
    for path in _logind_settings():
        with (
            contextlib.suppress(OSError),
            open(path, encoding="utf-8", errors="replace") as settings,
        ):
            for line in settings:
                key, _, value = line.partition("=")
                if key.strip() == "RemoveIPC":
                    removes = value.strip().lower() not in {"no", "n", "false", "f", "0", "off"}
    return removes


def _logind_settings() -> list[str]:
    """List the files of logind's settings; the last one to set something counts (logind.conf(5)).

    If several folders have a file of the same name, the first folder's counts.
    """
    whole = [path for folder in _LOGIND_FOLDERS if os.path.exists(path := f"{folder}/logind.conf")]
    parts: dict[str, str] = {}
    for folder in _LOGIND_FOLDERS:
        with contextlib.suppress(OSError):
            for file in os.listdir(f"{folder}/logind.conf.d"):
                if file.endswith(".conf"):
                    parts.setdefault(file, f"{folder}/logind.conf.d/{file}")
    return [*whole[:1], *(parts[file] for file in sorted(parts))]


def _unlinked_of_all(device: int) -> Iterator[UnlinkedUse]:
    """Yield the uses on this device: another container's /dev/shm is another device."""
    marked: dict[int, bool] = {}
    for pid, link, target in open_files(f"{names.SHM_DIRECTORY}/{names.PREFIX}"):
        if not target.endswith(_DELETED):
            continue
        name = names.parse_segment_file(os.path.basename(target.removesuffix(_DELETED)))
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.stat(link)  # does not open the file
            # The process may have closed the file and reused the descriptor's number.
            if name is not None and status.st_dev == device and status.st_nlink == 0:
                if status.st_ino not in marked:
                    is_marked = _is_marked(link)
                    if os.stat(link).st_ino != status.st_ino:
                        continue
                    marked[status.st_ino] = is_marked
                under_users = not marked[status.st_ino]
                yield UnlinkedUse(
                    name, pid, status.st_ino, status.st_blocks * 512, under_users=under_users
                )


def _is_marked(link: str) -> bool:
    """Whether a segment that a process has open is marked as removed, or cannot be read."""
    with contextlib.suppress(ShmaccError):
        view = _core.view(link)[2]
        if view is not None:
            with contextlib.closing(view):
                return view.unlinked
    return True
