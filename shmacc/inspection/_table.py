"""The rows of a sparse segment, compared with the index that leads to them.

This repeats index.hpp in NumPy, on purpose, as a second opinion.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._layout import layout
from shmacc._layout.reports import TableById, TableState
from shmacc._records.array_types import IndexArray
from shmacc.errors import DataLossError

_ENTRIES = 10
_BUCKET = np.dtype([("tags", "<u2", _ENTRIES), ("stamp", "<u4"), ("slots", "<u4", _ENTRIES)])

_PIECE = (
    2**12
)  # slots or buckets that are looked at at once: a few MiB with all that is made of them

_HALF = np.uint64(32)  # bits
_LOWER_HALF = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0xD6E8FEB86659FD93)

_Words = npt.NDArray[np.uint64]


def problems(view: _core.SegmentView, before: TableState) -> list[str] | None:
    """Return the problems of the table; None if it cannot be told, since a round ended meanwhile.

    Gradients may arrive meanwhile. Within a round a row keeps its slot and its number, and its
    entry in the index its position, until the index is rebuilt; so the rows that were there before
    can be compared with an index that is read later.
    """
    number = before["rows"]
    rows, least, most = _read_rows(view, number)
    lost = int(number - np.count_nonzero(found_rows(view, before, rows)))
    after = view.state()
    if _round(before) != _round(after):
        return None
    found = list(_problems_of_rows(view, rows))
    # An apply that has not committed changes counts in place.
    most_possible = after["member_weight"]
    if number and (least < 1 or (most > most_possible and not after["in_operation"])):
        found.append(f"a row's count is not between 1 and its gradients' weight, {most_possible}")
    if lost:
        found.append(f"{lost} of {number} rows cannot be found through the index")
    return found


def _round(state: TableState) -> tuple[int, ...]:
    """Return what stays as it is until the round ends or its index is rebuilt."""
    ended = state["counters"]["takes"], state["counters"]["discarded"]
    return (*ended, state["index"], state["index_buckets"], state["index_stamp"])


def _read_rows(view: _core.SegmentView, number: int) -> tuple[IndexArray, int, int]:
    """Return the rows' numbers, and the least and the largest of their counts."""
    if number * layout.SLOT_BYTES > view.allocated_bytes:
        raise DataLossError("The segment is damaged: it claims more rows than it occupies bytes")
    rows = np.empty(number, np.int64)
    least, most = 1, 1
    for first in range(0, number, _PIECE):
        size = min(_PIECE, number - first)
        raw = view.read(
            layout.REGIONS["slots"], first * layout.SLOT_BYTES, size * layout.SLOT_BYTES
        )
        pairs = np.frombuffer(raw, dtype=np.int64).reshape(-1, 2)
        rows[first : first + size] = pairs[:, 0]
        least = min(least, int(pairs[:, 1].min()))
        most = max(most, int(pairs[:, 1].max()))
    return rows, least, most


def _problems_of_rows(view: _core.SegmentView, rows: IndexArray) -> Iterator[str]:
    if not rows.size:
        return
    ordered = np.sort(rows)
    if int(ordered[0]) < 0:
        yield "a row's number is negative"
    if np.any(ordered[1:] == ordered[:-1]):
        yield "a row stands in the table twice"
    config = view.config()
    declared = config["declared"] if config["member_kind"] == layout.KINDS["sparse"] else None
    if declared and declared[0] >= 0 and int(ordered[-1]) >= declared[0]:
        yield f"row {int(ordered[-1])} is past the declared {declared[0]} rows"


def problems_by_id(
    view: _core.SegmentView, before: TableState, by_id: TableById
) -> list[str] | None:
    """Return the problems of a table of parameters; None: an update ended meanwhile.

    A slot is in use if it was given to its id by a generation that is committed. An update that
    runs, or was left by a dead process, may have freed slots that are in use until its commit.
    """
    if by_id["slots"] * layout.SLOT_BYTES > view.allocated_bytes:
        raise DataLossError("The segment is damaged: it claims more rows than it occupies bytes")
    ids, stamps = np.empty(by_id["slots"], np.int64), np.empty(by_id["slots"], np.int64)
    for first in range(0, by_id["slots"], _PIECE):
        size = min(_PIECE, by_id["slots"] - first) * layout.SLOT_BYTES
        raw = view.read(layout.REGIONS["slots"], first * layout.SLOT_BYTES, size)
        pairs = np.frombuffer(raw, np.int64).reshape(-1, 2)
        ids[first : first + _PIECE], stamps[first : first + _PIECE] = pairs[:, 0], pairs[:, 1]
    is_found = found_rows(view, before, ids)
    after = view.state()
    if after["generation"] != before["generation"]:
        return None
    generation = by_id["generation"]
    in_use = (stamps > 0) & (stamps % 2 == 0) & (stamps >> 1 <= generation)
    # Of an update that has not committed.
    freed = stamps == (generation + 1 << 1 | 1)
    found = list(_problems_of_rows(view, ids[in_use]))
    least, most = np.count_nonzero(in_use), np.count_nonzero(in_use | freed)
    if not least <= by_id["rows"] <= most or (least != most and not after["in_operation"]):
        found.append(f"it has {by_id['rows']} rows, but {least} of its slots are in use")
    lost = np.count_nonzero(in_use & ~is_found)
    if lost:
        found.append(f"{lost} of {by_id['rows']} rows cannot be found through the index")
    return found


