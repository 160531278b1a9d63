"""The layout of a segment's file, written down a second time, after layout.hpp.

It is not taken from the extension on purpose: a test that damages a segment and corrects its
checksums must not rely on the code that is to notice. `test_damaged_layout.py` compares this with
live segments.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, Final

VERSION: Final = 2
MAX_RANK: Final = 64
MAX_LANES: Final = 32
REGION_SPAN: Final = 1 << 40
FIXED_REGIONS: Final = (
    *("header", "directory", "participants", "waiters"),
    *("states", "departed", "reasons"),
)
LANE_REGIONS: Final = ("undo log", "undo rows", "shapes")
MEMBER_REGIONS: Final = ("index 0", "index 1", "slots", "rows 0", "rows 1")
REGIONS: Final = FIXED_REGIONS + LANE_REGIONS + MEMBER_REGIONS
HEADER_BYTES: Final = 8192
NAME_BYTE: Final = 1 << 60
MAX_ROWS: Final = 0xFFFFFFF0
DECLARED_SHAPE: Final = 2

_U64: Final = (1 << 64) - 1


def lane_byte(lane: int = 0) -> int:
    """Return which byte of the file a process locks to hold a lane's lock."""
    return NAME_BYTE + 1 + lane


PRESENCE_BYTE: Final = lane_byte(MAX_LANES)


