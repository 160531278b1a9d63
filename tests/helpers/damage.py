"""Data classes describe damage to a segment, so that hypothesis prints and shrinks it."""

import ctypes
from dataclasses import dataclass
from typing import Any, Final, Protocol

from helpers import segment_layout as layout
from helpers.segment_file import SegmentFile
from hypothesis import strategies as st


class Damage(Protocol):
    def do(self, file: SegmentFile, other: SegmentFile) -> None:
        """Damage `file`; `other` is an intact segment of another kind."""


@dataclass(frozen=True)
class Overwrite:
    """Replaces the bytes at an offset."""

    offset: int
    data: bytes

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        file.write(self.offset, self.data)


@dataclass(frozen=True)
class FlipBit:
    offset: int
    bit: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        was = file.read(self.offset, 1) or b"\0"
        file.write(self.offset, bytes([was[0] ^ 1 << self.bit]))


@dataclass(frozen=True)
class Resize:
    """Truncates or extends the file; `and_back` then restores its length, but not its content."""

    size: int
    and_back: bool = False

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        file.resize(self.size)
        if self.and_back:
            file.resize(file.table.file_size)


@dataclass(frozen=True)
class Transplant:
    """Copies bytes of another segment to the same place in this one."""

    offset: int
    count: int

    def do(self, file: SegmentFile, other: SegmentFile) -> None:
        file.write(self.offset, other.read(self.offset, self.count))


@dataclass(frozen=True)
class SetField:
    """Sets a record's field, or adds to it if `relative`; corrects the checksum if `checksum`.

    `number` is the record's index; None: the committed copy of a record that has two copies.
    """

    record: str
    field: str
    value: int
    number: int | None = None
    element: int = 0
    relative: bool = False
    checksum: bool = True

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        number = file.current(self.record) if self.number is None else self.number
        record = file.record(self.record, number)
        old = getattr(record, self.field)
        if isinstance(old, bytes):
            char = self.value & 0xFF
            setattr(record, self.field, bytes([char]) * max(len(old), 1))
        elif isinstance(old, ctypes.Array):
            element = self.element % len(old)
            if isinstance(old[element], ctypes.Structure):
                for name, *_ in old[element]._fields_:
                    setattr(old[element], name, self.value)
            else:
                old[element] = self.value + (old[element] if self.relative else 0)
        else:
            setattr(record, self.field, self.value + (old if self.relative else 0))
        file.put(self.record, record, number, checksum=self.checksum)


@dataclass(frozen=True)
class Sizes:
    """Writes wrong sizes that agree with each other, with correct checksums."""

    rows: int
    dims: tuple[int, ...]
    reserved: int | None
    buckets: int | None
    count: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        member, lane = file.committed("member"), file.committed("lane")
        elements = file.record("directory").components
        for dim in self.dims:
            elements *= dim
        shape = file.record("shape", member.shape & 1)
        shape.rank = len(self.dims)
        for i, dim in enumerate(self.dims[: layout.MAX_RANK]):
            shape.dims[i] = dim
        member.shape &= 1
        member.count = member.weight = lane.count = lane.weight = self.count
        member.round = lane.round = file.committed("round").round
        member.rows, member.row_elements = self.rows, elements
        if self.buckets is not None:
            member.index_buckets = self.buckets
        if self.reserved is not None:
            for state in (member, lane):
                for i in range(len(state.reserved)):
                    state.reserved[i] = self.reserved
        file.put("shape", shape, member.shape)
        file.put("lane", lane, file.current("lane"))
        file.put("member", member, file.current("member"))


@dataclass(frozen=True)
class UndoLog:
    """Writes an undo log, as if an operation had been interrupted."""

    records: tuple[tuple[int, int, int], ...]  # first slot, slots, member
    counted: int
    reserved: int | None
    new_rows: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        number = file.current("lane")
        state = file.record("lane", number)
        if self.reserved is not None:
            for region in ("undo log", "undo rows"):
                state.reserved[layout.LANE_REGIONS.index(region)] = self.reserved
            file.put("lane", state, number)
        log = b"".join(
            bytes(layout.UndoRecord(first, slots, member)) + bytes(slots % 65 * 8)
            for first, slots, member in self.records
        )
        file.write(file.table.region("undo log"), log)
        file.put("journal", layout.Journal(state.generation + 1, self.counted, self.new_rows))


