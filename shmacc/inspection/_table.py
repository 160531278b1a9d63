"""The rows of a sparse segment, compared with the index that leads to them.

This repeats index.hpp in NumPy, on purpose, as a second opinion.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc import _layout as layout
from shmacc._records import IndexArray
from shmacc.inspection._examination import read_slots

_PLACES = 10
_BUCKET = np.dtype([("tags", "<u2", _PLACES), ("stamp", "<u4"), ("slots", "<u4", _PLACES)])

_HALF = np.uint64(32)  # bits
_LOWER_HALF = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0xD6E8FEB86659FD93)

_Words = npt.NDArray[np.uint64]


def problems(view: _core.View, state: dict[str, Any]) -> list[str]:
    """Return the problems of the table in this state."""
    rows, counts = read_slots(view, state)
    found = list(_problems_of_rows(view, rows))
    if not state["in_operation"]:  # an apply that has not committed changes counts in place
        found += _problems_of_counts(counts, state["count"])
    lost = _lost_rows(view, state, rows)
    if lost:
        found.append(f"{lost} of {rows.size} rows cannot be found through the index")
    return found


def _problems_of_rows(view: _core.View, rows: IndexArray) -> Iterator[str]:
    if not rows.size:
        return
    ordered = np.sort(rows)
    if int(ordered[0]) < 0:
        yield "a row's number is negative"
    if np.any(ordered[1:] == ordered[:-1]):
        yield "a row stands in the table twice"
    declared = view.config()["declared"]
    if declared and declared[0] >= 0 and int(ordered[-1]) >= declared[0]:
        yield f"row {int(ordered[-1])} is past the declared {declared[0]} rows"


def _problems_of_counts(counts: IndexArray, gradients: int) -> Iterator[str]:
    if counts.size and (int(counts.min()) < 1 or int(counts.max()) > gradients):
        yield f"a row's count is not between 1 and the round's {gradients} gradients"


def _lost_rows(view: _core.View, state: dict[str, Any], rows: IndexArray) -> int:
    """Return how many rows a search of the index would not find."""
    number = state["index_buckets"]
    if not rows.size:
        return 0
    if not number:
        return int(rows.size)
    region = layout.REGIONS["index 0"] + state["index"]
    raw = view.read(region, 0, number * _BUCKET.itemsize)
    buckets = np.frombuffer(raw, dtype=_BUCKET)
    current = buckets["stamp"] == state["index_stamp"]
    taken = (buckets["tags"] != 0) & current[:, np.newaxis]
    at, place = np.nonzero(taken)
    slots = buckets["slots"][at, place]
    # Slots beyond the rows in use were left behind by an undone apply.
    in_use = slots < rows.size
    at, place, slots = at[in_use], place[in_use], slots[in_use]
    hashes = hash_rows(rows[slots], view.config()["hash_key"])
    tags = np.maximum(hashes & np.uint64(0xFFFF), np.uint64(1))
    home = ((hashes >> _HALF) * np.uint64(number)) >> _HALF
    # A search walks from the home bucket on for as long as buckets are full.
    distance = (at - home.astype(np.int64)) % number
    full = (taken[:, _PLACES - 1]).astype(np.int64)
    before = np.concatenate(([0], np.cumsum(np.concatenate((full, full)))))
    start = home.astype(np.int64)
    reached = before[start + distance] - before[start] == distance
    found = np.zeros(rows.size, np.bool_)
    found[slots[reached & (buckets["tags"][at, place] == tags)]] = True
    return int(rows.size - np.count_nonzero(found))


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
