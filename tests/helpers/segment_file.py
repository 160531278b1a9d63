"""Reads and overwrites any part of a segment's file."""

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from helpers import segment_layout as layout

_Record = TypeVar("_Record", bound=ctypes.Structure)

_MOST_MEMBERS: Final = 64


class SegmentFile:
    """A segment's file, open for reading and writing.

    Use it in a process that does not have the segment attached: closing the file drops the
    process's record locks on the file. Records of lanes and members are read from the lane and the
    member that `look_at` has chosen; before that, from the first lane and member.
    """

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        config = self.record_at(layout.Config, 0)
        damaged = not (
            1 <= config.members <= _MOST_MEMBERS and 1 <= config.lanes <= layout.MAX_LANES
        )
        members, lanes = (1, 1) if damaged else (config.members, config.lanes)
        self.table = layout.Table(members=members, lanes=lanes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def look_at(self, lane: int, member: int) -> None:
        """Use the records of another lane and member; both numbers wrap around."""
        self.table = replace(
            self.table, lane=lane % self.table.lanes, member=member % (self.table.members + 1)
        )

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes, or fewer at the file's end."""
        return os.pread(self._fd, count, offset)

    def write(self, offset: int, data: bytes) -> None:
        os.pwrite(self._fd, data, offset)

    def resize(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def record(self, kind: str, number: int = 0) -> Any:
        structure = layout.RECORDS[kind][0]
        return self.record_at(structure, self.table.first(kind) + number * ctypes.sizeof(structure))

    def record_at(self, structure: type[_Record], offset: int) -> _Record:
        """Return a copy of the record at an offset, with zeros past the file's end."""
        size = ctypes.sizeof(structure)
        return structure.from_buffer_copy(self.read(offset, size).ljust(size, b"\0"))

    def put(self, kind: str, record: Any, number: int = 0, *, checksum: bool = True) -> None:
        """Write a record back; correct its checksum if it has one."""
        structure = layout.RECORDS[kind][0]
        if checksum and hasattr(record, "checksum"):
            record.checksum = layout.checksum_of(record)
        self.write(self.table.first(kind) + number * ctypes.sizeof(structure), bytes(record))

    def current(self, kind: str) -> int:
        """Return which of the two copies of a record is the committed one."""
        if kind == "round":
            return int(self.record("generation").word) & 1
        generation = int(self.record("lane_generation").word)
        if kind == "lane":
            return generation & 1
        stamps = [self.record("member", number).generation for number in range(2)]
        valid = [stamp if stamp <= generation else -1 for stamp in stamps]
        return valid.index(max(valid))

    def committed(self, kind: str) -> Any:
        """Return the committed copy of a record that has two copies."""
        return self.record(kind, self.current(kind))