@dataclass(frozen=True)
class Elsewhere:
    """Damages another lane or member. The set of contributors counts as one more member."""

    lane: int
    member: int
    damage: Damage

    def do(self, file: SegmentFile, other: SegmentFile) -> None:
        file.look_at(self.lane, self.member)
        try:
            self.damage.do(file, other)
        finally:
            file.look_at(0, 0)


@dataclass(frozen=True)
class AgeOfCopies:
    """Sets the generations of a member's two copies, relative to the lane's generation."""

    first: int
    second: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        generation = file.record("lane_generation").word
        for number, age in enumerate((self.first, self.second)):
            copy = file.record("member", number)
            copy.generation = generation + age
            file.put("member", copy, number)


@dataclass(frozen=True)
class Directory:
    """Sets a field of the first member's directory entry, with correct checksums."""

    field: str
    value: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        config = file.record("config")
        entry = file.record("directory")
        setattr(entry, self.field, self.value)
        file.put("directory", entry)
        whole_words = min(config.directory_bytes, 1 << 16) & ~7
        held = file.read(file.table.region("directory"), whole_words)
        config.directory_checksum = layout.mix_words(held)
        file.put("config", config)


@dataclass(frozen=True)
class PhantomWaiter:
    """Queues a take that no process is making, under the token of an attached process."""

    entry: int
    ticket: int
    num_required: int
    participant: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        owner = file.record("participant", self.participant & 3)
        queue = file.record("queue")
        queue.top = max(queue.top, self.entry + 1)
        file.put("queue", queue)
        waiter = file.record("waiter", self.entry)
        waiter.ticket, waiter.participant_token = self.ticket, owner.token
        waiter.num_required, waiter.participant = self.num_required, self.participant
        file.put("waiter", waiter, self.entry)


_EDGES: Final = (
    *(0, 10, 1 << 6, 1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 26, 1 << 31, 1 << 32, 1 << 34),
    *(1 << 37, 1 << 40, 1 << 43, 1 << 60, 1 << 61, 1 << 62, 1 << 63, 1 << 64, layout.MAX_ROWS),
)
_CORNERS: Final = sorted(
    {edge + step for edge in _EDGES for step in (-1, 0, 1)} | {-(1 << 63), -(1 << 31), -2}
)
numbers: Final = st.one_of(
    st.sampled_from(_CORNERS), st.integers(0, 300), st.integers(-(1 << 63), (1 << 64) - 1)
)

# Ranges of bytes in use. Important ones are repeated, so that they are drawn more often.
_SPANS: Final = (
    *[(0, layout.HEADER_USED)] * 4, (0, ctypes.sizeof(layout.Config)),
    (layout.ROUNDS, 2 * ctypes.sizeof(layout.RoundState)),
    (layout.QUEUE, layout.HEADER_USED - layout.QUEUE),
    *[(layout.region("states"), layout.SINGLE.bytes_of_lane)] * 4,
    (layout.region("directory"), ctypes.sizeof(layout.DirectoryEntry) + 64),
    (layout.region("participants"), 512), (layout.region("waiters"), 256),
    (layout.region("index 0"), 1024), (layout.region("index 1"), 1024),
    (layout.region("slots"), 512), (layout.region("rows 0"), 512), (layout.region("rows 1"), 256),
    (layout.region("undo log"), 256), (layout.region("undo rows"), 256),
    (layout.region("shapes"), 1024),
)  # fmt: skip
_TWICE: Final = ("round", "lane", "member")


@st.composite
def _places(draw: st.DrawFn) -> int:
    start, length = draw(st.sampled_from(_SPANS))
    return start + draw(st.integers(0, length - 1))


