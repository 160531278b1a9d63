"""Reads much from a segment that others write to, without its lock.

Bytes are copied out; the copy is consistent only if the committed state was the same before and
after, and no operation went on meanwhile. An operation that stands still (its process is stopped)
does not matter: what it has changed in place is in the undo log (commit.hpp), so the reader can
tell what was committed.
"""

import time
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from shmacc import _core
from shmacc._layout.reports import MemberConfig, TableConfig, TableState

_T = TypeVar("_T")
_ATTEMPTS = 8
_PAUSE = 0.002  # seconds; an apply takes less
_MARKS: tuple[Literal["generation", "in_operation", "undo_records"], ...] = (
    "generation",
    "in_operation",
    "undo_records",
)


def look_still(view: _core.SegmentView, look: Callable[[TableState], _T]) -> tuple[_T, bool]:
    """Return the result of `look`, repeated a few times if the segment changed meanwhile.

    Args:
        view: The segment.
        look: Called with the committed state.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        before = view.state()
        seen = look(before)
        after = view.state()
        still = all(before[mark] == after[mark] for mark in _MARKS)
        if still or attempt == _ATTEMPTS:
            return seen, still
        time.sleep(_PAUSE)
    raise AssertionError  # pragma: no cover  the loop returns


def tables(
    view: _core.SegmentView, config: TableConfig
) -> Iterator[tuple[_core.SegmentView, MemberConfig]]:
    """Yield a view of each table that the open round has, with its member's configuration."""
    members = config["members"]
    for table in view.tables():
        there = table["member_count"] or table["by_id"] is not None
        if table["member"] < len(members) and there:  # not the contributors
            yield view.table(table["lane"], table["member"]), members[table["member"]]
