"""The audit: the accounts of each gradient, compared with the library's counters of all.

The two are independent. The accounts record what the processes saw, gradient by gradient; the
counters what the library reports.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

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
        in_applies: so many in an apply,
        in_blocks: so many in the block of a round,
        risked: so many takers that had not noted what they might have got.
        surely_gone: so many workers that had applied,
        perhaps_gone: so many that may have,
        unheard: so many takers that might have been told who is gone.
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


@dataclass(frozen=True)
class Findings:
    """What a campaign came to.

    Attributes:
        kills: Processes killed; of these,
        in_applies: so many in an apply,
        in_blocks: so many in the block of a round that they had noted.
        stops: Processes stopped for a while.
        applies: Gradients that were accepted, as their workers know.
        again: How often one with a contributor was applied once more, mostly after a kill in that.
        unanswered_in: Gradients that are in, while no worker ever learned it.
        refused: Gradients that were refused, as their workers know.
        takes: Takes and rounds, as the counters say; of these,
        takes_died: so many with a taker that was killed before it could note what it got.
        given_up: Rounds whose block raised.
        snapshots: Snapshots that were looked at.
        restores: States that were restored.
        rounds: Rounds that are in the parameters of the training campaigns.
        updates: Updates of parameters that were made there, also those that a load took back.
        in_updates: Processes killed in one.
        found_in: Updates that were in already: their chief had died, or raised, after them.
        saves: Files that were saved.
        loads: Files that were loaded.
        cut_loads: Processes killed in that.
        refused_loading: Updates that were refused because of a load.
        told_dead: Deaths of workers that a take was told of.
        told_failed: Failures likewise.
        mistold: Campaigns in which more were told of than there were, or fewer.
        torn: Gradients in some of their members only, and members that are not their sum; snapshots
            of parameters that are not those of one process alone at that step.
        lost: Accepted gradients that are nowhere; rounds in the parameters without one of theirs.
        doubled: Gradients that were taken more than once; rounds in the parameters with one twice.
        updated_twice: Rounds that are in the parameters twice, or were skipped and are.
        not_updated: Rounds that are not in the parameters.
        repeated: Contributors that were in a round twice.
        misplaced: Gradients in a round they cannot belong to, or that were refused and are there.
        miscounted: Disagreements of the library's counters with the books.
        failed: Processes that ended with an error.
        longest_attach: Seconds, of any living process.
        longest_apply: Seconds.
        longest_take: Seconds, those included in which there were not enough gradients.
    """

    kills: int = 0
    in_applies: int = 0
    in_blocks: int = 0
    stops: int = 0
    applies: int = 0
    again: int = 0
    unanswered_in: int = 0
    refused: int = 0
    takes: int = 0
    takes_died: int = 0
    given_up: int = 0
    snapshots: int = 0
    restores: int = 0
    rounds: int = 0
    updates: int = 0
    in_updates: int = 0
    found_in: int = 0
    saves: int = 0
    loads: int = 0
    cut_loads: int = 0
    refused_loading: int = 0
    told_dead: int = 0
    told_failed: int = 0
    mistold: int = 0
    torn: int = 0
    lost: int = 0
    doubled: int = 0
    updated_twice: int = 0
    not_updated: int = 0
    repeated: int = 0
    misplaced: int = 0
    miscounted: int = 0
    failed: int = 0
    longest_attach: float = 0.0
    longest_apply: float = 0.0
    longest_take: float = 0.0

    @property
    def faults(self) -> int:
        """All that must be 0."""
        wrong = self.torn + self.lost + self.doubled + self.repeated + self.misplaced
        wrong += self.updated_twice + self.not_updated
        return wrong + self.miscounted + self.mistold + self.failed

    @property
    def longest(self) -> float:
        """The longest wait of any living process."""
        return max(self.longest_attach, self.longest_apply, self.longest_take)

    def __add__(self, other: Findings) -> Findings:
        """Those of two campaigns."""
        return Findings(
            **{
                field.name: (max if field.name.startswith("longest") else _plus)(
                    getattr(self, field.name), getattr(other, field.name)
                )
                for field in fields(Findings)
            }
        )


def _plus(a: int, b: int) -> int:
    return a + b


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
    longest = {doing: float(books.longest[doing].max()) for doing in Doing}
    # What was told to a taker that was killed before it could note it, nobody knows.
    dead, failures = toll.surely_gone, tally[Tally.FAILED]
    told_all = tally[Tally.TOLD_DEAD] >= dead and tally[Tally.TOLD_FAILED] >= failures
    told_right = (
        tally[Tally.TOLD_DEAD] <= dead + toll.perhaps_gone
        and tally[Tally.TOLD_FAILED] <= failures
        and (told_all or toll.unheard > 0)
    )
    return Findings(
        kills=toll.kills,
        in_applies=toll.in_applies,
        in_blocks=toll.in_blocks,
        stops=toll.stops,
        applies=int(np.count_nonzero(accepted)),
        again=attempts - int(np.count_nonzero(fate)),
        unanswered_in=int(np.count_nonzero(unanswered & seen)),
        refused=int(np.count_nonzero(refused)),
        takes=stats.takes,
        takes_died=len(died),
        given_up=tally[Tally.GIVEN_UP],
        snapshots=tally[Tally.SNAPSHOTS],
        restores=tally[Tally.RESTORES],
        told_dead=tally[Tally.TOLD_DEAD],
        told_failed=tally[Tally.TOLD_FAILED],
        mistold=tally[Tally.MISTOLD] + (not told_right),
        torn=tally[Tally.TORN],
        lost=lost,
        doubled=tally[Tally.DOUBLED],
        repeated=tally[Tally.REPEATED],
        misplaced=int(np.count_nonzero(misplaced)),
        miscounted=tally[Tally.MISREPORTED] + checks.count(False),
        failed=toll.failed,
        longest_attach=longest[Doing.ATTACH],
        longest_apply=longest[Doing.APPLY],
        longest_take=longest[Doing.TAKE],
    )


def _end(entries: Numbers) -> int:
    """Past the last one that is not 0."""
    return int(np.max(np.flatnonzero(entries), initial=-1)) + 1