def found_rows(
    view: _core.SegmentView, state: TableState, rows: IndexArray
) -> npt.NDArray[np.bool_]:
    """Return of each slot's row whether a search of the index finds it."""
    number = state["index_buckets"]
    if not rows.size or not number:
        return np.zeros(rows.size, np.bool_)
    # How many buckets before each one are full: a search walks on for as long as they are.
    full = np.zeros(number + 1, np.int64)
    for first, buckets in _pieces_of_index(view, state):
        taken = (buckets["tags"][:, _ENTRIES - 1] != 0) & (buckets["stamp"] == state["index_stamp"])
        full[first + 1 : first + 1 + buckets.size] = taken
    np.cumsum(full, out=full)
    found = np.zeros(rows.size, np.bool_)
    for first, buckets in _pieces_of_index(view, state):
        _find(view.config()["hash_key"], state, first, buckets, rows, full, found)
    return found


def _pieces_of_index(
    view: _core.SegmentView, state: TableState
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    region = layout.REGIONS["index 0"] + state["index"]
    for first in range(0, state["index_buckets"], _PIECE):
        size = min(_PIECE, state["index_buckets"] - first)
        raw = view.read(region, first * _BUCKET.itemsize, size * _BUCKET.itemsize)
        yield first, np.frombuffer(raw, dtype=_BUCKET)


def _find(
    key: list[int],
    state: TableState,
    first: int,
    buckets: npt.NDArray[Any],
    rows: IndexArray,
    full: IndexArray,
    found: npt.NDArray[np.bool_],
) -> None:
    """Mark the rows that a search finds in these buckets, the first of which has that number."""
    number = state["index_buckets"]
    current = buckets["stamp"] == state["index_stamp"]
    at, entry = np.nonzero((buckets["tags"] != 0) & current[:, np.newaxis])
    slots = buckets["slots"][at, entry]
    # Slots beyond the rows in use were left behind by an undone apply, or belong to a later one.
    in_use = slots < rows.size
    at, entry, slots = at[in_use], entry[in_use], slots[in_use]
    hashes = hash_rows(rows[slots], key)
    tags = np.maximum(hashes & np.uint64(0xFFFF), np.uint64(1))
    home = (((hashes >> _HALF) * np.uint64(number)) >> _HALF).astype(np.int64)
    there = at + first
    around = there < home  # past the last bucket comes the first
    passed = full[there] - full[home] + np.where(around, full[number], 0)
    distance = there - home + np.where(around, number, 0)
    found[slots[(passed == distance) & (buckets["tags"][at, entry] == tags)]] = True


def hash_rows(rows: IndexArray, key: list[int]) -> _Words:
    """Return the upper 64 bits of ``factor * row + addend`` modulo ``2**128``, mixed.

    It is multiplied out in digits of 32 bits, so that no product or sum of the lower 64 bits wraps
    around, and in the upper 64 the overflow is lost, as it should be.
    """
    factor, factor_low, addend, addend_low = map(np.uint64, key)
    row = rows.astype(np.uint64)
    low, high = row & _LOWER_HALF, row >> _HALF
    first, second = factor_low & _LOWER_HALF, factor_low >> _HALF
    column = first * low + (addend_low & _LOWER_HALF)
    column = second * low + (column >> _HALF)
    other = first * high + (column & _LOWER_HALF) + (addend_low >> _HALF)
    upper = factor * row + second * high + (column >> _HALF) + (other >> _HALF) + addend
    mixed: _Words = (upper ^ (upper >> _HALF)) * _MIX
    return mixed
