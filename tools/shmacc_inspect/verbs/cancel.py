"""`cancel`: end the waiting takes."""

from __future__ import annotations

import time
from typing import Final

from shmacc_inspect import formatting, options, page
from shmacc_inspect.page import Cell

EPILOG: Final = """\b
Examples:
  shmacc-inspect cancel embeddings              which takes would be cancelled
  shmacc-inspect cancel embeddings --yes"""


def run(name: options.Name, *, yes: options.Yes = False, json: options.Json = False) -> None:
    """End every waiting take with CancelledError; without --yes, only list them.

    Nothing is consumed: the gradients stay for the next take. It needs no lock, so it also works
    while the process that holds the lock is stopped.
    """
    from shmacc import inspection  # late: see the package
    from shmacc_inspect import naming
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.details import Taker
    from shmacc_inspect.output.removals import Cancelling

    system_name = naming.find(name).name.system_name
    seen, now = inspection.describe(system_name), time.time()
    line = [Taker.of(take, now) for take in seen.line]
    waiting = inspection.cancel(system_name, rehearse=not yes)
    cancelled = waiting if yes else 0
    answer = Cancelling(dry_run=not yes, name=system_name, line=line, cancelled=cancelled)
    if json:
        print(to_json(answer))
        return
    verb = "cancelled" if yes else "would cancel"
    page.show(
        Cell(
            f"{verb} the take of pid {formatting.pid(taker.pid, is_here=taker.pid_is_here)} "
            f"for {taker.num_required} gradients, "
            f"which has waited for {formatting.duration(taker.waiting_seconds)}"
        )
        for taker in line
        if taker.alive
    )
    if yes:
        page.write_line(f"{formatting.count_of(cancelled, 'take')} cancelled")
    elif any(taker.alive for taker in line):
        page.write_line("nothing was cancelled; --yes cancels them")
    else:
        page.write_line("nobody waits")
