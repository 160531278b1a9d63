"""Where things stand in a segment's file, written down a second time, from layout.hpp.

On purpose not taken from the extension: a test that damages a segment, and gives it right checksums
again, must not lean on the code that is to notice. `test_damaged_layout.py` holds this against live
segments.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final

VERSION: Final = 2
MAX_RANK: Final = 64
REGION_SPAN: Final = 1 << 40
REGIONS: Final = (
    "header",
    "participants",
    "waiters",
    "index 0",
    "index 1",
    "slots",
    "rows 0",
    "rows 1",
    "undo log",
    "undo rows",
)
FILE_SIZE: Final = REGION_SPAN * len(REGIONS)
HEADER_BYTES: Final = 8192
LOCK_BYTE: Final = 1 << 60
NAME_BYTE: Final = LOCK_BYTE - 1
PRESENCE_BYTE: Final = LOCK_BYTE + 1
MAX_ROWS: Final = 0xFFFFFFF0

_U64: Final = (1 << 64) - 1


class Config(ctypes.Structure):
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
        ("hash_key", ctypes.c_uint64 * 4),
        ("created_ns", ctypes.c_int64),
        ("mode", ctypes.c_uint32),
        ("name_length", ctypes.c_uint32),
        ("name", ctypes.c_char * 200),
        ("checksum", ctypes.c_uint64),
    )


class State(ctypes.Structure):
    _fields_ = (
        ("generation", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("sealed", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("row_elements", ctypes.c_uint64),
        ("shape", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("index_buckets", ctypes.c_uint64),
        ("index_stamp", ctypes.c_uint64),
        ("index_filled", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * len(REGIONS)),
        ("applied", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("discarded", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("takes", ctypes.c_uint64),
        ("recoveries", ctypes.c_uint64),
        ("applied_bytes", ctypes.c_uint64),
        ("rounds", ctypes.c_uint64),
        ("round_serial", ctypes.c_uint64),
        ("round_participant", ctypes.c_uint64),
        ("round_token", ctypes.c_uint64),
        ("round_since_ns", ctypes.c_int64),
        ("small_rounds", ctypes.c_uint64),
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


class LineHead(ctypes.Structure):
    _fields_ = (
        ("next_ticket", ctypes.c_uint64),
        ("cancelled_through", ctypes.c_uint64),
        ("cancels", ctypes.c_uint64),
        ("top", ctypes.c_uint32),
        ("turn", ctypes.c_uint32),
    )


class Courtesy(ctypes.Structure):
    _fields_ = (("asked", ctypes.c_uint64), ("keep_off_ns", ctypes.c_int64))


class Participant(ctypes.Structure):
    _fields_ = (
        ("token", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("start_ticks", ctypes.c_uint64),
        ("attached_ns", ctypes.c_int64),
        ("seen_ns", ctypes.c_int64),
        ("applied_ns", ctypes.c_int64),
        ("applied_step", ctypes.c_int64),
        ("pid", ctypes.c_uint32),
        ("activity", ctypes.c_uint32),
        ("applied", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("_to_two_cache_lines", ctypes.c_uint64 * 5),
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


class Slot(ctypes.Structure):
    _fields_ = (("row", ctypes.c_int64), ("contributions", ctypes.c_int64))


class Bucket(ctypes.Structure):
    _fields_ = (
        ("tags", ctypes.c_uint16 * 10),
        ("stamp", ctypes.c_uint32),
        ("slots", ctypes.c_uint32 * 10),
    )


class UndoRecord(ctypes.Structure):
    _fields_ = (("first_slot", ctypes.c_uint32), ("slots", ctypes.c_uint32))


class Word(ctypes.Structure):
    _fields_ = (("word", ctypes.c_uint64),)


class ShortWord(ctypes.Structure):
    _fields_ = (("word", ctypes.c_uint32),)


def _cache_line(offset: int) -> int:
    return (offset + 63) // 64 * 64


UNLINKED: Final = _cache_line(ctypes.sizeof(Config))
GENERATION: Final = UNLINKED + 64
STATES: Final = GENERATION + 64
SHAPES: Final = _cache_line(STATES + 2 * ctypes.sizeof(State))
JOURNAL: Final = _cache_line(SHAPES + 2 * ctypes.sizeof(Shape))
LINE: Final = _cache_line(JOURNAL + ctypes.sizeof(Journal))
PARTICIPANTS_TOP: Final = _cache_line(LINE + ctypes.sizeof(LineHead))
COURTESY: Final = PARTICIPANTS_TOP + 64
HEADER_USED: Final = COURTESY + 64


def region(name: str) -> int:
    """Where a region begins."""
    return REGIONS.index(name) * REGION_SPAN


# Each kind of record: its structure, where the first one stands, and how many are of interest.
RECORDS: Final[dict[str, tuple[type[ctypes.Structure], int, int]]] = {
    "config": (Config, 0, 1),
    "unlinked": (Word, UNLINKED, 1),
    "generation": (Word, GENERATION, 1),
    "state": (State, STATES, 2),
    "shape": (Shape, SHAPES, 2),
    "journal": (Journal, JOURNAL, 1),
    "line": (LineHead, LINE, 1),
    "participants_top": (ShortWord, PARTICIPANTS_TOP, 1),
    "courtesy": (Courtesy, COURTESY, 1),
    "participant": (Participant, region("participants"), 4),
    "waiter": (Waiter, region("waiters"), 4),
    "bucket0": (Bucket, region("index 0"), 8),
    "bucket1": (Bucket, region("index 1"), 8),
    "slot": (Slot, region("slots"), 16),
    "undo": (UndoRecord, region("undo log"), 1),
}


def mix_words(data: bytes) -> int:
    """The checksum of so many bytes, a multiple of 8."""
    value = 0x9E3779B97F4A7C15
    for (word,) in struct.iter_unpack("<Q", data):
        value = ((value ^ word) * 0xFF51AFD7ED558CCD) & _U64
        value ^= value >> 32
    return value


def header_of_version_1(name: bytes) -> bytes:
    """What an empty sparse segment of that name began with when it was made by shmacc 1.0.0."""

    class OldConfig(ctypes.Structure):
        _fields_ = tuple(field for field in Config._fields_ if field[0] != "hash_key")

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
    config.checksum = checksum_of(config)
    header = bytearray(HEADER_BYTES)
    header[: ctypes.sizeof(config)] = bytes(config)
    state = State()
    state.checksum = checksum_of(state)
    header[STATES : STATES + ctypes.sizeof(state)] = bytes(state)
    return bytes(header)


def checksum_of(record: Any) -> int:
    """The checksum that belongs into a Config or a State."""
    return mix_words(bytes(record)[: type(record).checksum.offset])
