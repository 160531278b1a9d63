"""The audit: the accounts of each gradient, compared with the library's counters of all.

The two are independent. The accounts record what the processes saw, gradient by gradient; the
counters what the library reports.
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
    """Reckon up, when all processes are gone and what was left has been taken and noted."""
    entries = max(_end(books.fate), _end(books.taken_at))
    fate, step = books.fate[:entries], books.taken_at[:entries].astype(np.int64) - 1
    since, until = books.since[:entries], books.until[:entries]
    # A taker enters its take last: what one noted that was killed before it is as good as unseen.
    seen = (step >= 0) & (books.logged[step] > 0)
    accepted, refused = fate == Fate.ACCEPTED, fate == Fate.REFUSED
    unanswered = (fate == Fate.BEGUN) | (fate == Fate.IN_DOUBT)

    # Steps are counted by takes alone, so each step below the present one was closed by one take.
    logged = books.logged[: stats.global_step].astype(np.int64)
    died = np.flatnonzero(logged == 0)

    # An accepted gradient that nobody noted must be in a take that died with its taker.
    missing = np.flatnonzero(accepted & ~seen)
    first = np.searchsorted(died, since[missing])
    may_have_died = first < len(died)
    may_have_died[may_have_died] = died[first[may_have_died]] <= until[missing[may_have_died]]
    # What was in a round that was not consumed must be in the take that closed the step.
    members = np.bincount(step[seen], minlength=stats.global_step)
    noted = np.where(logged > 0, logged - 1, members[: stats.global_step])
    gone = np.maximum(members[: stats.global_step] - noted, 0)

    # A round is one of those between the steps that the worker saw.
    misplaced = seen & (
        (step < since)
        | (step > until)
        | (step >= stats.global_step)
        | refused
        | (fate == Fate.TIMED_OUT)
        | (fate == Fate.NONE)
    )

    # Now the counters. What was accepted and neither taken nor replaced (by a restore) is there.
    applied = stats.applied - stats.discarded
    # Those takes that died had so many gradients,
    unseen = stats.taken - int(np.sum(np.maximum(logged - 1, 0)))
    # which are the accepted ones that nobody saw, and some of those cut short.
    unanswered_unseen = _number(unanswered & ~seen)
    # Each apply that returned False is counted, and some of those that never returned.
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
    # What was told to a taker that was killed before it could note it, nobody knows.
    dead, failures = books.surely_gone, books.sum(Count.WORKERS_FAILED)
    told_dead, told_failed = books.sum(Count.TOLD_DEAD), books.sum(Count.TOLD_FAILED)
    told_all = told_dead >= dead and told_failed >= failures
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
    """Past the last one that is not 0."""
    return int(np.max(np.flatnonzero(entries), initial=-1)) + 1
