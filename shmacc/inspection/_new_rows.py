"""Compares the rows of a round with the tables of parameters that its update would extend."""

import contextlib
import struct
from collections.abc import Iterator

from shmacc import _core
from shmacc._base import layout
from shmacc._base.names import SegmentName
from shmacc.errors import ShmaccError
from shmacc.inspection._description import Description
from shmacc.inspection._listing import open_view, tables

_PLACE = struct.Struct("=qq")  # rows.hpp: a row, and a count or stamp
_FREE = 1  # the bit of a table's stamp that marks a free place


def too_many_rows(group: Description, parameters: Description) -> Iterator[str]:
    """Yield what to do about each table that the open round would extend past its `max_rows`."""
    rounds = {member.name: member for member in group.members}
    for table in parameters.members:
        there = rounds.get(table.name)
        if table.max_rows is None or there is None or table.rows + there.rows <= table.max_rows:
            continue
        with contextlib.suppress(ShmaccError):  # it is gone
            old = _rows(parameters.summary.name, table.name)
            new = _rows(group.summary.name, table.name) - old
            if len(old) + len(new) > table.max_rows:
                yield (
                    f"its round adds {len(new)} rows to table {table.name!r}, which has {len(old)} "
                    f"of its max_rows, {table.max_rows}, and so refuses it: let the program remove "
                    "rows in this update (remove=, forget=), or leave the table out of it "
                    "(taken.without)"
                )


def _rows(name: SegmentName, member: str) -> set[int]:
    with open_view(name) as view:
        found = set()
        for table, config in tables(view, view.config()):
            if config["name"] == member:
                found |= _of_table(table)
        return found


def _of_table(table: _core.SegmentView) -> set[int]:
    state = table.state()
    by_id = state["by_id"]
    if by_id is None:
        return {row for row, _ in _PLACE.iter_unpack(table.places(state["undo_records"]))}
    size = by_id["slots"] * layout.ROW_PLACE_BYTES
    places = _PLACE.iter_unpack(table.read(layout.REGIONS["slots"], 0, size))
    return {row for row, stamp in places if not stamp & _FREE}
