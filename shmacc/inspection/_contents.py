"""Examines a segment's rows and values, as they were last committed."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from shmacc import _core
from shmacc._base import layout
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._base.reports import LaneMemberState
from shmacc._values import dtypes
from shmacc.errors import InvalidArgumentError, ShmaccError
from shmacc.inspection._listing import open_view, tables
from shmacc.inspection._scopes import resolve

_T = TypeVar("_T")
_ATTEMPTS = 8
_PAUSE = 0.002  # seconds; an apply takes less
_MARKS: tuple[Literal["generation", "in_operation", "undo_records"], ...] = (
    "generation",
    "in_operation",
    "undo_records",
)
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
    """Return the rows that most gradients touched, and whether nothing changed during the look.

    Args:
        name: The segment.
        how_many: The largest number of rows to return.
        member: A member of a group; None: the group's first sparse member.

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
                touched, still = _look_still(table, partial(_committed_places, table))
                found.append(touched)
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
        name: The segment's name; see `resolve`.

    Raises:
        InvalidArgumentError: The name is that of shared arrays, not of an accumulator.
        NotFoundError, DataLossError, PermissionDeniedError: See `most_touched`.
    """
    found = []
    with open_view(resolve(name)) as view:
        config = view.config()
        if config["kind"] in layout.ARRAYS:
            raise InvalidArgumentError(f"{name!r} is the name of shared arrays, which have no sums")
        for table, member in tables(view, config):
            dtype = dtypes.stored(member["dtype"])
            seen, still = _look_still(table, partial(_summary_of_table, table, dtype=dtype))
            found.append(dataclasses.replace(seen, still=still))
    return _together(found)


def _look_still(view: _core.SegmentView, look: Callable[[LaneMemberState], _T]) -> tuple[_T, bool]:
    """Return the result of `look`, repeated a few times if the segment changed meanwhile.

    `look` copies bytes without the lock. The copy is consistent only if the committed state was the
    same before and after, and no operation went on meanwhile. An operation that stands still (its
    process is stopped) does no harm: the undo log holds all bytes that it has changed in place
    (commit.hpp). If `look` fails, a later operation may have written the undo log, which then does
    not fit the state. So a failure proves damage only if nothing changed meanwhile.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        before = view.state()
        try:
            seen = look(before)
        except ShmaccError:
            if _is_still(before, view.state()):
                raise
        else:
            still = _is_still(before, view.state())
            if still or attempt == _ATTEMPTS:
                return seen, still
        time.sleep(_PAUSE)
    return look({**view.state(), "undo_records": 0}), False


def _is_still(before: LaneMemberState, after: LaneMemberState) -> bool:
    return all(before[mark] == after[mark] for mark in _MARKS)


@np.errstate(all="ignore")
def _summary(numbers: ValueArray) -> ValueSummary:
    real = numbers if numbers.dtype.kind == "c" else numbers.astype(np.float64)
    magnitudes = np.abs(real).astype(np.float64)
    finite = magnitudes[np.isfinite(magnitudes)]
    largest = float(finite.max(initial=0.0))
    # Divide by the largest magnitude, so that squares do not overflow.
    norm = largest * math.sqrt(float(np.sum((finite / largest) ** 2))) if largest else 0.0
    nan, infinite = (int(np.count_nonzero(are(numbers))) for are in (np.isnan, np.isinf))
    return ValueSummary(numbers.size, norm, largest, nan, infinite, still=True)


def _together(parts: Iterable[ValueSummary]) -> ValueSummary:
    found = list(parts)
    return ValueSummary(
        numbers=sum(part.numbers for part in found),
        norm=math.hypot(*(part.norm for part in found)),
        largest=max((part.largest for part in found), default=0.0),
        nan=sum(part.nan for part in found),
        infinite=sum(part.infinite for part in found),
        still=all(part.still for part in found),
    )


def _summary_of_table(
    view: _core.SegmentView, state: LaneMemberState, dtype: dtypes.DType
) -> ValueSummary:
    return _together(map(_summary, _pieces(view, state, dtype)))


def _pieces(
    view: _core.SegmentView, state: LaneMemberState, dtype: dtypes.DType
) -> Iterator[ValueArray]:
    """Yield the committed sums of a member in a lane, piece by piece."""
    width = state["row_elements"] * dtype.sums.itemsize
    sums = layout.REGIONS["rows 0"]
    if view.config()["member_kind"] != layout.KINDS["sparse"]:  # never changed in place
        end = width if state["member_count"] else 0
        for offset in range(0, end, _PIECE):
            size = min(_PIECE, end - offset)
            yield _numbers(view.read(sums + state["buffer"], offset, size), dtype)
        return
    # If an uncommitted apply has changed a row, count the row once, with its saved values.
    flags, saved_at = view.unchanged(state["undo_records"])
    unchanged = np.frombuffer(flags, np.bool_)
    saved = np.ones(np.count_nonzero(~unchanged), np.bool_)
    for region, wanted, start in (
        (sums, unchanged, 0),
        (layout.REGIONS["undo rows"], saved, saved_at),
    ):
        step = max(1, _PIECE // max(1, width))
        for first in range(0, wanted.size if width else 0, step):
            of_piece = wanted[first : first + step]
            piece = view.read(region, start + first * width, of_piece.size * width)
            yield _numbers(piece, dtype).reshape(of_piece.size, -1)[of_piece]


def _numbers(piece: bytes, dtype: dtypes.DType) -> ValueArray:
    numbers: ValueArray = np.frombuffer(piece, dtype=dtype.sums).view(dtype.partial)
    return numbers


def _committed_places(
    view: _core.SegmentView, state: LaneMemberState
) -> tuple[IndexArray, IndexArray]:
    """Return the rows of a sparse member in a lane, and how many gradients touched each."""
    places = np.frombuffer(view.places(state["undo_records"]), np.int64).reshape(-1, 2)
    return places[:, 0], places[:, 1]
