"""The audit: the accounts of each gradient, compared with the library's counters of all.

The two are independent. The accounts record what the processes saw, gradient by gradient; the
counters what the library reports.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from shmacc_soak.books import Doing, Fate

if TYPE_CHECKING:
    from shmacc import Stats
    from shmacc_soak.books import Books


@dataclass(frozen=True)
class Findings:
    """What a campaign came to.

    Attributes:
        kills: Processes killed.
        stops: Processes stopped for a while.
        applies: Gradients that were accepted, as their workers know.
        interrupted: Applies whose worker was killed; of these,
        interrupted_in: so many are known to be in.
        refused: Gradients that were refused, as their workers know.
        takes: Takes, as the counters say; of these,
        takes_died: so many with a taker that was killed before it could note what it got.
        torn: Takes that are not the sum of the gradients in them.
        lost: Accepted gradients that are nowhere.
        doubled: Gradients that were taken more than once.
        misplaced: Gradients in a round they cannot belong to, or that were refused and are there.
        miscounted: Disagreements of the library's counters with the books.
        failed: Processes that ended with an error.
        longest_attach: Seconds, of any living process.
        longest_apply: Seconds.
        longest_take: Seconds, those included in which there were not enough gradients.
    """

    kills: int = 0
    stops: int = 0
    applies: int = 0
    interrupted: int = 0
    interrupted_in: int = 0
    refused: int = 0
    takes: int = 0
    takes_died: int = 0
    torn: int = 0
    lost: int = 0
    doubled: int = 0
    misplaced: int = 0
    miscounted: int = 0
    failed: int = 0
    longest_attach: float = 0.0
    longest_apply: float = 0.0
    longest_take: float = 0.0

    @property
    def faults(self) -> int:
        """All that must be 0."""
        return self.torn + self.lost + self.doubled + self.misplaced + self.miscounted + self.failed

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


def audit(
    books: Books, stats: Stats, *, risked: int, kills: int, stops: int, failed: int
) -> Findings:
    """Reckon up, when all processes are gone and what was left has been taken and noted.

    Args:
        books: Those of the processes.
        stats: The library's counters.
        risked: Takers that were killed when they had not noted what they might have got.
        kills: Processes killed.
        stops: Processes stopped.
        failed: Processes that ended with an error.
    """
    fate, step = books.fate, books.taken_at.astype(np.int64) - 1
    # A taker enters its take last: what one noted that was killed before it is as good as unseen.
    seen = (step >= 0) & (books.logged[step] > 0)
    accepted, begun, refused = (
        fate == which for which in (Fate.ACCEPTED, Fate.BEGUN, Fate.REFUSED)
    )

    # Steps are counted by takes alone, so each step below the present one was closed by one take.
    logged = books.logged[: stats.global_step].astype(np.int64)
    died = np.flatnonzero(logged == 0)

    # An accepted gradient that nobody noted must be in a take that died with its taker.
    missing = np.flatnonzero(accepted & ~seen)
    first = np.searchsorted(died, books.since[missing])
    may_have_died = first < len(died)
    may_have_died[may_have_died] = died[first[may_have_died]] <= books.until[missing[may_have_died]]
    lost = int(np.count_nonzero(~may_have_died))

    # A round is one of those between the steps that the worker saw.
    early = seen & (step < books.since)
    late = seen & accepted & (step > books.until)
    misplaced = early | late | (seen & refused) | (seen & (fate == Fate.NONE))

    # Now the counters. Those takes that died had so many gradients,
    unseen = stats.taken - int(np.sum(np.maximum(logged - 1, 0)))
    # which are the accepted ones that nobody saw, and some of those cut short.
    interrupted_unseen = int(np.count_nonzero(begun & ~seen))
    members = np.bincount(step[seen], minlength=stats.global_step)
    checks = [
        stats.takes == stats.global_step,
        stats.num_accumulated == 0,
        stats.applied == stats.taken,
        len(missing) <= unseen <= len(missing) + interrupted_unseen,
        len(died) <= risked,
        stats.applied == int(np.count_nonzero(seen)) + unseen,
        0 <= stats.dropped - int(np.count_nonzero(refused)) <= interrupted_unseen,
        # Each gradient noted under the take that had it, and no other.
        np.array_equal(members[logged > 0], logged[logged > 0] - 1),
    ]
    longest = {doing: float(books.longest[doing].max()) for doing in Doing}
    return Findings(
        kills=kills,
        stops=stops,
        applies=int(np.count_nonzero(accepted)),
        interrupted=int(np.count_nonzero(begun)),
        interrupted_in=int(np.count_nonzero(begun & seen)),
        refused=int(np.count_nonzero(refused)),
        takes=stats.takes,
        takes_died=len(died),
        torn=int(books.torn.sum()),
        lost=lost,
        doubled=int(books.doubled.sum()),
        misplaced=int(np.count_nonzero(misplaced)),
        miscounted=checks.count(False),
        failed=failed,
        longest_attach=longest[Doing.ATTACH],
        longest_apply=longest[Doing.APPLY],
        longest_take=longest[Doing.TAKE],
    )
