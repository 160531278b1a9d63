"""Files under a segment's name that have nothing in them yet.

This version makes none: its segments are complete before they have a name. What is found was left
by something else, or is being made by it. The kernel's record locks tell which: a living maker
holds some byte of its file.
"""

import fcntl
import os
import struct

from shmacc.errors import DataLossError
from shmacc.names import SegmentName

_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_BEGINNING = 4096  # bytes; a segment's first ones say what it is


class UnfinishedError(DataLossError):
    """Such a file stands under the name.

    Attributes:
        held: Whether a living process holds it, or may hold it for all that this user can see.
    """

    held: bool

    @classmethod
    def of(cls, name: SegmentName) -> "UnfinishedError":
        """The error for this file."""
        held = _is_held(name)
        by_whom = "a process holds" if held else "nobody holds any more"
        error = cls(f"{name.system_name}: an unfinished file that {by_whom}")
        error.held = held
        return error


def remove(name: SegmentName) -> bool:
    """Removes it unless somebody living holds it; whether that was done here."""
    fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Of the whole file: against its maker, and against another who removes it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.stat(name.path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
        if not same or any(os.pread(fd, _BEGINNING, 0)):
            return False
        os.unlink(name.path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_held(name: SegmentName) -> bool:
    try:
        fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
