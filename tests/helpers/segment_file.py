"""A segment's file in the hands of somebody who writes whatever they like into it."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Self, TypeVar

from helpers import segment_layout as layout

if TYPE_CHECKING:
    from pathlib import Path

_Record = TypeVar("_Record", bound=ctypes.Structure)


class SegmentFile:
    """The file, open.

    For use in another process than those that have the segment attached: closing it drops the
    record locks that its process has on the file.
    """

    def __init__(self, path: str | Path) -> None:
        """Open it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._fd)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes; fewer at the file's end."""
        return os.pread(self._fd, count, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite bytes."""
        os.pwrite(self._fd, data, offset)

    def resize(self, size: int) -> None:
        """Truncate or extend it."""
        os.ftruncate(self._fd, size)

    def record(self, kind: str, number: int = 0) -> Any:
        """A copy of a record."""
        structure, first, _ = layout.RECORDS[kind]
        return self.record_at(structure, first + number * ctypes.sizeof(structure))

    def record_at(self, structure: type[_Record], offset: int) -> _Record:
        """A copy of the record that stands somewhere; zeros past the file's end."""
        size = ctypes.sizeof(structure)
        return structure.from_buffer_copy(self.read(offset, size).ljust(size, b"\0"))

    def put(self, kind: str, record: Any, number: int = 0, *, checksum: bool = True) -> None:
        """Write a record back, with a right checksum if it has one."""
        structure, first, _ = layout.RECORDS[kind]
        if checksum and hasattr(record, "checksum"):
            record.checksum = layout.checksum_of(record)
        self.write(first + number * ctypes.sizeof(structure), bytes(record))

    @property
    def current(self) -> int:
        """Which of the two states is the committed one."""
        return int(self.record("generation").word) & 1
