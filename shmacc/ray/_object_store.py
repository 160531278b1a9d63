"""How much of /dev/shm Ray's object store on this node will still take.

The store is one file there, as large as the store may become. The raylet makes it when it starts,
and unlinks it at once. Its pages are taken when objects are first written to them, and stay. If
there is no memory for a page by then, a bus error ends the process that writes: the one that puts
an object, or the raylet, and with it the node, if the object comes from another node. So a group's
segment leaves room for all pages that the file does not have yet (`_core.Handle.keep_free`). When a
page is taken between two looks, the free memory shrinks before the kept memory does: the segment
leaves too much for a moment, and never too little. With ``RAY_preallocate_plasma_memory=1`` the
file has all its pages. Even then a little is kept free, so that a worker that is ahead of the
rounds waits for room: a full /dev/shm would be an error.
"""

import contextlib
import os
from pathlib import Path

_STORE = "/dev/shm/plasma"  # noqa: S108  the prefix of the files' names
_BLOCK = 512  # bytes in a block of stat
_LEAST = 4 << 20  # bytes that are kept in any case


class ObjectStore:
    """The object store of the raylet that has started this process."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        with contextlib.suppress(OSError):  # another user's raylet: its files are unknown
            for link in Path(f"/proc/{os.getppid()}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(_STORE):
                        self._files.append(link)

    def room(self) -> int:
        """Return how many bytes of /dev/shm a segment must leave free."""
        missing = _LEAST
        for link in self._files:
            with contextlib.suppress(OSError):
                found = link.stat()
                missing += max(0, found.st_size - found.st_blocks * _BLOCK)
        return missing
