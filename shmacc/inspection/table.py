"""The rows of a sparse segment, and the index that leads to them, held against each other.

This repeats in NumPy what index.hpp does, on purpose: it is the second opinion.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc.inspection.examination import read_slots
from shmacc.inspection.segments import REGIONS
from shmacc.records import IndexArray

_INDEX_REGION = REGIONS.index("index 0")
_PLACES = 10
_BUCKET = np.dtype([("tags", "<u2", _PLACES), ("stamp", "<u4"), ("slots", "<u4", _PLACES)])

_Words = npt.NDArray[np.uint64]


def problems(view: _core.View, state: dict[str, Any]) -> list[str]:
    """What is wrong with the table in this state."""
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
    if int(rows.min()) < 0:
        yield "a row's number is negative"
    if np.unique(rows).size != rows.size:
        yield "a row stands in the table twice"
    declared = view.config()["declared"]
    if declared and declared[0] >= 0 and int(rows.max()) >= declared[0]:
        yield f"row {int(rows.max())} is past the declared {declared[0]} rows"


def _problems_of_counts(counts: IndexArray, gradients: int) -> Iterator[str]:
    if counts.size and (int(counts.min()) < 1 or int(counts.max()) > gradients):
        yield f"a row's count is not between 1 and the round's {gradients} gradients"


def _lost_rows(view: _core.View, state: dict[str, Any], rows: IndexArray) -> int:
    """How many rows a search of the index would not find."""
    number = state["index_buckets"]
    if not rows.size:
        return 0
    if not number:
        return int(rows.size)
    raw = view.read(_INDEX_REGION + state["index"], 0, number * _core.BUCKET_BYTES)
    buckets = np.frombuffer(raw, dtype=_BUCKET)
    current = buckets["stamp"] == state["index_stamp"]
    taken = (buckets["tags"] != 0) & current[:, np.newaxis]
    at, place = np.nonzero(taken)
    slots = buckets["slots"][at, place]
    # Beyond the rows in use: what an undone apply left behind.
    in_use = slots < rows.size
    at, place, slots = at[in_use], place[in_use], slots[in_use]
    hashes = _hash(rows[slots])
    tags = np.maximum(hashes >> np.uint64(48), np.uint64(1))
    home = ((hashes & np.uint64(0xFFFFFFFF)) * np.uint64(number)) >> np.uint64(32)
    # A search walks from the home bucket on for as long as buckets are full.
    distance = (at - home.astype(np.int64)) % number
    full = (taken[:, _PLACES - 1]).astype(np.int64)
    before = np.concatenate(([0], np.cumsum(np.concatenate((full, full)))))
    start = home.astype(np.int64)
    reached = before[start + distance] - before[start] == distance
    found = reached & (buckets["tags"][at, place] == tags)
    return int(rows.size - np.unique(slots[found]).size)


def _hash(rows: IndexArray) -> _Words:
    words = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return words ^ (words >> np.uint64(32))