def _fields(record: str) -> list[str]:
    return [name for name, *_ in layout.RECORDS[record][0]._fields_ if not name.startswith("_")]


@st.composite
def _fields_set(draw: st.DrawFn, records: tuple[str, ...] = tuple(layout.RECORDS)) -> SetField:
    record = draw(st.sampled_from(records))
    return SetField(
        record=record,
        field=draw(st.sampled_from(_fields(record))),
        value=draw(numbers),
        number=None
        if record in _TWICE and draw(st.booleans())
        else draw(st.integers(0, layout.RECORDS[record][1] - 1)),
        element=draw(st.integers(0, 11)),
        relative=draw(st.booleans()),
        checksum=draw(st.sampled_from((True, True, True, False))),
    )


_data: Final = st.one_of(
    st.binary(min_size=1, max_size=64),
    st.builds(
        lambda byte, n: bytes([byte]) * n, st.sampled_from((0, 255, 1)), st.integers(1, 4096)
    ),
)
_CONFIG_BYTES: Final = ctypes.sizeof(layout.Config)
_file_sizes: Final = st.one_of(
    st.sampled_from(
        [0, 1, _CONFIG_BYTES - 1, _CONFIG_BYTES, 4095, 4096, 8191, 8192]
        + [
            i * layout.REGION_SPAN + d
            for i in range(1, len(layout.REGIONS) + 1)
            for d in (-4096, -1, 0, 1, 4096)
        ]
    ),
    st.integers(0, layout.FILE_SIZE),
)
_dims: Final = st.one_of(
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(numbers, max_size=3),
    st.lists(st.sampled_from((0, 1)), min_size=62, max_size=65),
).map(tuple)

_of_a_table: Final[st.SearchStrategy[Damage]] = st.one_of(
    _fields_set(("lane", "member")),
    _fields_set(("lane_generation", "journal", "fairness", "shape", "slot", "undo")),
    st.builds(
        Sizes,
        rows=numbers,
        dims=_dims,
        reserved=st.none() | numbers,
        buckets=st.none() | numbers,
        count=st.sampled_from((1, 3, (1 << 63) - 1)),
    ),
    st.builds(
        UndoLog,
        records=st.lists(st.tuples(numbers, numbers, numbers), max_size=4).map(tuple),
        counted=numbers,
        reserved=st.none() | numbers,
        new_rows=numbers,
    ),
    st.builds(AgeOfCopies, st.integers(-2, 3), st.integers(-2, 3)),
)

damages: Final[st.SearchStrategy[Damage]] = st.one_of(
    st.builds(Overwrite, _places(), _data),
    st.builds(FlipBit, _places(), st.integers(0, 7)),
    st.builds(Resize, _file_sizes, st.booleans()),
    st.builds(Transplant, _places(), st.integers(1, 8192)),
    st.sampled_from([Transplant(layout.REGION_SPAN * i, 8192) for i in range(len(layout.REGIONS))]),
    _fields_set(),
    _fields_set(("round",)),
    _fields_set(("config",)),
    _fields_set(("queue", "waiter", "participant", "participants_top", "event")),
    st.builds(
        Directory, st.sampled_from([name for name, _ in layout.DirectoryEntry._fields_]), numbers
    ),
    _of_a_table,
    st.builds(Elsewhere, st.integers(0, 3), st.integers(0, 3), _of_a_table),
    st.builds(
        PhantomWaiter,
        entry=st.sampled_from((0, 1, 2, 63, 64, 4095)),
        ticket=st.integers(1, 5) | st.just((1 << 64) - 1),
        num_required=numbers,
        participant=st.integers(0, 2) | st.sampled_from((4095, 4096, (1 << 32) - 1)),
    ),
)


def several(most: int = 3) -> st.SearchStrategy[list[Any]]:
    """Draw up to `most` damages, to be done one after the other."""
    return st.lists(damages, min_size=1, max_size=most)
