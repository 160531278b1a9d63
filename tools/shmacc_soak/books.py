"""The accounts that outlive killed processes: arrays that all of them share, outside the library.

Every entry has one writer at a time, and is written by single stores, so a kill leaves it old or
new. The entries of a gradient:

* `fate`: nothing was done yet; its apply was begun; it was accepted; it was refused. An apply that
  was begun, and whose worker was killed, may be in or out.
* `since`, `until`: the global step before and after. The round that it is in is one of these.
* `taken_at`: one more than the step of the take that had it, as the taker noted.

The entry of a step: `logged`, one more than the number of gradients in the take that closed it. A
step without it was closed by a taker that was killed before it could note what it got.
"""

from __future__ import annotations

import mmap
import time
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST: Final = 1 << 20
"""More gradients than a campaign can come to."""


class Fate(IntEnum):
    """The fate of an apply."""

    NONE = 0
    BEGUN = 1
    ACCEPTED = 2
    REFUSED = 3


class Doing(IntEnum):
    """What a process waits for."""

    NOTHING = 0
    ATTACH = 1
    APPLY = 2
    TAKE = 3


def _shared(count: int, dtype: type) -> npt.NDArray[Any]:
    # Anonymous and shared with children; pages that are never touched cost nothing.
    size = max(count * np.dtype(dtype).itemsize, 1)
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=count)


class Books:
    """Those of one campaign."""

    def __init__(self, processes: int) -> None:
        self.fate = _shared(MOST, np.uint8)
        self.since = _shared(MOST, np.int32)
        self.until = _shared(MOST, np.int32)
        self.taken_at = _shared(MOST, np.int32)
        self.logged = _shared(MOST, np.int32)
        # By process:
        self.turn = _shared(processes, np.int64)  # a worker's next gradient
        self.at_risk = _shared(processes, np.uint8)  # a taker that has not noted what it gets
        self.torn = _shared(processes, np.int64)  # takes that were not the sum of their gradients
        self.doubled = _shared(processes, np.int64)  # gradients that were in a take before
        self.stopped = _shared(processes, np.float64)  # seconds that it was stopped by us
        self.longest = {doing: _shared(processes, np.float64) for doing in Doing}
        self._doing = _shared(processes, np.uint8)
        self._began = _shared(processes, np.float64)
        self._stop = _shared(1, np.uint8)

    def stop(self) -> None:
        """Ask all processes to end."""
        self._stop[0] = 1

    @property
    def stopping(self) -> bool:
        """Whether they were asked to end."""
        return bool(self._stop[0])

    @contextmanager
    def timed(self, process: int, doing: Doing) -> Iterator[None]:
        """Measure how long the process waits for this to be done, even if it is killed in it."""
        stopped = self.stopped[process]
        self._began[process] = time.monotonic()
        self._doing[process] = doing
        try:
            yield
        finally:
            self._note(process, doing, self.stopped[process] - stopped)
            self._doing[process] = Doing.NOTHING

    def killed(self, process: int) -> bool:
        """Note that it was killed; whether it was a taker that may have got something."""
        doing = Doing(int(self._doing[process]))
        if doing is not Doing.NOTHING:
            # It lived, and waited, until now.
            self._note(process, doing, 0.0)
        self._doing[process] = Doing.NOTHING
        at_risk = bool(self.at_risk[process])
        self.at_risk[process] = 0
        return at_risk

    def _note(self, process: int, doing: Doing, stopped: float) -> None:
        waited = time.monotonic() - self._began[process] - stopped
        self.longest[doing][process] = max(self.longest[doing][process], waited)
