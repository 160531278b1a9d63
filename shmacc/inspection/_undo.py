"""Reads the undo log: what an uncommitted operation has changed in place, as it was before.

This repeats the end of lane.hpp (`put_back`) for readers: an apply saves rows and their
contributions before it adds to them (a restore their numbers, too, before it overwrites them), and
counts the complete records. Nothing is changed here.
"""

import struct
from dataclasses import dataclass

import numpy as np

from shmacc import _core
from shmacc._layout import layout
from shmacc._layout.reports import TableState
from shmacc._records.array_types import IndexArray
from shmacc.errors import DataLossError

_ALIGNED = 16  # bytes
_RECORD = struct.Struct("<IHH")  # first slot, how many, the member and _NUMBERS
_NUMBERS = 1 << 15  # the numbers of rows are saved, instead of their sums and contributions


@dataclass(frozen=True, slots=True)
class Undo:
    """Saved rows of one member, in the order in which they were saved.

    Attributes:
        slots: The slot of each row.
        contributions: The committed contributions of each row.
        overwritten: Slots of rows whose numbers were saved.
        numbers: The saved numbers.
        start: Where the member's saved rows begin in the undo rows, in bytes.
    """

    slots: IndexArray
    contributions: IndexArray
    overwritten: IndexArray
    numbers: IndexArray
    start: int = 0


def read_undo(view: _core.SegmentView, state: TableState) -> Undo:
    """Return the undo log of the operation that runs, or was interrupted; empty if there is none.

    Raises:
        DataLossError: The undo log is damaged.
    """
    nothing = np.empty(0, np.int64)
    if not state["undo_records"]:
        return Undo(nothing, nothing, nothing, nothing)
    region = layout.REGIONS["undo log"]
    log = view.read(region, 0, state["reserved"][region])
    slots, contributions, overwritten, rows = [nothing], [nothing], [nothing], [nothing]
    row_bytes = state["row_bytes"]
    at, end, start, before = 0, 0, 0, None
    for _ in range(state["undo_records"]):
        if at + _RECORD.size > len(log):
            raise DataLossError("The segment is damaged: its undo log is too long")
        first, count, member = _RECORD.unpack_from(log, at)
        numbers, member = member & _NUMBERS, member & ~_NUMBERS
        at += _RECORD.size
        if member >= len(row_bytes) or at + 8 * count > len(log):
            raise DataLossError("The segment is damaged: an undo record is out of range")
        if member != before:  # each member's first row is aligned
            end, before = -(-end // _ALIGNED) * _ALIGNED, member
            start = end if member == state["member"] else start
        end += 0 if numbers else count * row_bytes[member]
        if member == state["member"]:
            if first + count > state["rows"]:
                raise DataLossError("The segment is damaged: an undo record is out of range")
            (overwritten if numbers else slots).append(np.arange(first, first + count))
            (rows if numbers else contributions).append(np.frombuffer(log, np.int64, count, at))
        at += 8 * count
    return Undo(
        np.concatenate(slots),
        np.concatenate(contributions),
        np.concatenate(overwritten),
        np.concatenate(rows),
        start,
    )
