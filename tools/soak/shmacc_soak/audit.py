"""The audit: compares the accounts of each gradient with the library's counters.

The two are independent. The accounts record what the processes saw, gradient by gradient. The
counters are what the library reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_soak.books import Count, Fate

if TYPE_CHECKING:
    from shmacc import Stats
    from shmacc_soak.books import Books, Findings
    from shmacc_soak.members import Numbers


def audit(books: Books, stats: Stats) -> Findings:
    """Audit a campaign whose processes have ended and whose last gradients are taken and noted."""
    entries = max(_end(books.fate), _end(books.taken_at))
    fate, step = books.fate[:entries], books.taken_at[:entries].astype(np.int64) - 1
    since, until = books.since[:entries], books.until[:entries]
    # A taker writes `logged` last. If it was killed before that, its other notes do not count.
    seen = (step >= 0) & (books.logged[step] > 0)
    accepted, refused = fate == Fate.ACCEPTED, fate == Fate.REFUSED
    unanswered = (fate == Fate.BEGUN) | (fate == Fate.IN_DOUBT)

    # Only takes advance the step, so each step below the present one was closed by one take.
    logged = books.logged[: stats.global_step].astype(np.int64)
    died = np.flatnonzero(logged == 0)

    # An accepted gradient that nobody noted must be in a take that died with its taker.
    missing = np.flatnonzero(accepted & ~seen)
    first = np.searchsorted(died, since[missing])
    may_have_died = first < len(died)
    may_have_died[may_have_died] = died[first[may_have_died]] <= until[missing[may_have_died]]
    # Gradients of a round that was not consumed must be in the take that closed the step.
    members = np.bincount(step[seen], minlength=stats.global_step)
    noted = np.where(logged > 0, logged - 1, members[: stats.global_step])
    gone = np.maximum(members[: stats.global_step] - noted, 0)

    # A gradient's round must lie between the steps that its worker saw.
    misplaced = seen & (
        (step < since)
        | (step > until)
        | (step >= stats.global_step)
        | refused
        | (fate == Fate.TIMED_OUT)
        | (fate == Fate.NONE)
    )

    # Now the counters. All accepted gradients that no restore has discarded must have been taken.
    applied = stats.applied - stats.discarded
    # Takes that died with their takers had `unseen` gradients: the accepted ones that nobody noted,
    # and some of the unanswered ones.
    unseen = stats.taken - int(np.sum(np.maximum(logged - 1, 0)))
    unanswered_unseen = _number(unanswered & ~seen)
    # `dropped` counts each apply that returned False, and some of those that never returned.
    answered_no = _number(refused | (fate == Fate.IN_DOUBT))
    attempts = int(books.attempts[:entries].sum(dtype=np.int64))
    cut_short = attempts - _number(fate > Fate.BEGUN)
    checks = [
        stats.takes == stats.global_step,
        stats.num_accumulated == 0,
        applied == stats.taken,
        len(missing) <= unseen <= len(missing) + unanswered_unseen,
        len(died) <= books.risked,
        applied == _number(seen) + unseen,
        0 <= stats.dropped - answered_no <= cut_short,
        # No gradient that was noted under a take is noted under another one now.
        not np.any(members[: stats.global_step] < noted),
    ]
    # A taker that was killed may have been told of deaths and failures that it did not note.
    dead, failures = books.surely_gone, books.sum(Count.WORKERS_FAILED)
    told_dead, told_failed = books.sum(Count.TOLD_DEAD), books.sum(Count.TOLD_FAILED)
    told_all = told_dead >= dead and told_failed >= failures - books.failing
    told_right = (
        told_dead <= dead + books.perhaps_gone
        and told_failed <= failures
        and (told_all or books.unheard > 0)
    )
    for what, number in {
        Count.ACCEPTED: _number(accepted),
        Count.REFUSED: _number(refused),
        Count.AGAIN: attempts - _number(fate),
        Count.UNANSWERED: _number(unanswered & seen),
        Count.TAKES: stats.takes,
        Count.TAKES_LOST: len(died),
        Count.LOST: _number(~may_have_died) + int(gone.sum()),
        Count.MISPLACED: _number(misplaced),
        Count.MISCOUNTED: checks.count(False),
        Count.MISTOLD: not told_right,
    }.items():
        books.add(books.own, what, number)
    return books.findings()


def _number(which: Any) -> int:
    return int(np.count_nonzero(which))


def _end(entries: Numbers) -> int:
    """Return the index after the last entry that is not 0."""
    return int(np.max(np.flatnonzero(entries), initial=-1)) + 1
