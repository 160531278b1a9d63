"""Describes the records of a segment's file for tests, independently of native/base.

A test that damages a segment and corrects its checksums must not rely on the code under test. So
only the numbers of regions and other bounds come from the extension. `test_damaged_layout.py`
compares these records with live segments.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shmacc._base import layout

VERSION: Final = layout.LAYOUT_VERSION
MAX_RANK: Final = layout.MAX_RANK
MAX_LANES: Final = layout.MAX_LANES
REGION_SPAN: Final = layout.REGION_SPAN
REGIONS: Final = tuple(sorted(layout.REGIONS, key=layout.REGIONS.__getitem__))
FIXED_REGIONS, LANE_REGIONS, MEMBER_REGIONS = REGIONS[:7], REGIONS[7:10], REGIONS[10:]
MAX_ROWS: Final = layout.MAX_ROWS
NAME_BYTE: Final = 1 << 60

_CHAR, _U8, _U16, _U32 = ctypes.c_char, ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32
_U64, _I64 = ctypes.c_uint64, ctypes.c_int64


def _fields(*rows: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Return a structure's fields; each row is a type and the names of the fields of that type."""
    return tuple((name, of_type) for of_type, names in rows for name in names.split())


def lane_byte(lane: int = 0) -> int:
    """Return which byte of the file a process locks to hold a lane's lock."""
    return NAME_BYTE + 1 + lane


PRESENCE_BYTE: Final = lane_byte(MAX_LANES)


class Config(ctypes.Structure):
    _fields_ = _fields(
        (_CHAR * 8, "magic"),
        (_U32, "version kind members lanes reduction is_private mode name_length"),
        (_I64, "capacity"),
        (_U64, "token"),
        (_U64 * 4, "hash_key"),
        (_I64, "created_ns"),
        (_U64, "directory_bytes directory_checksum"),
        (_CHAR * 200, "name"),
        (_U64, "checksum"),
    )


class RoundState(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "generation round"),
        (_I64, "step"),
        (_U64, "sealed discarded taken takes opened spread needs dropped restores"),
        (_U64, "holder_serial holder_participant holder_token"),
        (_I64, "holder_since_ns"),
        (_U64, "final_phase final_serial final_pid"),
        (_I64, "final_since_ns"),
        (_U64, "final_parameters checksum"),
    )


class LaneState(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "generation round"),
        (_I64, "count weight"),
        (_U64, "applied dropped repeated applied_bytes recoveries leftovers small_rounds"),
        (_U64 * len(LANE_REGIONS), "needed reserved"),
        (_U64, "checksum"),
    )


class MemberState(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "generation round"),
        (_I64, "count weight"),
        (_U64, "rows row_elements shape buffer index index_buckets index_stamp"),
        (_U64, "index_filled leftovers_before small_rounds"),
        (_U64 * len(MEMBER_REGIONS), "reserved"),
        (_U64, "checksum"),
    )


class Shape(ctypes.Structure):
    _fields_ = _fields((_U64, "rank"), (_I64 * MAX_RANK, "dims"))


class Journal(ctypes.Structure):
    _fields_ = _fields((_U64, "generation records new_rows"))


class QueueHead(ctypes.Structure):
    _fields_ = _fields((_U64, "next_ticket cancelled_through cancels"), (_U32, "top progress"))


class Fairness(ctypes.Structure):
    _fields_ = _fields((_U64, "asked"), (_I64, "keep_off_ns"))


class Unchecked(ctypes.Structure):
    _fields_ = _fields((_U64, "gradients steps most_steps"))


class Late(ctypes.Structure):
    _fields_ = _fields((_I64, "who"), (_U64, "rounds late_ns"))


class Pace(ctypes.Structure):
    _fields_ = _fields(
        (_I64, "until_ns"), (_U64, "waiting_ns block_ns between_ns"), (Late * 16, "late")
    )


class Event(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "serial token"),
        (_I64, "at_ns step contributor"),
        (_U32, "kind pid pid_namespace roles"),
        (_U32 * 2, "_to_a_cache_line"),
    )


