"""Yields what `check` notes about the run: failures, a final round, a half-done update or load."""

import time
from collections.abc import Iterator

from shmacc.inspection._description import Description
from shmacc.inspection._findings import LOAD_AGAIN, NOTHING, Finding, note, pids, wrong
from shmacc.inspection._records import FinalRound

_LATELY = 3600.0  # seconds
_SEE_THE_LOG = "see the log of it"
_MAKE_ROOM = "make room, as its error says"
_THEN = "; then start it again if the run goes on"


def loop_notes(subject: str, seen: Description, *, in_run: bool) -> Iterator[Finding]:
    """Yield notes about a segment's training loop; if `in_run`, a run restarts its processes."""
    yield from _failures(subject, seen, "" if in_run else _THEN)
    yield from _final_round(subject, seen)
    yield from _update(subject, seen)
    yield from _load(subject, seen)
    if seen.suspected is not None and not seen.summary.stalls:
        stall = seen.suspected
        yield note(subject, stall.kind, stall.problem, stall.remedy, stall.command)


def _failures(subject: str, seen: Description, then: str) -> Iterator[Finding]:
    """Yield a note for each different exception of the last hour."""
    now = time.time()
    by_reason: dict[str, list[str]] = {}
    for event in seen.events:
        if event.kind == "failed" and now - event.at < _LATELY:
            by_reason.setdefault(event.reason, []).append(event.pid_label)
    for reason, labels in by_reason.items():
        different = list(dict.fromkeys(labels))
        yield note(
            subject,
            "failed",
            f"{pids(different)} {'has' if len(different) == 1 else 'have'} failed: "
            f"{reason or 'why is not known'}",
            (_MAKE_ROOM if reason.startswith("ResourceExhaustedError") else _SEE_THE_LOG) + then,
        )


def _final_round(subject: str, seen: Description) -> Iterator[Finding]:
    final = seen.final_round
    if final is None or final.held:
        return
    yield note(
        subject,
        "final_round_without_holder",
        f"the round of step {seen.summary.global_step} is final, and no process has it open: its "
        f"update, of pid {final.pid}, "
        + ("is in" if final.is_in else "has begun")
        + f" since {time.time() - final.since:.0f} s",
        _mend_first(seen, final) + "the next process that takes gets the same gradients, and makes "
        "the update, or finds it made; if none comes, start the chief",
    )


def _mend_first(seen: Description, final: FinalRound) -> str:
    """Ask for a repair first if the update's process failed: a new process may fail likewise."""
    failed = any(each.kind == "failed" and each.pid == final.pid for each in seen.events)
    return f"mend first what pid {final.pid} failed with: " if failed else NOTHING


def _update(subject: str, seen: Description) -> Iterator[Finding]:
    update = seen.update
    if update is not None and update.is_interrupted and not seen.lock.held:
        yield note(
            subject,
            "update_interrupted",
            f"an update was interrupted by the death of {update.whose}: arrays may be changed in "
            "part",
            NOTHING + "the next update, snapshot or restore puts back what it changed",
        )


def _load(subject: str, seen: Description) -> Iterator[Finding]:
    """Yield a finding if a load was not finished: nothing else leaves parameters sealed."""
    if seen.summary.kind == "parameters" and seen.stats.sealed and seen.round_holder is None:
        yield wrong(
            subject,
            "load_interrupted",
            "the load of a checkpoint into them was interrupted: they take no update",
            LOAD_AGAIN,
        )
