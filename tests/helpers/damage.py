"""What can be done to a segment: each kind of damage says what it is, and so shrinks well."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from helpers import segment_layout as layout
from hypothesis import strategies as st

if TYPE_CHECKING:
    from helpers.segment_file import SegmentFile


class Damage(Protocol):
    def do(self, file: SegmentFile, other: SegmentFile) -> None:
        """Do it to `file`; `other` is a sound segment of another kind."""


@dataclass(frozen=True)
class Overwrite:
    """Bytes written over whatever is there."""

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
    """The file truncated or extended, and perhaps made as long again, without its content."""

    size: int
    and_back: bool = False

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        file.resize(self.size)
        if self.and_back:
            file.resize(layout.FILE_SIZE)


@dataclass(frozen=True)
class Transplant:
    """Bytes of another segment in this one's place."""

    offset: int
    count: int

    def do(self, file: SegmentFile, other: SegmentFile) -> None:
        file.write(self.offset, other.read(self.offset, self.count))


@dataclass(frozen=True)
class SetField:
    """One field of a record, set or moved, with the checksum made right again or not.

    `number` None: of the states, the committed one.
    """

    record: str
    field: str
    value: int
    number: int | None = None
    element: int = 0
    relative: bool = False
    checksum: bool = True

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        number = file.current if self.number is None else self.number
        record = file.record(self.record, number)
        old = getattr(record, self.field)
        if isinstance(old, bytes):
            char = self.value & 0xFF
            setattr(record, self.field, bytes([char]) * max(len(old), 1))
        elif isinstance(old, ctypes.Array):
            element = self.element % len(old)
            old[element] = self.value + (old[element] if self.relative else 0)
        else:
            setattr(record, self.field, self.value + (old if self.relative else 0))
        file.put(self.record, record, number, checksum=self.checksum)


@dataclass(frozen=True)
class Sizes:
    """Sizes that agree with each other, with right checksums, and are lies."""

    rows: int
    dims: tuple[int, ...]
    reserved: int | None
    buckets: int | None
    count: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        number = file.current
        state = file.record("state", number)
        config = file.record("config")
        elements = config.components
        for dim in self.dims:
            elements *= dim
        shape = file.record("shape", state.shape & 1)
        shape.rank = len(self.dims)
        for i, dim in enumerate(self.dims[: layout.MAX_RANK]):
            shape.dims[i] = dim
        state.count, state.rows, state.row_elements = self.count, self.rows, elements
        if self.buckets is not None:
            state.index_buckets = self.buckets
        if self.reserved is not None:
            for i in range(len(layout.REGIONS)):
                state.reserved[i] = self.reserved
        file.put("shape", shape, state.shape & 1)
        file.put("state", state, number)


@dataclass(frozen=True)
class UndoLog:
    """An operation that seems to have been cut short, and an undo log of it."""

    records: tuple[tuple[int, int], ...]  # first slot, slots
    counted: int
    reserved: int | None
    new_rows: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        number = file.current
        state = file.record("state", number)
        if self.reserved is not None:
            for region in ("undo log", "undo rows"):
                state.reserved[layout.REGIONS.index(region)] = self.reserved
            file.put("state", state, number)
        log = b"".join(
            bytes(layout.UndoRecord(first, slots)) + bytes(slots % 65 * 8)
            for first, slots in self.records
        )
        file.write(layout.region("undo log"), log)
        file.put("journal", layout.Journal(state.generation + 1, self.counted, self.new_rows))


@dataclass(frozen=True)
class PhantomWaiter:
    """A take that nobody makes stands in line, in the name of an attached process."""

    entry: int
    ticket: int
    num_required: int
    participant: int

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        owner = file.record("participant", self.participant & 3)
        line = file.record("line")
        line.top = max(line.top, self.entry + 1)
        file.put("line", line)
        waiter = file.record("waiter", self.entry)
        waiter.ticket, waiter.participant_token = self.ticket, owner.token
        waiter.num_required, waiter.participant = self.num_required, self.participant
        file.put("waiter", waiter, self.entry)


_CORNERS: Final = sorted(
    {
        edge + step
        for edge in (0, 10, 64, 1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 26, 1 << 31, 1 << 32)
        for step in (-1, 0, 1)
    }
    | {
        edge + step
        for edge in (
            1 << 34,
            1 << 37,
            1 << 40,
            1 << 43,
            1 << 60,
            1 << 61,
            1 << 62,
            1 << 63,
            1 << 64,
        )
        for step in (-1, 0, 1)
    }
    | {layout.MAX_ROWS - 1, layout.MAX_ROWS, layout.MAX_ROWS + 1, -(1 << 63), -(1 << 31), -2}
)
numbers: Final = st.one_of(
    st.sampled_from(_CORNERS), st.integers(0, 300), st.integers(-(1 << 63), (1 << 64) - 1)
)

# Where the bytes are that are in use, with the weight of what depends on them.
_SPANS: Final = (
    *[(0, layout.HEADER_USED)] * 4,
    (0, ctypes.sizeof(layout.Config)),
    (layout.STATES, 2 * ctypes.sizeof(layout.State)),
    (layout.JOURNAL, layout.HEADER_USED - layout.JOURNAL),
    (layout.region("participants"), 512),
    (layout.region("waiters"), 256),
    (layout.region("index 0"), 1024),
    (layout.region("index 1"), 1024),
    (layout.region("slots"), 512),
    (layout.region("rows 0"), 512),
    (layout.region("rows 1"), 256),
    (layout.region("undo log"), 256),
    (layout.region("undo rows"), 256),
)


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
        if record == "state" and draw(st.booleans())
        else draw(st.integers(0, layout.RECORDS[record][2] - 1)),
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

damages: Final[st.SearchStrategy[Damage]] = st.one_of(
    st.builds(Overwrite, _places(), _data),
    st.builds(FlipBit, _places(), st.integers(0, 7)),
    st.builds(Resize, _file_sizes, st.booleans()),
    st.builds(Transplant, _places(), st.integers(1, 8192)),
    st.sampled_from([Transplant(layout.REGION_SPAN * i, 8192) for i in range(len(layout.REGIONS))]),
    _fields_set(),
    _fields_set(("state",)),
    _fields_set(("config",)),
    _fields_set(("line", "waiter", "participant", "participants_top", "journal", "courtesy")),
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
        records=st.lists(st.tuples(numbers, numbers), max_size=4).map(tuple),
        counted=numbers,
        reserved=st.none() | numbers,
        new_rows=numbers,
    ),
    st.builds(
        PhantomWaiter,
        entry=st.sampled_from((0, 1, 2, 63, 64, 4095)),
        ticket=st.integers(1, 5) | st.just((1 << 64) - 1),
        num_required=numbers,
        participant=st.integers(0, 2) | st.sampled_from((4095, 4096, (1 << 32) - 1)),
    ),
)


def several(most: int = 3) -> st.SearchStrategy[list[Any]]:
    """A few damages, one after the other."""
    return st.lists(damages, min_size=1, max_size=most)
