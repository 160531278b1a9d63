"""Files under a segment's name that have nothing in them yet.

This version makes none: its segments are complete before they have a name. What is found was left
by something else, or is being made by it. The kernel's record locks tell which: a living maker
holds some byte of its file.
"""

import fcntl
import os
import struct

from shmacc import layout
from shmacc.errors import DataLossError
from shmacc.names import SegmentName

_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


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
    """Removes it unless somebody living holds it; whether that was done here.

    To be called by one thread at a time that opens nothing else meanwhile (segment.py): closing
    the file drops this process's record locks on it.
    """
    try:
        fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if _locked_by_another(fd):
            return False
        # Against another who removes it; only the byte that names are removed under, so that a
        # segment that has taken its place by now is not kept from its presences.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, layout.NAME_BYTE)
        same = os.stat(name.path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
        if not same or any(os.pread(fd, layout.PAGE_BYTES, 0)):
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
        return _locked_by_another(fd)
    finally:
        os.close(fd)


def _locked_by_another(fd: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
