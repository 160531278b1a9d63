"""The audit: the accounts of each gradient, compared with the library's counters of all.

The two are independent. The accounts record what the processes saw, gradient by gradient; the
counters what the library reports.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from shmacc_soak.books import Doing, Fate, Tally

if TYPE_CHECKING:
    from shmacc import Stats
    from shmacc_soak.books import Books
    from shmacc_soak.gradients import Numbers


@dataclass
class Toll:
    """What was done to the processes.

    Attributes:
        kills: Processes killed; of these,
        in_applies: those in an apply,
        in_blocks: those in the block of a round,
        risked: takers that had not noted what they might have got.
        surely_gone: workers that had applied,
        perhaps_gone: workers that may have applied,
        unheard: takers that might have been told who is gone.
        stops: Processes stopped for a while.
        failed: Processes that ended with an error, or did not end.
    """

    kills: int = 0
    in_applies: int = 0
    in_blocks: int = 0
    risked: int = 0
    surely_gone: int = 0
    perhaps_gone: int = 0
    unheard: int = 0
    stops: int = 0
    failed: int = 0


FAULTS: Final = {
    "torn": "gradients in some of their members only, and members or parameters with other sums",
    "lost": "accepted gradients that are nowhere",
    "doubled": "gradients that were taken more than once",
    "repeated": "contributors that were in a round twice",
    "misplaced": "gradients in a round they cannot belong to, or that were refused and are there",
    "updated twice": "rounds in the parameters twice, or skipped and in them",
    "not updated": "rounds that are not in the parameters",
    "miscounted": "counters of the library that disagree with the books",
    "mistold": "campaigns in which more deaths and failures were told than there were, or fewer",
    "failed": "processes that ended with an error, or did not end",
}
"""All these must be 0."""


@dataclass(frozen=True)
class Findings:
    """What a campaign came to.

    Attributes:
        counts: By what was counted: the faults, and what was done.
        longest: The longest waits of living processes, in seconds, by what they waited for.
    """

    counts: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        """Return the number of all faults."""
        return sum(self.counts[fault] for fault in FAULTS)

    def __add__(self, other: Findings) -> Findings:
        """Return those of two campaigns."""
        counts, longest = self.counts.copy(), dict(self.longest)
        counts.update(other.counts)
        for what, seconds in other.longest.items():
            longest[what] = max(seconds, longest.get(what, 0.0))
        return Findings(counts, longest)


def audit(books: Books, stats: Stats, toll: Toll) -> Findings:
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
    lost = int(np.count_nonzero(~may_have_died)) + int(gone.sum())

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
    unanswered_unseen = int(np.count_nonzero(unanswered & ~seen))
    # Each apply that returned False is counted, and some of those that never returned.
    answered_no = int(np.count_nonzero(refused | (fate == Fate.IN_DOUBT)))
    attempts = int(books.attempts[:entries].sum(dtype=np.int64))
    cut_short = attempts - int(np.count_nonzero(fate > Fate.BEGUN))
    checks = [
        stats.takes == stats.global_step,
        stats.num_accumulated == 0,
        applied == stats.taken,
        len(missing) <= unseen <= len(missing) + unanswered_unseen,
        len(died) <= toll.risked,
        applied == int(np.count_nonzero(seen)) + unseen,
        0 <= stats.dropped - answered_no <= cut_short,
        # No gradient that was noted under a take is noted under another one now.
        not np.any(members[: stats.global_step] < noted),
    ]
    tally = {what: int(books.tally[what].sum()) for what in Tally}
    # What was told to a taker that was killed before it could note it, nobody knows.
    dead, failures = toll.surely_gone, tally[Tally.FAILED]
    told_all = tally[Tally.TOLD_DEAD] >= dead and tally[Tally.TOLD_FAILED] >= failures
    told_right = (
        tally[Tally.TOLD_DEAD] <= dead + toll.perhaps_gone
        and tally[Tally.TOLD_FAILED] <= failures
        and (told_all or toll.unheard > 0)
    )
    counts = {
        "processes killed": toll.kills,
        "  in an apply": toll.in_applies,
        "  in the block of a round": toll.in_blocks,
        "processes stopped for a while": toll.stops,
        "gradients accepted": int(np.count_nonzero(accepted)),
        "gradients refused as stale": int(np.count_nonzero(refused)),
        "contributors applied again": attempts - int(np.count_nonzero(fate)),
        "gradients in whose worker never learned it": int(np.count_nonzero(unanswered & seen)),
        "takes and rounds": stats.takes,
        "  that died with their taker": len(died),
        "rounds given up": tally[Tally.GIVEN_UP],
        "snapshots looked at": tally[Tally.SNAPSHOTS],
        "states restored": tally[Tally.RESTORES],
        "deaths of workers that were told": tally[Tally.TOLD_DEAD],
        "failures of workers that were told": tally[Tally.TOLD_FAILED],
        "torn": tally[Tally.TORN],
        "lost": lost,
        "doubled": tally[Tally.DOUBLED],
        "repeated": tally[Tally.REPEATED],
        "misplaced": int(np.count_nonzero(misplaced)),
        "miscounted": tally[Tally.MISREPORTED] + checks.count(False),
        "mistold": tally[Tally.MISTOLD] + (not told_right),
        "failed": toll.failed,
    }
    longest = {
        f"to {doing.name.lower()}": float(books.longest[doing].max())
        for doing in Doing
        if doing is not Doing.NOTHING
    }
    return Findings(Counter(counts), longest)


def _end(entries: Numbers) -> int:
    """Past the last one that is not 0."""
    return int(np.max(np.flatnonzero(entries), initial=-1)) + 1
