"""Shared memory itself: how much there is, on what filesystem, and what fills it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from shmacc._base import names
from shmacc.inspection._findings import Finding, command, memory, note, wrong

_MAKE_ROOM = (
    "see what is in it, and what of that nobody uses (`shmacc-inspect clean`); or make it larger "
    "(`mount -o remount,size=...`, `--shm-size`)"
)
_SCARCE = 0.1  # a smaller free share of the whole is a note
_NEXT_TO_NOTHING = 0.02
_NAMED = 3  # how many of the largest files are named
_OF_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class Space:
    """Shared memory of this machine (or container), in bytes.

    Attributes:
        total: All bytes.
        free: Free bytes.
        inodes_total: How many files there may be; 0: any number.
        inodes_free: How many more files there may be.
    """

    total: int
    free: int
    inodes_total: int
    inodes_free: int


def shared_memory_space() -> Space:
    """Return how much shared memory there is, and how much of it is free."""
    status = os.statvfs(names.SHM_DIRECTORY)
    return Space(
        total=status.f_blocks * status.f_frsize,
        free=status.f_bavail * status.f_frsize,
        inodes_total=status.f_files,
        inodes_free=status.f_favail,
    )


def others_memory() -> int:
    """Return the bytes of memory that files of other programs occupy in shared memory."""
    return sum(size for size, path in _files() if not _is_ours(path))


def findings() -> Iterator[Finding]:
    """Yield what `check` finds about shared memory itself."""
    yield from _filesystem()
    space = shared_memory_space()
    of_bytes = f"{memory(space.free)} of {memory(space.total)} are free"
    of_files = f"{space.inodes_free} of {space.inodes_total} files are free"
    for kind, free, total, problem in (
        ("bytes", space.free, space.total, of_bytes),
        ("files", space.inodes_free, space.inodes_total, of_files),
    ):
        if not total or free > _SCARCE * total:
            continue
        largest = _largest()
        if free > _NEXT_TO_NOTHING * total:
            yield note(
                names.SHM_DIRECTORY,
                f"{kind}_scarce",
                f"{problem}{largest}",
                f"{_MAKE_ROOM}, before it is full",
            )
        else:
            yield wrong(
                names.SHM_DIRECTORY,
                f"{kind}_exhausted",
                f"{problem}: gradients with new rows are refused{largest}",
                _MAKE_ROOM,
                command("shmacc-inspect", "list", "-A", "--sort", "bytes"),
            )


def _filesystem() -> Iterator[Finding]:
    kind = _filesystem_at(os.path.realpath(names.SHM_DIRECTORY))
    if kind and kind not in _OF_MEMORY:
        yield wrong(
            names.SHM_DIRECTORY,
            "not_in_memory",
            f"it is on a filesystem of type {kind}, not in memory: what processes share is written "
            "to a disk, and stays there after a reboot",
            "mount a tmpfs there (Kubernetes: an emptyDir with `medium: Memory`)",
        )


def _filesystem_at(path: str) -> str:
    """Return the type of the filesystem that the directory is on; empty: unknown."""
    found = ""
    # The names of other mounts may be in any encoding.
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts,
    ):
        longest = 0
        for line in mounts:
            _, at, kind, *_ = line.split(" ")
            inside = path == at or path.startswith(at.rstrip("/") + "/")
            if inside and len(at) >= longest:  # a later mount hides earlier ones
                found, longest = kind, len(at)
    return found


def _largest() -> str:
    """Name the largest files in words, whether this library's or not."""
    largest = sorted(_files(), reverse=True)[:_NAMED]
    said = ", ".join(
        f"{path.removeprefix(names.SHM_DIRECTORY + '/')} {memory(size)}" for size, path in largest
    )
    return f"; most is taken by {said}" if said else ""


def _files() -> Iterator[tuple[int, str]]:
    for directory, _, files in os.walk(names.SHM_DIRECTORY):
        for file in files:
            path = os.path.join(directory, file)
            with contextlib.suppress(OSError):  # it is gone
                yield os.stat(path, follow_symlinks=False).st_blocks * 512, path


def _is_ours(path: str) -> bool:
    file_name = os.path.basename(path)
    return os.path.dirname(path) == names.SHM_DIRECTORY and (
        names.parse_segment_file(file_name) is not None
        or names.parse_semaphore_file(file_name) is not None
    )
