"""The accounts that outlive killed processes: arrays that all of them share, outside the library.

Every entry has one writer at a time, and is written by single stores, so a kill leaves it old or
new. The entries of a gradient:

* `fate`: see `Fate`.
* `attempts`: how often its apply was begun.
* `since`, `until`: the global step before and after. The round that it is in is one of these.
* `taken_at`: one more than the step of the take that had it, as the taker noted.

The entry of a step: `logged`, one more than the number of gradients in the take that closed it. A
step without it was closed by a taker that was killed before it could note what it got.

A round is noted in its block, before it is consumed. If it never is, since its chief is killed or
gives it up, then the next take of that step has all that it had, and notes it again.
"""

from __future__ import annotations

import mmap
import time
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shmacc_soak.gradients import MOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_soak.plans import Contents


class Fate(IntEnum):
    """The fate of a gradient."""

    NONE = 0
    BEGUN = 1  # its apply was; if the worker was killed in it, it may be in or out
    ACCEPTED = 2
    REFUSED = 3
    TIMED_OUT = 4  # it did not get in
    IN_DOUBT = 5  # its worker was killed, and it was refused when it was applied again


class Doing(IntEnum):
    """What a process waits for."""

    NOTHING = 0
    ATTACH = 1
    APPLY = 2
    TAKE = 3


class Tally(IntEnum):
    """What a process counts."""

    TORN = 0
    DOUBLED = 1  # gradients that were in a take before, or are in this one more than once
    REPEATED = 2  # those of the latter kind that have a contributor
    MISREPORTED = 3  # numbers that a take was wrong about
    SNAPSHOTS = 4
    RESTORES = 5
    GIVEN_UP = 6  # rounds
    FAILED = 7  # times that it left by an exception, after it had applied
    TOLD_DEAD = 8  # processes that a take was told of, killed
    TOLD_FAILED = 9  # and failed
    MISTOLD = 10  # reasons that are no such thing


def shared(count: int, dtype: type) -> npt.NDArray[Any]:
    """Return an array that children share, of zeros; pages that are never touched cost nothing."""
    size = max(count * np.dtype(dtype).itemsize, 1)
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=count)


class Books:
    """Those of one campaign."""

    def __init__(self, processes: int) -> None:
        self.fate = shared(MOST, np.uint8)
        self.attempts = shared(MOST, np.uint16)
        self.since = shared(MOST, np.int32)
        self.until = shared(MOST, np.int32)
        self.taken_at = shared(MOST, np.int32)
        self.logged = shared(MOST, np.int32)
        # By process:
        self.turn = shared(processes, np.int64)  # a worker's next gradient
        self.at_risk = shared(processes, np.uint8)  # a taker that has not noted what it gets
        self.in_block = shared(processes, np.uint8)  # a chief that has a round open
        self.asking = shared(processes, np.uint8)  # a taker that wants to be told who is gone
        self.applied = shared(processes, np.uint8)  # 1: perhaps, since it attached; 2: yes
        self.stopped = shared(processes, np.float64)  # seconds that it was stopped by us
        self.tally = {what: shared(processes, np.int64) for what in Tally}
        self.longest = {doing: shared(processes, np.float64) for doing in Doing}
        self._doing = shared(processes, np.uint8)
        self._began = shared(processes, np.float64)
        self._stop = shared(1, np.uint8)

    def stop(self) -> None:
        """Ask all processes to end."""
        self._stop[0] = 1

    @property
    def stopping(self) -> bool:
        """Whether they were asked to end."""
        return bool(self._stop[0])

    def note(self, process: int, taken: Any, contents: Contents, *, contribute: bool) -> None:
        """Record a take, or a round that may be consumed."""
        self.check(process, contents, contribute=contribute)
        before = self.taken_at[contents.numbers]
        self.tally[Tally.DOUBLED][process] += np.count_nonzero(
            (before != 0) & (before != taken.step + 1)
        )
        self.taken_at[contents.numbers] = taken.step + 1
        self.logged[taken.step] = taken.count + 1

    def check(self, process: int, contents: Contents, *, contribute: bool) -> None:
        """Record what is wrong with a take or a snapshot in itself."""
        self.tally[Tally.TORN][process] += contents.torn
        self.tally[Tally.REPEATED if contribute else Tally.DOUBLED][process] += contents.repeated
        self.tally[Tally.MISREPORTED][process] += contents.misreported

    def tell(self, process: int, reasons: tuple[str, ...]) -> None:
        """Record what a take was told of processes that are gone."""
        dead = reasons.count("killed")
        failed = sum(reason.startswith("FailedError: ") for reason in reasons)
        self.tally[Tally.TOLD_DEAD][process] += dead
        self.tally[Tally.TOLD_FAILED][process] += failed
        self.tally[Tally.MISTOLD][process] += len(reasons) - dead - failed

    @contextmanager
    def timed(self, process: int, doing: Doing) -> Iterator[None]:
        """Measure how long the process waits for this to be done, even if it is killed in it."""
        stopped = self.stopped[process]
        self._began[process] = time.monotonic()
        self._doing[process] = doing
        try:
            yield
        finally:
            self._waited(process, doing, self.stopped[process] - stopped)
            self._doing[process] = Doing.NOTHING

    def killed(self, process: int) -> Doing:
        """Note that it was killed; what it was doing."""
        doing = Doing(int(self._doing[process]))
        if doing is not Doing.NOTHING:
            # It lived, and waited, until now.
            self._waited(process, doing, 0.0)
        self._doing[process] = Doing.NOTHING
        self.at_risk[process] = self.in_block[process] = 0
        self.asking[process] = self.applied[process] = 0
        return doing

    def _waited(self, process: int, doing: Doing, stopped: float) -> None:
        waited = time.monotonic() - self._began[process] - stopped
        self.longest[doing][process] = max(self.longest[doing][process], waited)