class DirectoryEntry(ctypes.Structure):
    _fields_ = _fields(
        (_U32, "kind dtype sum components reduction declared_rank"),
        (_I64, "lowest"),
        (_U64, "highest"),
        (_U32, "name_length optimizer"),
    )


class Participant(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "token"),
        (_U32, "pid_namespace roles"),
        (_U64, "start_ticks"),
        (_I64, "attached_ns seen_ns applied_ns applied_step contributor"),
        (_U32, "pid activity"),
        (_U64, "applied dropped taken told given_up"),
        (_I64, "took_ns"),
        (_U32, "failures ending"),
    )


class Waiter(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "ticket participant_token"),
        (_I64, "num_required since_ns"),
        (_U32, "participant wake overdue"),
        (_U32 * 5, "_to_a_cache_line"),
    )


class Departed(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "token"),
        (_I64, "at_ns applied_step"),
        (_U64, "applied"),
        (_I64, "attached_ns took_ns"),
        (_U32, "pid pid_namespace roles _to_eight_bytes"),
    )


class Reason(ctypes.Structure):
    _fields_ = _fields((_U64, "of length"), (_U8 * 1008, "text"))


class Slot(ctypes.Structure):
    _fields_ = _fields((_I64, "row contributions"))


class Bucket(ctypes.Structure):
    _fields_ = _fields((_U16 * 10, "tags"), (_U32, "stamp"), (_U32 * 10, "slots"))


class UndoRecord(ctypes.Structure):
    _fields_ = _fields((_U32, "first_slot"), (_U16, "slots member"))


class SavedRegion(ctypes.Structure):
    _fields_ = _fields((_U64, "entry_bytes bytes"))


class SavedArray(ctypes.Structure):
    _fields_ = _fields((_U64, "member entries listed"), (SavedRegion * 3, "regions"))


class Word(ctypes.Structure):
    _fields_ = _fields((_U64, "word"))


class ShortWord(ctypes.Structure):
    _fields_ = _fields((_U32, "word"))


def _cache_line(offset: int) -> int:
    return (offset + 63) // 64 * 64


UNLINKED: Final = _cache_line(ctypes.sizeof(Config))
GENERATION: Final = UNLINKED + 64
FINISHED: Final = GENERATION + 8
KEPT_FREE: Final = FINISHED + 8
ROUNDS: Final = GENERATION + 64
QUEUE: Final = _cache_line(ROUNDS + 2 * ctypes.sizeof(RoundState))
PARTICIPANTS_TOP: Final = _cache_line(QUEUE + ctypes.sizeof(QueueHead))
NEXT_EVENT: Final = PARTICIPANTS_TOP + 64
EVENTS: Final = NEXT_EVENT + 64
PACE: Final = EVENTS + 64 * ctypes.sizeof(Event)
HEADER_USED: Final = PACE + ctypes.sizeof(Pace)

# Offsets in a lane's part of the region "states".
_LANES: Final = 64
_JOURNAL: Final = _cache_line(_LANES + 2 * ctypes.sizeof(LaneState))
_FAIRNESS: Final = _cache_line(_JOURNAL + ctypes.sizeof(Journal))
_MEMBERS: Final = _FAIRNESS + 64
_MEMBER_BYTES: Final = 2 * ctypes.sizeof(MemberState)


@dataclass(frozen=True)
class Table:
    """The offsets of one member in one lane, in a segment with `members` members and `lanes` lanes.

    The member after the last one is the set of contributors.
    """

    lane: int = 0
    member: int = 0
    members: int = 1
    lanes: int = 1

    @property
    def file_size(self) -> int:
        return REGION_SPAN * (len(FIXED_REGIONS) + self.lanes * self._regions_of_lane)

    @property
    def states(self) -> int:
        """The offset of the lane's part of the region "states"."""
        return region("states") + self.lane * self.bytes_of_lane

    @property
    def bytes_of_lane(self) -> int:
        """The size of one lane's part of the region "states"."""
        return _MEMBERS + (self.members + 1) * _MEMBER_BYTES

    @property
    def _regions_of_lane(self) -> int:
        return len(LANE_REGIONS) + (self.members + 1) * len(MEMBER_REGIONS)

    def region(self, name: str) -> int:
        """Return the offset of a region of the segment, of the lane, or of the lane's member."""
        if name in FIXED_REGIONS:
            return FIXED_REGIONS.index(name) * REGION_SPAN
        number = len(FIXED_REGIONS) + self.lane * self._regions_of_lane
        if name in LANE_REGIONS:
            return (number + LANE_REGIONS.index(name)) * REGION_SPAN
        number += len(LANE_REGIONS) + self.member * len(MEMBER_REGIONS)
        return (number + MEMBER_REGIONS.index(name)) * REGION_SPAN

    def first(self, kind: str) -> int:
        """Return the offset of the first record of a kind."""
        return RECORDS[kind][2](self)