class Config(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_char * 8),
        ("version", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("members", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("is_private", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("name_length", ctypes.c_uint32),
        ("capacity", ctypes.c_int64),
        ("token", ctypes.c_uint64),
        ("hash_key", ctypes.c_uint64 * 4),
        ("created_ns", ctypes.c_int64),
        ("directory_bytes", ctypes.c_uint64),
        ("directory_checksum", ctypes.c_uint64),
        ("name", ctypes.c_char * 200),
        ("checksum", ctypes.c_uint64),
    )


class RoundState(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("sealed", ctypes.c_uint64),
        ("discarded", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("takes", ctypes.c_uint64),
        ("opened", ctypes.c_uint64),
        ("spread", ctypes.c_uint64),
        ("needs", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("restores", ctypes.c_uint64),
        ("holder_serial", ctypes.c_uint64),
        ("holder_participant", ctypes.c_uint64),
        ("holder_token", ctypes.c_uint64),
        ("holder_since_ns", ctypes.c_int64),
        ("final_phase", ctypes.c_uint64),
        ("final_serial", ctypes.c_uint64),
        ("final_pid", ctypes.c_uint64),
        ("final_since_ns", ctypes.c_int64),
        ("final_parameters", ctypes.c_uint64),
        ("checksum", ctypes.c_uint64),
    )


class LaneState(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("weight", ctypes.c_int64),
        ("applied", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("applied_bytes", ctypes.c_uint64),
        ("recoveries", ctypes.c_uint64),
        ("leftovers", ctypes.c_uint64),
        ("small_rounds", ctypes.c_uint64),
        ("needed", ctypes.c_uint64 * len(LANE_REGIONS)),
        ("reserved", ctypes.c_uint64 * len(LANE_REGIONS)),
        ("checksum", ctypes.c_uint64),
    )


class MemberState(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("weight", ctypes.c_int64),
        ("rows", ctypes.c_uint64),
        ("row_elements", ctypes.c_uint64),
        ("shape", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("index_buckets", ctypes.c_uint64),
        ("index_stamp", ctypes.c_uint64),
        ("index_filled", ctypes.c_uint64),
        ("leftovers_before", ctypes.c_uint64),
        ("small_rounds", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * len(MEMBER_REGIONS)),
        ("checksum", ctypes.c_uint64),
    )


class Shape(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_uint64), ("dims", ctypes.c_int64 * MAX_RANK))


class Journal(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),
        ("records", ctypes.c_uint64),
        ("new_rows", ctypes.c_uint64),
    )


class QueueHead(ctypes.Structure):
    _fields_ = (
        ("next_ticket", ctypes.c_uint64),
        ("cancelled_through", ctypes.c_uint64),
        ("cancels", ctypes.c_uint64),
        ("top", ctypes.c_uint32),
        ("progress", ctypes.c_uint32),
    )


class Fairness(ctypes.Structure):
    _fields_ = (("asked", ctypes.c_uint64), ("keep_off_ns", ctypes.c_int64))


class Event(ctypes.Structure):
    _fields_ = (
        ("serial", ctypes.c_uint64),
        ("token", ctypes.c_uint64),
        ("at_ns", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("contributor", ctypes.c_int64),
        ("kind", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("pid_namespace", ctypes.c_uint32),
        ("_to_a_cache_line", ctypes.c_uint32 * 3),
    )


class DirectoryEntry(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("sum", ctypes.c_uint32),
        ("components", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("declared_rank", ctypes.c_uint32),
        ("lowest", ctypes.c_int64),
        ("highest", ctypes.c_uint64),
        ("name_length", ctypes.c_uint32),
        ("optimizer", ctypes.c_uint32),
    )


class Participant(ctypes.Structure):
    _fields_ = (
        ("token", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("start_ticks", ctypes.c_uint64),
        ("attached_ns", ctypes.c_int64),
        ("seen_ns", ctypes.c_int64),
        ("applied_ns", ctypes.c_int64),
        ("applied_step", ctypes.c_int64),
        ("contributor", ctypes.c_int64),
        ("pid", ctypes.c_uint32),
        ("activity", ctypes.c_uint32),
        ("applied", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("told", ctypes.c_uint64),
        ("given_up", ctypes.c_uint64),
        ("failures", ctypes.c_uint32),
        ("took", ctypes.c_uint32),
        ("ending", ctypes.c_uint32),
        ("_to_two_cache_lines", ctypes.c_uint32),
    )


class Waiter(ctypes.Structure):
    _fields_ = (
        ("ticket", ctypes.c_uint64),
        ("participant_token", ctypes.c_uint64),
        ("num_required", ctypes.c_int64),
        ("since_ns", ctypes.c_int64),
        ("participant", ctypes.c_uint32),
        ("wake", ctypes.c_uint32),
        ("overdue", ctypes.c_uint32),
        ("_to_a_cache_line", ctypes.c_uint32 * 5),
    )


class Departed(ctypes.Structure):
    _fields_ = (
        ("token", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("at_ns", ctypes.c_int64),
        ("applied_step", ctypes.c_int64),
        ("applied", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("took", ctypes.c_uint32),
        ("_to_a_cache_line", ctypes.c_uint64 * 2),
    )


class Reason(ctypes.Structure):
    _fields_ = (
        ("of", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("text", ctypes.c_uint8 * 1008),
    )


class Slot(ctypes.Structure):
    _fields_ = (("row", ctypes.c_int64), ("contributions", ctypes.c_int64))


class Bucket(ctypes.Structure):
    _fields_ = (
        ("tags", ctypes.c_uint16 * 10),
        ("stamp", ctypes.c_uint32),
        ("slots", ctypes.c_uint32 * 10),
    )


class UndoRecord(ctypes.Structure):
    _fields_ = (
        ("first_slot", ctypes.c_uint32),
        ("slots", ctypes.c_uint16),
        ("member", ctypes.c_uint16),
    )


class SavedRegion(ctypes.Structure):
    _fields_ = (("entry_bytes", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class SavedArray(ctypes.Structure):
    _fields_ = (
        ("member", ctypes.c_uint64),
        ("entries", ctypes.c_uint64),
        ("listed", ctypes.c_uint64),
        ("regions", SavedRegion * 3),
    )


class Word(ctypes.Structure):
    _fields_ = (("word", ctypes.c_uint64),)


class ShortWord(ctypes.Structure):
    _fields_ = (("word", ctypes.c_uint32),)


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
HEADER_USED: Final = EVENTS + 64 * ctypes.sizeof(Event)

# In a lane's part of the states.
_LANES: Final = 64
_JOURNAL: Final = _cache_line(_LANES + 2 * ctypes.sizeof(LaneState))
_FAIRNESS: Final = _cache_line(_JOURNAL + ctypes.sizeof(Journal))
_MEMBERS: Final = _FAIRNESS + 64
_MEMBER_BYTES: Final = 2 * ctypes.sizeof(MemberState)


@dataclass(frozen=True)
class Table:
    """The places of one lane's part of one member, in a segment with these members and lanes.

    The member after the last one is the set of contributors.
    """

    lane: int = 0
    member: int = 0
    members: int = 1
    lanes: int = 1

    @property
    def file_size(self) -> int:
        """The size of the whole segment."""
        return REGION_SPAN * (len(FIXED_REGIONS) + self.lanes * self._regions_of_lane)

    @property
    def states(self) -> int:
        """Where the lane's part of the states begins."""
        return region("states") + self.lane * self.bytes_of_lane

    @property
    def bytes_of_lane(self) -> int:
        """How many bytes of the states a lane has."""
        return _MEMBERS + (self.members + 1) * _MEMBER_BYTES

    @property
    def _regions_of_lane(self) -> int:
        return len(LANE_REGIONS) + (self.members + 1) * len(MEMBER_REGIONS)

    def region(self, name: str) -> int:
        """Return a region's offset: the segment's, the lane's, or the member's in the lane."""
        if name in FIXED_REGIONS:
            return FIXED_REGIONS.index(name) * REGION_SPAN
        number = len(FIXED_REGIONS) + self.lane * self._regions_of_lane
        if name in LANE_REGIONS:
            return (number + LANE_REGIONS.index(name)) * REGION_SPAN
        number += len(LANE_REGIONS) + self.member * len(MEMBER_REGIONS)
        return (number + MEMBER_REGIONS.index(name)) * REGION_SPAN

    def first(self, kind: str) -> int:
        """Return the offset of the first record of a kind."""
        return {
            "config": 0,
            "unlinked": UNLINKED,
            "generation": GENERATION,
            "finished": FINISHED,
            "kept_free": KEPT_FREE,
            "round": ROUNDS,
            "queue": QUEUE,
            "participants_top": PARTICIPANTS_TOP,
            "departed_top": PARTICIPANTS_TOP + 4,
            "next_event": NEXT_EVENT,
            "event": EVENTS,
            "directory": self.region("directory"),
            "participant": self.region("participants"),
            "waiter": self.region("waiters"),
            "departed": self.region("departed"),
            "reason": self.region("reasons"),
            "lane_generation": self.states,
            "lane": self.states + _LANES,
            "journal": self.states + _JOURNAL,
            "fairness": self.states + _FAIRNESS,
            "member": self.states + _MEMBERS + self.member * _MEMBER_BYTES,
            "undo": self.region("undo log"),
            "shape": self.region("shapes") + self.member * 2 * ctypes.sizeof(Shape),
            "bucket0": self.region("index 0"),
            "bucket1": self.region("index 1"),
            "slot": self.region("slots"),
        }[kind]


# Each kind of record: its structure, and how many are of interest.
RECORDS: Final[dict[str, tuple[type[ctypes.Structure], int]]] = {
    "config": (Config, 1),
    "unlinked": (Word, 1),
    "generation": (Word, 1),
    "finished": (Word, 1),
    "kept_free": (Word, 1),
    "round": (RoundState, 2),
    "queue": (QueueHead, 1),
    "participants_top": (ShortWord, 1),
    "departed_top": (ShortWord, 1),
    "next_event": (Word, 1),
    "event": (Event, 32),
    "directory": (DirectoryEntry, 1),
    "participant": (Participant, 4),
    "waiter": (Waiter, 4),
    "departed": (Departed, 4),
    "reason": (Reason, 4),
    "lane_generation": (Word, 1),
    "lane": (LaneState, 2),
    "journal": (Journal, 1),
    "fairness": (Fairness, 1),
    "member": (MemberState, 2),
    "undo": (UndoRecord, 1),
    "shape": (Shape, 2),
    "bucket0": (Bucket, 8),
    "bucket1": (Bucket, 8),
    "slot": (Slot, 16),
}

# The layout of an accumulator of one tensor, with one lane.
SINGLE: Final = Table()


def region(name: str) -> int:
    """Where a region of an accumulator of one tensor begins."""
    return SINGLE.region(name)


FILE_SIZE: Final = SINGLE.file_size


def mix_words(data: bytes) -> int:
    """Return the checksum of these bytes, whose number is a multiple of 8."""
    hashes = [0x9E3779B97F4A7C15, 1, 2, 3]
    for i, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        hashes[i % 4] = _mixed(hashes[i % 4], word)
    value = hashes[0]
    for other in hashes[1:]:
        value = _mixed(value, other)
    return value


def _mixed(value: int, word: int) -> int:
    value = ((value ^ word) * 0xFF51AFD7ED558CCD) & _U64
    return value ^ value >> 32


def header_of_version_1(name: bytes) -> bytes:
    """Return the header that shmacc 1.0.0 wrote for an empty sparse segment of that name.

    It ends with the configuration; this version reads no further.
    """

    class OldConfig(ctypes.Structure):
        _fields_ = (
            ("magic", ctypes.c_char * 8),
            ("version", ctypes.c_uint32),
            ("kind", ctypes.c_uint32),
            ("dtype", ctypes.c_uint32),
            ("sum", ctypes.c_uint32),
            ("reduction", ctypes.c_uint32),
            ("components", ctypes.c_uint32),
            ("declared_rank", ctypes.c_uint32),
            ("is_private", ctypes.c_uint32),
            ("declared_dims", ctypes.c_int64 * MAX_RANK),
            ("token", ctypes.c_uint64),
            ("created_ns", ctypes.c_int64),
            ("mode", ctypes.c_uint32),
            ("name_length", ctypes.c_uint32),
            ("name", ctypes.c_char * 200),
            ("checksum", ctypes.c_uint64),
        )

    config = OldConfig(
        magic=b"shmacc\r\n",
        version=1,
        kind=1,
        dtype=1,
        sum=1,
        reduction=1,
        components=1,
        declared_rank=(1 << 32) - 1,
        token=1,
        mode=0o600,
        name_length=len(name),
        name=name,
    )
    checksum = 0x9E3779B97F4A7C15
    for (word,) in struct.iter_unpack("<Q", bytes(config)[: OldConfig.checksum.offset]):
        checksum = _mixed(checksum, word)
    config.checksum = checksum
    return bytes(config).ljust(8192, b"\0")


def checksum_of(record: Any) -> int:
    """Return the correct checksum of a record that has one."""
    return mix_words(bytes(record)[: type(record).checksum.offset])
