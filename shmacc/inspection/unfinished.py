"""Files without a byte in them under a segment's name.

This version makes none: its segments are complete before they have a name. What is found was left
by something else, or is being made by it. The kernel's record locks tell which: a living maker
holds some byte of its file.
"""

import contextlib
import fcntl
import os
import stat
import struct

from shmacc.names import SegmentName

_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def is_unfinished(name: SegmentName) -> bool:
    """Whether such a file stands under the name."""
    with contextlib.suppress(OSError):
        status = os.stat(name.path, follow_symlinks=False)
        return stat.S_ISREG(status.st_mode) and status.st_size == 0
    return False


def is_held(name: SegmentName) -> bool:
    """Whether a living process holds it, or may hold it for all that this user can see."""
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


def explain(name: SegmentName) -> str:
    """What it is, in words."""
    if is_held(name):
        return "an unfinished file that a process holds"
    return "an unfinished file that nobody holds any more"


def remove(name: SegmentName) -> bool:
    """Removes it unless somebody living holds it; whether that was done here."""
    fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Of the whole file: against its maker, and against another who removes it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.stat(name.path, follow_symlinks=False)
        ours = os.fstat(fd)
        if (found.st_ino, ours.st_size) != (ours.st_ino, 0):
            return False
        os.unlink(name.path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
