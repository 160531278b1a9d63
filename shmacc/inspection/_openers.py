"""Finds in /proc which processes have a file open. A damaged or unlinked file needs this."""

import contextlib
import os
from collections.abc import Iterator


def open_files(below: str) -> Iterator[tuple[int, str, str]]:
    """Yield what visible processes have open: each one's pid, the link in /proc, and its target.

    Args:
        below: The prefix of the target's path.
    """
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = f"/proc/{pid}/fd/{fd}"
                    target = os.readlink(link)
                    if target.startswith(below):
                        yield pid, link, target


def users_of_files(below: str) -> dict[tuple[int, int], set[int]]:
    """Return the pids of other processes that have a file open, by its device and inode."""
    found: dict[tuple[int, int], set[int]] = {}
    for pid, link, _ in open_files(below):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.stat(link)  # does not open the file
            found.setdefault((status.st_dev, status.st_ino), set()).add(pid)
    for users in found.values():
        users.discard(os.getpid())
    return found
