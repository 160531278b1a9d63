"""What an operation that has not committed changed in place, as it was before it.

This repeats the end of lane.hpp (`put_back`) for readers: an apply saves rows and their
contributions before it adds to them, and counts the complete records. Nothing is changed here.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmacc import _core
from shmacc import _layout as layout
from shmacc._records import IndexArray
from shmacc.errors import DataLossError

_ALIGNED = 16  # bytes
_RECORD = struct.Struct("<IHH")  # first slot, how many, the member


@dataclass(frozen=True, slots=True)
class Undo:
    """Saved rows of one member, in the order in which they were saved.

    Attributes:
        slots: Of each row.
        contributions: Of each row, as committed.
        start: Where the member's saved rows begin in the undo rows, in bytes.
    """

    slots: IndexArray
    contributions: IndexArray
    start: int = 0


def read_undo(view: _core.View, state: dict[str, Any]) -> Undo:
    """Return the undo log of the operation that runs, or was interrupted; empty if there is none.

    Raises:
        DataLossError: It is damaged.
    """
    if not state["undo_records"]:
        nothing = np.empty(0, np.int64)
        return Undo(nothing, nothing)
    region = layout.REGIONS["undo log"]
    log = view.read(region, 0, state["reserved"][region])
    slots, contributions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    row_bytes = state["row_bytes"]
    at, end, start, before = 0, 0, 0, None
    for _ in range(state["undo_records"]):
        if at + _RECORD.size > len(log):
            raise DataLossError("The segment is damaged: its undo log is too long")
        first, count, member = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        if member >= len(row_bytes) or at + 8 * count > len(log):
            raise DataLossError("The segment is damaged: an undo record is out of range")
        if member != before:  # each member's first row is aligned
            end, before = -(-end // _ALIGNED) * _ALIGNED, member
            start = end if member == state["member"] else start
        end += count * row_bytes[member]
        if member == state["member"]:
            if first + count > state["rows"]:
                raise DataLossError("The segment is damaged: an undo record is out of range")
            slots.append(np.arange(first, first + count, dtype=np.int64))
            contributions.append(np.frombuffer(log, np.int64, count, at))
        at += 8 * count
    return Undo(np.concatenate(slots), np.concatenate(contributions), start)
