"""A test has a small /dev/shm, as in a Docker container, and chooses how much of it is free."""

import os
from typing import Final

from helpers.own_shm import MIB

from shmacc import errors

SIZE: Final = 16 * MIB
PAGE: Final = 4096
FILLER: Final = "/dev/shm/filler"  # noqa: S108  the place to fill


def free_bytes() -> int:
    space = os.statvfs("/dev/shm")  # noqa: S108
    return space.f_bavail * space.f_frsize


def leave(count: int) -> None:
    """Fill /dev/shm until only this many bytes are free."""
    fd = os.open(FILLER, os.O_RDWR | os.O_CREAT)
    size = os.fstat(fd).st_size
    wanted = size + free_bytes() - count
    if wanted < size:
        os.ftruncate(fd, max(wanted, 0))
    elif wanted > size:
        os.posix_fallocate(fd, size, wanted - size)
    os.close(fd)
    assert free_bytes() == count


def make_room() -> None:
    os.unlink(FILLER)  # noqa: PTH108


def says_it_all(error: errors.ResourceExhaustedError) -> None:
    """Check that the message says what is needed, what is free, and how to get more memory."""
    message = str(error)
    assert isinstance(error, MemoryError)
    assert "--shm-size" in message
    assert "needed" in message
    assert "free" in message
