"""`cancel`: end the waiting takes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import InvalidArgumentError, NotFoundError, ShmaccError
from shmacc_inspect import failures, formatting, interrupts, naming, page
from shmacc_inspect.output import Cancelling, to_json
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc.inspection import Summary

_WAITS_FOR_LOCK: Final = "waits for the lock"


def run(*, names: list[str], yes: bool, everywhere: bool, json: bool) -> None:
    """Run the verb."""
    cancel = partial(_cancel, yes=yes)
    failed = False
    for answer in naming.answers(names, cancel, everywhere=everywhere, unfit=_unfit):
        if isinstance(answer, ShmaccError):
            failures.explain(answer)
            failed = True
        elif json:
            print(to_json(answer))
        else:
            page.show(_lines(answer))
            page.write_line(_verdict(answer))
    if failed:
        failures.end(failures.WRONG_OR_FAILED)


def _unfit(summary: Summary) -> str:
    """Return why takes on this segment are impossible; empty: they are possible."""
    return f"nobody takes from {naming.in_words(summary)}" if summary.is_arrays else ""


def _cancel(summary: Summary, *, yes: bool) -> Cancelling | ShmaccError:
    """Return the answer; return most errors, too, so that the next segments are not skipped."""
    name = summary.name.system_name
    cancel = inspection.cancel  # import it before Ctrl-C can raise
    try:
        seen = inspection.describe(name)
        with interrupts.raised():  # cancelling attaches, and must detach
            waiting = cancel(name, rehearse=not yes)
    except (NotFoundError, InvalidArgumentError):
        raise
    except ShmaccError as error:
        return error
    return Cancelling(
        dry_run=not yes,
        name=name,
        queue=seen.queue,
        lock_waiters=[
            process
            for process in seen.processes
            if process.alive and process.activity == _WAITS_FOR_LOCK
        ],
        cancelled=waiting if yes else 0,
    )


def _lines(answer: Cancelling) -> Iterator[Cell]:
    verb = "would cancel" if answer.dry_run else "cancelled"
    for take in answer.queue:
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
    if answer.lock_waiters or any(take.alive for take in answer.queue):
        return "nothing was cancelled; --yes cancels them"
    return "no take waits"
