"""`wait`: until something has come about."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from shmacc_inspect import failures, formatting, options, page

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc.inspection import SegmentName, Summary

DESCRIPTION: Final = """\
Wait for a step, for gradients, or for the end of a segment.

Returns as soon as it has come about for all of them: exit status 0. It is 124 if that takes longer
than --timeout, and 3 if one is not there or goes away meanwhile. Attaches to nothing and delays
nobody: it looks many times a second."""
EXAMPLES: Final = """\
Examples:
  shmacc-inspect wait embeddings --for step=1000 --timeout 2h && cp -r checkpoints /archive
  shmacc-inspect wait embeddings --for count=8
  shmacc-inspect wait 'job7.*' --for gone --timeout 10m || page-somebody"""

_SHORTEST_PAUSE: Final = 0.005  # seconds
_LONGEST_PAUSE: Final = 0.1
_SLOWER: Final = 1.2
_UNREADABLE: Final = -1  # no segment's token

Condition = tuple[str, int]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_names(parser)
    parser.add_argument(
        "--for",
        dest="condition",
        metavar="CONDITION",
        type=_condition,
        required=True,
        help="step=N: the step is at least N; count=N: at least N gradients are accumulated; "
        "gone: nothing has the name any more, or another segment has it",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=options.seconds(),
        help="for so long at most: 90s, 10m, 2h",
    )
    options.add_namespace(parser)
    options.add_json(parser)


def run(
    *,
    names: list[str],
    condition: Condition,
    timeout: float | None,
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    from shmacc_inspect.output import Waiting, to_json  # late: see the package

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


def _condition(text: str) -> Condition:
    what, equals, number = text.partition("=")
    if text == "gone":
        return what, 0
    if what in {"step", "count"} and equals:
        return what, options.count(0)(number)
    raise argparse.ArgumentTypeError(f"{text!r} is none of step=N, count=N and gone")


def _wanted(given: list[str], condition: Condition, *, everywhere: bool) -> list[SegmentName]:
    from shmacc_inspect import naming

    if condition[0] == "gone":  # so is what was never there
        return naming.select_present(given, everywhere=everywhere)
    fit = naming.select_fit(given, everywhere=everywhere, unfit=_unfit)
    return [summary.name for summary in fit]


def _unfit(summary: Summary) -> str:
    """Return why a segment is not waited for; empty: it may be."""
    none = {"arrays": "shared arrays", "parameters": "parameters"}.get(summary.kind or "")
    return f"{none} are not waited for: they have no rounds" if none else ""


def _wait(waits: list[Callable[[], bool]], deadline: float | None) -> int:
    """Return how many have not been reached by the deadline."""
    pause = _SHORTEST_PAUSE
    while waits := [reached for reached in waits if not reached()]:
        left = _LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(pause * _SLOWER, _LONGEST_PAUSE)
    return len(waits)


def _reached(name: SegmentName, condition: Condition) -> Callable[[], bool]:
    """Return what tells whether the condition holds for that segment."""
    from shmacc import inspection
    from shmacc.errors import NotFoundError, ShmaccError

    what, number = condition

    def tokens() -> set[int]:
        """Those that may be the segment's: none if it is gone, all if it cannot be read."""
        try:
            return {inspection.describe(name.system_name).token}
        except NotFoundError:
            return set()
        except ShmaccError:
            return first

    def is_gone() -> bool:
        now = tokens()
        return not now or now.isdisjoint(first)

    def has_come_so_far() -> bool:
        seen = inspection.describe(name.system_name)
        stats = seen.stats
        return (stats.global_step if what == "step" else stats.num_accumulated) >= number

    if what != "gone":
        return has_come_so_far
    first: set[int] = {_UNREADABLE}
    first = tokens()
    return is_gone
