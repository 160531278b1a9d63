"""`wait`: wait for a step, for gradients, or for the end of a segment."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import NotFoundError, ShmaccError
from shmacc_inspect import failures, formatting, naming, page
from shmacc_inspect.output import Waiting, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc.inspection import SegmentName, Summary
    from shmacc_inspect.arguments import Condition

_SHORTEST_PAUSE: Final = 0.005  # seconds
_LONGEST_PAUSE: Final = 0.1
_SLOWER: Final = 1.2
_UNREADABLE: Final = -1  # returned in place of a token


def run(
    *, names: list[str], condition: Condition, timeout: float | None, everywhere: bool, json: bool
) -> None:
    """Run the verb."""
    began = time.monotonic()
    waits = [_reached(name, condition) for name in _wanted(names, condition, everywhere=everywhere)]
    missing = _wait(waits, None if timeout is None else began + timeout)
    waited = time.monotonic() - began
    if json:
        print(to_json(Waiting(reached=not missing, waited_seconds=waited)))
    if missing:
        kept = formatting.count_of(missing, "segment")
        page.write_line(f"timed out after {formatting.duration(waited)}: not so for {kept}")
        failures.end(failures.TIMED_OUT)


def _wanted(given: list[str], condition: Condition, *, everywhere: bool) -> list[SegmentName]:
    if condition[0] == "gone":  # a name that was never there is gone, too
        return naming.select(given, everywhere=everywhere, missing_ok=True)
    unfit = partial(_unfit, condition=condition)
    fit = naming.select_fit(given, everywhere=everywhere, unfit=unfit)
    return [summary.name for summary in fit]


def _unfit(summary: Summary, *, condition: Condition) -> str:
    """Return why a segment can never meet the condition; empty: it can."""
    what, _ = condition
    if what == "step" and summary.kind == "arrays":
        return f"{naming.in_words(summary)} have no step to wait for"
    if what == "count" and summary.is_arrays:
        return f"{naming.in_words(summary)} have no gradients to wait for"
    return ""


def _wait(waits: list[Callable[[], bool]], deadline: float | None) -> int:
    """Wait until all conditions hold; return how many of them do not hold at the deadline."""
    pause = _SHORTEST_PAUSE
    while waits := [reached for reached in waits if not reached()]:
        left = _LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(pause * _SLOWER, _LONGEST_PAUSE)
    return len(waits)


def _reached(name: SegmentName, condition: Condition) -> Callable[[], bool]:
    """Return a function that tells whether the condition holds for that segment."""
    what, number = condition

    def has_come_so_far() -> bool:
        stats = inspection.describe(name.system_name).stats
        return (stats.global_step if what == "step" else stats.num_accumulated) >= number

    if what != "gone":
        return has_come_so_far
    first = _token(name)
    return lambda: first is None or _token(name) not in {first, _UNREADABLE}


def _token(name: SegmentName) -> int | None:
    """Return the segment's token; None: it is gone."""
    try:
        return inspection.describe(name.system_name).token
    except NotFoundError:
        return None
    except ShmaccError:
        return _UNREADABLE
