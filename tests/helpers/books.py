"""Books: what processes that may be killed write down, in memory shared with the test.

Every entry has one writer at a time and is written by a single store, so a kill leaves the old or
the new value. A chief notes a round in the round's block, before the round is consumed. If the
chief is killed or gives the round up, the next take gets the round's gradients, and notes them.

`audit` compares the books with the counters that the library keeps.
"""

import mmap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmacc import Stats

Numbers = npt.NDArray[np.int64]

MOST: Final = 1 << 20
"""The books have room for this many gradients."""

STEPS: Final = 1 << 16
"""The books have room for the parameters of this many steps."""


class Fate(IntEnum):
    """The fate of a gradient."""

    NONE = 0
    BEGUN = 1  # its apply has begun; after a kill, the gradient may or may not be in a round
    ACCEPTED = 2
    REFUSED = 3
    TIMED_OUT = 4  # it is in no round
    IN_DOUBT = 5  # its worker was killed, and the second apply was refused: the first may count


class Doing(IntEnum):
    """The reasons for which a process waits."""

    NOTHING = 0
    ATTACH = 1
    APPLY = 2
    TAKE = 3


class Applied(IntEnum):
    """Whether a process has applied since it attached."""

    NO = 0
    PERHAPS = 1
    YES = 2
    FAILING = 3  # it has applied, and is about to leave as failed; it may be killed before that


class Count(StrEnum):
    """The counters; each value is the text that is printed for it."""

    KILLED = "processes killed"
    IN_APPLY = "killed in an apply"
    IN_BLOCK = "killed in the block of a round"
    STOPPED = "processes stopped for a while"
    ACCEPTED = "gradients accepted"
    REFUSED = "gradients refused as stale"
    AGAIN = "contributors applied again"
    UNANSWERED = "gradients in whose worker never learned it"
    TAKES = "takes and rounds"
    TAKES_LOST = "takes that died with their taker"
    GIVEN_UP = "rounds given up"
    SNAPSHOTS = "snapshots looked at"
    RESTORES = "states restored"
    WORKERS_FAILED = "workers that failed after an apply"
    TOLD_DEAD = "deaths of workers that were told"
    TOLD_FAILED = "failures of workers that were told"
    ROUNDS = "rounds in trained parameters"
    UPDATES = "updates of parameters"
    FOUND_IN = "updates that were in already"
    IN_UPDATE = "processes killed in an update"
    SAVES = "files saved"
    LOADS = "files loaded"
    IN_LOAD = "processes killed in a load"
    NOT_LOADED = "updates refused during a load"
    # Faults:
    TORN = "torn"  # gradients missing from some members; members or parameters with wrong sums
    LOST = "lost"  # accepted gradients that no take had
    DOUBLED = "doubled"  # gradients that were taken more than once
    REPEATED = "repeated"  # contributors that were in a round twice
    MISPLACED = "misplaced"  # gradients in an impossible round, and refused gradients in a round
    UPDATED_TWICE = "updated twice"  # rounds that changed parameters twice, or although skipped
    NOT_UPDATED = "not updated"  # rounds that neither changed the parameters nor were skipped
    MISCOUNTED = "miscounted"  # counters of the library that disagree with the books
    MISTOLD = "mistold"  # takes reported wrong numbers of deaths or failures, or other reasons


FAULTS: Final = list(Count)[list(Count).index(Count.TORN) :]
"""The counters of faults. Each must be 0."""


