"""An image is a copy of a segment's file, as a process that is killed at some instant leaves it.

A killed process leaves a segment with exactly the bytes that the file has at that instant, and with
no record lock. So a copy of the file, taken between two instructions of the process, is what its
death would leave, and can be judged without a kill. (The semaphore is not in the file; the copy
gets a new semaphore. Its value is only a hint, and other tests have real kills and real values.)
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from helpers import segment_layout as layout
from helpers.segment_file import SegmentFile

_PAGE: Final = mmap.PAGESIZE

_MAP_FIXED: Final = 0x10

_memcmp: Final = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
_mmap: Final = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


@dataclass(frozen=True)
class Image:
    """The bytes of a segment's file.

    Attributes:
        size: The file's length.
        occupied: (offset, length) of each range that has memory, zero or not.
        pieces: (offset, bytes) of each range that is not zero, in whole pages.
    """

    size: int
    occupied: frozenset[tuple[int, int]]
    pieces: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, path: str) -> "Image":
        fd = os.open(path, os.O_RDONLY)
        try:
            pieces = tuple(_pieces(fd))
            return cls(
                os.fstat(fd).st_size,
                frozenset((offset, len(content)) for offset, content in pieces)
                | frozenset(_reserved(path)),
                tuple((offset, used) for offset, content in pieces if (used := _used(content))),
            )
        finally:
            os.close(fd)

    def pages(self) -> dict[int, bytes]:
        """The pages that are not zero, by offset."""
        return {
            offset + start: page
            for offset, content in self.pieces
            for start in range(0, len(content), _PAGE)
            if any(page := content[start : start + _PAGE])
        }

    def write(self, path: str) -> None:
        """Make a file of these bytes; the path must not exist."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, self.size)
            for offset, length in self.occupied:
                os.posix_fallocate(fd, offset, length)
            for offset, content in self.pieces:
                os.pwrite(fd, content, offset)
        finally:
            os.close(fd)


def _pieces(fd: int) -> Iterator[tuple[int, bytes]]:
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, os.pread(fd, end - start, start)


def _reserved(path: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges with reserved memory, which the kernel reports as holes until used."""
    with SegmentFile(path) as file:
        for name in layout.FIXED_REGIONS:
            yield layout.region(name), _PAGE
        for lane in range(file.table.lanes):
            for member in range(file.table.members + 1):
                file.look_at(lane, member)
                of_lane, of_member = file.committed("lane"), file.committed("member")
                named = (
                    *zip(layout.LANE_REGIONS, of_lane.reserved, strict=True),
                    *zip(layout.MEMBER_REGIONS, of_member.reserved, strict=True),
                )
                yield from ((file.table.region(name), length) for name, length in named if length)


def _regions(path: str) -> Iterator[int]:
    with SegmentFile(path) as file:
        return iter(range(0, file.table.file_size, layout.REGION_SPAN))


def _used(content: bytes) -> bytes:
    return content[: -(-len(content.rstrip(b"\0")) // _PAGE) * _PAGE]


class Windows:
    """A view of those pages of a segment's file that are ever used.

    Args:
        path: The file.
        images: Images of the file at other times. The view covers their pieces, one more page
            after each, and the first page of each region. `image` returns a range as occupied if
            any of these images does.
    """

    def __init__(self, path: str, *images: Image) -> None:
        """Map the pages one behind the other, so that one comparison shows any change."""
        lengths = dict.fromkeys(_regions(path), _PAGE)
        for image in images:
            for offset, content in image.pieces:
                lengths[offset] = max(lengths.get(offset, 0), len(content) + _PAGE)
        self._occupied = frozenset().union(*(image.occupied for image in images))
        self._map = mmap.mmap(-1, sum(lengths.values()))
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._places: dict[int, slice] = {}
        with open(path, "rb") as file:  # noqa: PTH123  its descriptor is wanted
            self._size = os.fstat(file.fileno()).st_size
            end = 0
            for offset, length in sorted(lengths.items()):
                place = self._address + end
                of_file = mmap.MAP_SHARED | _MAP_FIXED, file.fileno(), offset
                assert _mmap(place, length, mmap.PROT_READ, *of_file) == place
                self._places[offset] = slice(end, end + length)
                end += length
        self._all = self._map[:]
        self._seen = {offset: self._all[place] for offset, place in self._places.items()}

    def look(self) -> tuple[int, ...]:
        """Return the offsets of the windows that have changed since the last look."""
        if not _memcmp(self._address, self._all, len(self._all)):
            return ()
        # Copy only the windows that have changed: this is called at each instruction.
        before, self._all = self._all, self._map[:]
        changed = [offset for offset, at in self._places.items() if before[at] != self._all[at]]
        self._seen |= {offset: self._all[self._places[offset]] for offset in changed}
        return tuple(changed)

    def image(self) -> Image:
        return Image(self._size, self._occupied, tuple(self._seen.items()))

    def close(self) -> None:
        self._map.close()
