"""Examines a segment's rows and values, as they were last committed."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._gradients import dtypes
from shmacc._layout import layout
from shmacc._layout.reports import TableState
from shmacc._records.array_types import IndexArray, ValueArray
from shmacc.errors import DataLossError, InvalidArgumentError
from shmacc.inspection._listing import open_view, resolve
from shmacc.inspection._stillness import look_still, tables
from shmacc.inspection._table import read_slots
from shmacc.inspection._undo import read_undo

_NO_ROWS = np.empty(0, np.int64)
_PIECE = 2**20  # bytes of values that are read at once


@dataclass(frozen=True, slots=True)
class RowCount:
    """A row that gradients of this round touched.

    Attributes:
        row: Its index.
        count: How many gradients touched it.
    """

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """A summary of the round's sums; nothing is taken.

    Attributes:
        numbers: How many numbers the sums have.
        norm: Euclidean norm of the finite numbers.
        largest: Largest magnitude of a finite number.
        nan: How many are NaN.
        infinite: How many are infinite.
        still: False if gradients kept arriving while the sums were read.
    """

    numbers: int
    norm: float
    largest: float
    nan: int
    infinite: int
    still: bool


def most_touched(
    name: str, how_many: int, member: str | None = None
) -> tuple[tuple[RowCount, ...], bool]:
    """Return the rows that most gradients touched, and whether they stayed unchanged meanwhile.

    Args:
        name: The segment.
        how_many: The largest number of rows to return.
        member: A member of a group; None: its first sparse one.

    Raises:
        NotFoundError: There is no segment of that name.
        DataLossError: The segment is damaged.
        PermissionDeniedError: This user may not read the segment.
    """
    with open_view(resolve(name)) as view:
        config = view.config()
        if member is None:
            sparse = layout.KINDS["sparse"]
            member = next((m["name"] for m in config["members"] if m["kind"] == sparse), None)
        found, all_still = [(_NO_ROWS, _NO_ROWS)], True
        for table, of_member in tables(view, config):
            if of_member["name"] == member and of_member["kind"] == layout.KINDS["sparse"]:
                slots, still = look_still(table, partial(_committed_slots, table))
                found.append(slots)
                all_still &= still
    # Several lanes may have the same row: add up their counts.
    rows, where = np.unique(np.concatenate([rows for rows, _ in found]), return_inverse=True)
    counts = np.zeros(rows.size, np.int64)
    np.add.at(counts, where, np.concatenate([counts for _, counts in found]))
    order = np.lexsort((rows, -counts))[:how_many]
    return tuple(RowCount(int(rows[i]), int(counts[i])) for i in order), all_still


def summarise_values(name: str) -> ValueSummary:
    """Summarise the round's sums: norm, largest, NaN, infinite.

    Args:
        name: As for `resolve`.

    Raises:
        InvalidArgumentError: The name is that of shared arrays, not of an accumulator.
        Everything else as for `most_touched`.
    """
    tally, all_still = _Tally(), True
    with open_view(resolve(name)) as view:
        config = view.config()
        if config["kind"] in layout.ARRAYS:
            raise InvalidArgumentError(f"{name!r} is the name of shared arrays, which have no sums")
        for table, member in tables(view, config):
            dtype = dtypes.stored(member["dtype"])
            of_table, still = look_still(table, partial(_tally, table, dtype=dtype))
            tally.join(of_table)
            all_still &= still
    return ValueSummary(**dataclasses.asdict(tally), still=all_still)


@dataclass(slots=True)
class _Tally:
    """Sums over numbers that come piece by piece; the fields are those of ValueSummary."""

    numbers: int = 0
    norm: float = 0.0
    largest: float = 0.0
    nan: int = 0
    infinite: int = 0

    @np.errstate(all="ignore")
    def add(self, numbers: ValueArray) -> None:
        real = numbers if numbers.dtype.kind == "c" else numbers.astype(np.float64)
        magnitudes = np.abs(real).astype(np.float64)
        finite = magnitudes[np.isfinite(magnitudes)]
        largest = float(finite.max(initial=0.0))
        # Divided by the largest, so that squares do not overflow.
        norm = largest * math.sqrt(float(np.sum((finite / largest) ** 2))) if largest else 0.0
        nan, infinite = (int(np.count_nonzero(are(numbers))) for are in (np.isnan, np.isinf))
        self.join(_Tally(numbers.size, norm, largest, nan, infinite))

    def join(self, other: "_Tally") -> None:
        self.numbers += other.numbers
        self.norm = math.hypot(self.norm, other.norm)
        self.largest = max(self.largest, other.largest)
        self.nan += other.nan
        self.infinite += other.infinite


def _tally(view: _core.SegmentView, state: TableState, dtype: dtypes.DType) -> _Tally:
    sparse = view.config()["member_kind"] == layout.KINDS["sparse"]
    rows = state["rows"] if sparse else min(state["member_count"], 1)
    width = state["row_elements"] * dtype.sums.itemsize
    if rows * width > view.allocated_bytes:
        raise DataLossError("The segment is damaged: it claims more values than it occupies bytes")
    tally = _Tally()
    if not sparse:  # a dense sum is never changed in place
        for offset in range(0, rows * width, _PIECE):
            size = min(_PIECE, rows * width - offset)
            piece = view.read(layout.REGIONS["rows 0"] + state["buffer"], offset, size)
            tally.add(_numbers(piece, dtype))
        return tally
    undo = read_undo(view, state)
    changed = np.zeros(rows, np.bool_)
    changed[undo.slots] = True
    # A row that an uncommitted apply has changed counts once, as it was saved.
    _add_rows(tally, view, layout.REGIONS["rows 0"], width, ~changed, dtype)
    saved = np.ones(undo.slots.size, np.bool_)
    _add_rows(tally, view, layout.REGIONS["undo rows"], width, saved, dtype, undo.start)
    return tally


def _add_rows(
    tally: _Tally,
    view: _core.SegmentView,
    region: int,
    width: int,
    wanted: npt.NDArray[np.bool_],
    dtype: dtypes.DType,
    start: int = 0,
) -> None:
    """Add a region's wanted rows; the first begins at `start`, each has `width` bytes."""
    if not width:
        return
    step = max(1, _PIECE // width)
    for first in range(0, wanted.size, step):
        of_piece = wanted[first : first + step]
        piece = view.read(region, start + first * width, of_piece.size * width)
        tally.add(_numbers(piece, dtype).reshape(of_piece.size, -1)[of_piece])


def _numbers(piece: bytes, dtype: dtypes.DType) -> ValueArray:
    numbers: ValueArray = np.frombuffer(piece, dtype=dtype.sums).view(dtype.partial)
    return numbers


def _committed_slots(view: _core.SegmentView, state: TableState) -> tuple[IndexArray, IndexArray]:
    rows, contributions = read_slots(view, state["rows"])
    undo = read_undo(view, state)
    if not undo.slots.size:
        return rows, contributions
    numbers, committed = rows.copy(), contributions.copy()
    numbers[undo.overwritten] = undo.numbers
    committed[undo.slots] = undo.contributions
    return numbers, committed
