"""The rows of a table, compared with the index that leads to them."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._layout import layout
from shmacc._layout.reports import TableById, TableState
from shmacc._records.array_types import IndexArray
from shmacc.errors import DataLossError

_PIECE = 2**12  # slots that are read at once


def problems(view: _core.SegmentView, before: TableState) -> list[str] | None:
    """Return the problems of a sparse table; None if a round ended meanwhile.

    Gradients may arrive meanwhile. Within a round a row keeps its slot and its number, and its
    entry in the index keeps its position until the index is rebuilt; so the rows that were there
    before can be compared with an index that is read later.
    """
    rows, counts = read_slots(view, before["rows"])
    least, most = counts.min(initial=1), counts.max(initial=1)
    del counts  # rows may be many
    lost = np.count_nonzero(~_found(view, before, rows.size))
    after = view.state()
    if _round(before) != _round(after):
        return None
    found = list(_problems_of_rows(view, rows))
    # An apply that has not committed changes counts in place.
    possible = after["member_weight"]
    if least < 1 or (rows.size and most > possible and not after["in_operation"]):
        found.append(f"a row's count is not between 1 and its gradients' weight, {possible}")
    if lost:
        found.append(f"{lost} of {rows.size} rows cannot be found through the index")
    return found


def problems_by_id(
    view: _core.SegmentView, before: TableState, by_id: TableById
) -> list[str] | None:
    """Return the problems of a table of parameters; None: an update ended meanwhile.

    A slot is in use if it was given to its id by a generation that is committed. An update that
    runs, or was left by a dead process, may have freed slots that count as used until its commit.
    """
    ids, stamps = read_slots(view, by_id["slots"])
    is_found = _found(view, before, ids.size)
    after = view.state()
    if after["generation"] != before["generation"]:
        return None
    generation = by_id["generation"]
    in_use = (stamps > 0) & (stamps % 2 == 0) & (stamps >> 1 <= generation)
    # Slots freed by an update that has not committed.
    freed = stamps == (generation + 1 << 1 | 1)
    found = list(_problems_of_rows(view, ids[in_use]))
    least, most = np.count_nonzero(in_use), np.count_nonzero(in_use | freed)
    if not least <= by_id["rows"] <= most or (least != most and not after["in_operation"]):
        found.append(f"it has {by_id['rows']} rows, but {least} of its slots are in use")
    lost = np.count_nonzero(in_use & ~is_found)
    if lost:
        found.append(f"{lost} of {by_id['rows']} rows cannot be found through the index")
    return found


def read_slots(view: _core.SegmentView, count: int) -> tuple[IndexArray, IndexArray]:
    """Return the rows in the first `count` slots, and the contributions or stamp of each."""
    if count * layout.SLOT_BYTES > view.allocated_bytes:
        raise DataLossError("The segment is damaged: it claims more rows than it occupies bytes")
    rows, others = np.empty(count, np.int64), np.empty(count, np.int64)
    for first in range(0, count, _PIECE):
        size = min(_PIECE, count - first) * layout.SLOT_BYTES
        raw = view.read(layout.REGIONS["slots"], first * layout.SLOT_BYTES, size)
        pairs = np.frombuffer(raw, np.int64).reshape(-1, 2)
        rows[first : first + _PIECE], others[first : first + _PIECE] = pairs[:, 0], pairs[:, 1]
    return rows, others


def _round(state: TableState) -> tuple[int, ...]:
    """Return what stays as it is until the round ends or its index is rebuilt."""
    ended = state["counters"]["takes"], state["counters"]["discarded"]
    return (*ended, state["index"], state["index_buckets"], state["index_stamp"])


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


def _found(view: _core.SegmentView, state: TableState, slots: int) -> npt.NDArray[np.bool_]:
    """Return for each slot whether a search of the index finds its row there."""
    of_index = state["index"], state["index_buckets"], state["index_stamp"]
    return np.frombuffer(view.found(slots, *of_index), np.bool_)
