"""Reads much from a segment that others write to, without its lock.

Bytes are copied out; the copy is consistent only if the committed state was the same before and
after, and no operation ran.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from shmacc import _core

_T = TypeVar("_T")
_ATTEMPTS = 8
_PAUSE = 0.002  # seconds; an apply takes less


def look_still(
    view: _core.View, look: Callable[[dict[str, Any]], _T], *, commits_only: bool = False
) -> tuple[_T, bool]:
    """Return the result of `look`, repeated a few times if the segment changed meanwhile.

    Args:
        view: The segment.
        look: Called with the committed state.
        commits_only: Whether an operation that has not committed (and may never do so, if its
            process is stopped) does not affect the result.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        before = view.state()
        seen = look(before)
        after = view.state()
        still = after["generation"] == before["generation"] and (
            commits_only or not (before["in_operation"] or after["in_operation"])
        )
        if still or attempt == _ATTEMPTS:
            return seen, still
        time.sleep(_PAUSE)
    raise AssertionError  # pragma: no cover  the loop returns