# For each kind of record: its structure, how many records tests use, and the first one's offset.
RECORDS: Final[dict[str, tuple[type[ctypes.Structure], int, Callable[[Table], int]]]] = {
    "config": (Config, 1, lambda _: 0), "unlinked": (Word, 1, lambda _: UNLINKED),
    "keeper": (Word, 1, lambda _: UNLINKED + 8), "generation": (Word, 1, lambda _: GENERATION),
    "finished": (Word, 1, lambda _: FINISHED), "kept_free": (Word, 1, lambda _: KEPT_FREE),
    "round": (RoundState, 2, lambda _: ROUNDS), "queue": (QueueHead, 1, lambda _: QUEUE),
    "participants_top": (ShortWord, 1, lambda _: PARTICIPANTS_TOP),
    "departed_top": (ShortWord, 1, lambda _: PARTICIPANTS_TOP + 4),
    "next_event": (Word, 1, lambda _: NEXT_EVENT), "event": (Event, 32, lambda _: EVENTS),
    "pace": (Pace, 1, lambda _: PACE),
    "directory": (DirectoryEntry, 1, lambda table: table.region("directory")),
    "participant": (Participant, 4, lambda table: table.region("participants")),
    "waiter": (Waiter, 4, lambda table: table.region("waiters")),
    "departed": (Departed, 4, lambda table: table.region("departed")),
    "reason": (Reason, 4, lambda table: table.region("reasons")),
    "lane_generation": (Word, 1, lambda table: table.states),
    "lane": (LaneState, 2, lambda table: table.states + _LANES),
    "journal": (Journal, 1, lambda table: table.states + _JOURNAL),
    "fairness": (Fairness, 1, lambda table: table.states + _FAIRNESS),
    "unchecked": (Unchecked, 1, lambda table: table.states + _FAIRNESS + ctypes.sizeof(Fairness)),
    "member": (MemberState, 2,
        lambda table: table.states + _MEMBERS + table.member * _MEMBER_BYTES),
    "undo": (UndoRecord, 1, lambda table: table.region("undo log")),
    "shape": (Shape, 2,
        lambda table: table.region("shapes") + table.member * 2 * ctypes.sizeof(Shape)),
    "bucket0": (Bucket, 8, lambda table: table.region("index 0")),
    "bucket1": (Bucket, 8, lambda table: table.region("index 1")),
    "slot": (Slot, 16, lambda table: table.region("slots")),
}  # fmt: skip

# The layout of an accumulator of one tensor, with one lane.
SINGLE: Final = Table()


def region(name: str) -> int:
    """Return the offset of a region of an accumulator of one tensor."""
    return SINGLE.region(name)


FILE_SIZE: Final = SINGLE.file_size


def mix_words(data: bytes) -> int:
    """Return the checksum of these bytes; their number must be a multiple of 8."""
    hashes = [0x9E3779B97F4A7C15, 1, 2, 3]
    for i, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        hashes[i % 4] = _mixed(hashes[i % 4], word)
    value = hashes[0]
    for other in hashes[1:]:
        value = _mixed(value, other)
    return value


def _mixed(value: int, word: int) -> int:
    value = ((value ^ word) * 0xFF51AFD7ED558CCD) % 2**64
    return value ^ value >> 32


def header_of_version(version: int) -> bytes:
    """Return a header from which only its layout version can be read."""
    return struct.pack("<8sI", b"shmacc\r\n", version).ljust(8192, b"\0")


def checksum_of(record: Any) -> int:
    """Return the correct checksum of a record that has one."""
    return mix_words(bytes(record)[: type(record).checksum.offset])