@dataclass(frozen=True)
class Findings:
    """The results of campaigns: counts, and the longest waits of living processes, in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        return sum(self.counts[fault] for fault in FAULTS)


def _shared(count: int, dtype: type) -> npt.NDArray[Any]:
    """Return zeros that child processes share; pages that are never touched cost nothing."""
    size = max(count * np.dtype(dtype).itemsize, 1)
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=count)


class Books:
    """The books of one campaign, in which this number of processes may be killed."""

    def __init__(self, processes: int) -> None:
        self.own = processes  # the campaign itself: the last process
        processes += 1
        # By gradient:
        self.fate = _shared(MOST, np.uint8)
        self.attempts = _shared(MOST, np.uint16)  # how often its apply was begun
        # The global steps before and after the gradient's apply. Its round lies between them.
        self.since = _shared(MOST, np.int32)
        self.until = _shared(MOST, np.int32)
        self.taken_at = _shared(MOST, np.int32)  # the step at which it was taken, plus 1
        # By step:
        # The number of gradients in the take that ended the step, plus 1; 0: the taker was killed
        # before it noted the number.
        self.logged = _shared(MOST, np.int32)
        self.digests = _shared(STEPS, np.int64)  # digests of the parameters
        # By process:
        self.turn = _shared(processes, np.int64)  # a worker's next gradient
        self.at_risk = _shared(processes, np.uint8)  # a taker that has not noted its take yet
        self.in_block = _shared(processes, np.uint8)  # a chief that has a round open
        self.updating = _shared(processes, np.uint8)  # a chief that is in an update
        self.asking = _shared(processes, np.uint8)  # a taker in a take that reports deaths
        self.applied = _shared(processes, np.uint8)
        self.stopped = _shared(processes, np.float64)  # seconds for which the campaign stopped it
        self._counts = {what: _shared(processes, np.int64) for what in Count}
        self._longest = {doing: _shared(processes, np.float64) for doing in Doing}
        self._doing = _shared(processes, np.uint8)
        self._began = _shared(processes, np.float64)
        # Counts of the campaign:
        self.loads = _shared(1, np.int64)  # a load adds 1 when due, and 1 when done; odd: it is due
        self._stop = _shared(1, np.uint8)
        # Numbers of killed processes, in this order: takers that may not have noted what they took;
        # workers that had applied; workers that may have applied; workers that were failing; takers
        # whose last take may have reported deaths.
        self.risked = self.surely_gone = self.perhaps_gone = self.failing = self.unheard = 0

    def add(self, process: int, what: Count, number: int = 1) -> None:
        self._counts[what][process] += number

    def sum(self, what: Count) -> int:
        """Return what all processes have counted."""
        return int(self._counts[what].sum())

    def findings(self) -> Findings:
        """Return all that was counted and measured."""
        longest = {f"to {what.name.lower()}": float(of.max()) for what, of in self._longest.items()}
        counts: Counter[str] = Counter({what: self.sum(what) for what in Count})
        return Findings(counts, {what: seconds for what, seconds in longest.items() if seconds})

    def stop(self) -> None:
        """Ask all processes to end."""
        self._stop[0] = 1

    @property
    def stopping(self) -> bool:
        """Whether the processes were asked to end."""
        return bool(self._stop[0])

    def note(self, process: int, numbers: Numbers, step: int, count: int) -> None:
        """Record the gradients of a take, or of a round that is still open."""
        before = self.taken_at[numbers]
        doubled = (before != 0) & (before != step + 1)
        self.add(process, Count.DOUBLED, int(np.count_nonzero(doubled)))
        self.taken_at[numbers] = step + 1
        self.logged[step] = count + 1

    def tell(self, process: int, reasons: tuple[str, ...]) -> None:
        """Record the deaths and failures that a take reported."""
        dead = reasons.count("killed")
        failed = sum(reason.startswith("FailedError: ") for reason in reasons)
        self.add(process, Count.TOLD_DEAD, dead)
        self.add(process, Count.TOLD_FAILED, failed)
        self.add(process, Count.MISTOLD, len(reasons) - dead - failed)

    @contextmanager
    def timed(self, process: int, doing: Doing) -> Iterator[None]:
        """Measure how long the process waits, even if it is killed while it waits."""
        stopped = self.stopped[process]
        self._began[process] = time.monotonic()
        self._doing[process] = doing
        try:
            yield
        finally:
            self._waited(process, doing, self.stopped[process] - stopped)
            self._doing[process] = Doing.NOTHING

    def killed(self, process: int) -> None:
        """Note that the process was killed, and what it was doing."""
        doing = Doing(int(self._doing[process]))
        if doing is not Doing.NOTHING:
            self._waited(process, doing, 0.0)  # it waited until it was killed
        self.add(process, Count.KILLED)
        self.add(process, Count.IN_APPLY, doing is Doing.APPLY)
        self.add(process, Count.IN_BLOCK, int(self.in_block[process]))
        self.add(process, Count.IN_UPDATE, int(self.updating[process]))
        self.risked += int(self.at_risk[process])
        self.unheard += int(self.asking[process])
        self.surely_gone += int(self.applied[process]) == Applied.YES
        self.perhaps_gone += int(self.applied[process]) in {Applied.PERHAPS, Applied.FAILING}
        self.failing += int(self.applied[process]) == Applied.FAILING
        for state in self._doing, self.at_risk, self.in_block, self.updating, self.asking:
            state[process] = 0
        self.applied[process] = Applied.NO

    def _waited(self, process: int, doing: Doing, stopped: float) -> None:
        waited = time.monotonic() - self._began[process] - stopped
        self._longest[doing][process] = max(self._longest[doing][process], waited)


def audit(books: Books, stats: Stats) -> Findings:
    """Check the books, after all processes have ended and all gradients were taken."""
    entries = max(_end(books.fate), _end(books.taken_at))
    fate, step = books.fate[:entries], books.taken_at[:entries].astype(np.int64) - 1
    since, until = books.since[:entries], books.until[:entries]
    # A taker writes `logged` last. If it was killed earlier, its other notes do not count.
    seen = (step >= 0) & (books.logged[step] > 0)
    accepted, refused = fate == Fate.ACCEPTED, fate == Fate.REFUSED
    unanswered = (fate == Fate.BEGUN) | (fate == Fate.IN_DOUBT)

    # Only takes advance the step, so each step below the present step was ended by one take.
    logged = books.logged[: stats.global_step].astype(np.int64)
    died = np.flatnonzero(logged == 0)

    # An accepted gradient that nobody noted must be in a take whose taker was killed.
    missing = np.flatnonzero(accepted & ~seen)
    first = np.searchsorted(died, since[missing])
    may_have_died = first < len(died)
    may_have_died[may_have_died] = died[first[may_have_died]] <= until[missing[may_have_died]]
    # Gradients of a round that was not consumed must be in the take that ended the step.
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

    # Check the counters. All accepted gradients that no restore has discarded must have been taken.
    applied = stats.applied - stats.discarded
    # `unseen` gradients were in takes whose takers were killed: all accepted gradients that nobody
    # noted, and some of the unanswered gradients.
    unseen = stats.taken - int(np.sum(np.maximum(logged - 1, 0)))
    unanswered_unseen = _number(unanswered & ~seen)
    # `dropped` counts each apply that returned False, and some applies that never returned.
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
        # No gradient was noted for one take and later for another.
        not np.any(members[: stats.global_step] < noted),
    ]
    # The take of a killed taker may have reported deaths and failures that the taker did not note.
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
