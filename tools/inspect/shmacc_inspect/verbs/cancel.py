"""`cancel`: end the waiting takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shmacc_inspect import formatting, interrupts, options, page
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from shmacc.inspection import SegmentName, Summary
    from shmacc_inspect.output import Cancelling

DESCRIPTION: Final = """\
End every waiting take with CancelledError; without --yes, only list them.

Nothing is consumed: the gradients stay for the next take. It needs no lock, so it also works
while the process that holds the lock is stopped: a take that waits for that lock, and so has no
entry in the queue yet, is cancelled too."""
EXAMPLES: Final = """\
Examples:
  shmacc-inspect cancel embeddings              which takes would be cancelled
  shmacc-inspect cancel embeddings --yes
  shmacc-inspect cancel 'job7.*' --yes"""

_WAITS_FOR_LOCK: Final = "waits for the lock"


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_names(parser)
    options.add_yes(parser)
    options.add_namespace(parser)
    options.add_json(parser)


def run(*, names: list[str], yes: bool, everywhere: bool, json: bool) -> None:
    """Run the verb."""
    from shmacc.errors import NotFoundError  # late: see the package
    from shmacc_inspect import naming
    from shmacc_inspect.output import to_json

    named = naming.exact(names)
    for summary in naming.select_fit(names, everywhere=everywhere, unfit=_unfit):
        try:
            answer = _cancel(summary.name, yes=yes)
        except NotFoundError:
            if summary.name.system_name in named:
                raise
            continue  # a glob found it, and it is gone
        if json:
            print(to_json(answer))
            continue
        page.show(_lines(answer))
        page.write_line(_verdict(answer))


def _unfit(summary: Summary) -> str:
    """Return why a segment has no takes; empty: it may have."""
    none = {"arrays": "shared arrays", "parameters": "parameters"}.get(summary.kind or "")
    return f"nobody takes from {none}" if none else ""


def _cancel(name: SegmentName, *, yes: bool) -> Cancelling:
    from shmacc import inspection  # late: see the package
    from shmacc_inspect.output import Cancelling

    seen = inspection.describe(name.system_name)
    cancel = inspection.cancel  # which is imported here
    with interrupts.raised():  # it attaches for a moment, and is to leave in order
        waiting = cancel(name.system_name, rehearse=not yes)
    return Cancelling(
        dry_run=not yes,
        name=name.system_name,
        line=seen.line,
        lock_waiters=[
            process
            for process in seen.processes
            if process.alive and process.activity == _WAITS_FOR_LOCK
        ],
        cancelled=waiting if yes else 0,
    )


def _lines(answer: Cancelling) -> Iterator[Cell]:
    verb = "would cancel" if answer.dry_run else "cancelled"
    for take in answer.line:
        if take.alive:
            waited = formatting.duration(time.time() - take.since)
            yield Cell(
                f"{verb} the take of pid {take.pid_label} for {take.num_required} gradients, "
                f"which has waited for {waited}"
            )
    for process in answer.lock_waiters:
        yield Cell(f"{verb} what pid {process.pid_label} waits for the lock for, if that is a take")


def _verdict(answer: Cancelling) -> str:
    if not answer.dry_run:
        return f"{formatting.count_of(answer.cancelled, 'take')} in the queue cancelled"
    if answer.lock_waiters or any(take.alive for take in answer.line):
        return "nothing was cancelled; --yes cancels them"
    return "no take waits"
