"""Processes that are started, killed, stopped for a while and continued."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORTEST_STOP, _LONGEST_STOP = 0.005, 0.06  # seconds, around the lock's slice of 20 ms
_PATIENCE: Final = 30.0  # for all processes to end when they are asked to


class Processes:
    """Those of a campaign, each in a slot.

    Attributes:
        failed: How many ended with an error, or did not end when they were asked to.
        kills: How many were killed.
        stops: How many were stopped for a while.
    """

    def __init__(self, jobs: list[Callable[[], None]]) -> None:
        """Start none yet.

        Args:
            jobs: What the process of each slot does.
        """
        self.failed = self.kills = self.stops = 0
        self._jobs = jobs
        self._pids = [0] * len(jobs)
        self._stopped: dict[int, tuple[float, float]] = {}  # when, and until when

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self._jobs)

    def start(self, slot: int) -> None:
        """Start the slot's process."""
        self._pids[slot] = fork(self._jobs[slot])

    def kill(self, slot: int) -> bool:
        """Kill the slot's process; whether there was one."""
        if self._pids[slot] == 0:
            return False
        os.kill(self._pids[slot], signal.SIGKILL)
        _, status = os.waitpid(self._pids[slot], 0)
        self._pids[slot] = 0
        self._stopped.pop(slot, None)
        self.kills += 1
        self.failed += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        return True

    def stop_for_a_while(self, slot: int) -> bool:
        """Stop the slot's process; whether it was not stopped already."""
        if slot in self._stopped:
            return False
        now = time.monotonic()
        os.kill(self._pids[slot], signal.SIGSTOP)
        self._stopped[slot] = now, now + random.uniform(_SHORTEST_STOP, _LONGEST_STOP)
        self.stops += 1
        return True

    def continue_those_due(self, note: Callable[[int, float], None] = lambda *_: None) -> None:
        """Continue those that were stopped for long enough; note first who, and for how long."""
        now = time.monotonic()
        for slot, (since, until) in list(self._stopped.items()):
            if now >= until:
                del self._stopped[slot]
                note(slot, now - since)
                os.kill(self._pids[slot], signal.SIGCONT)

    @property
    def any_stopped(self) -> bool:
        """Whether one is stopped."""
        return bool(self._stopped)

    def wait_for_all(self) -> None:
        """Wait for all, which were asked to end; one that does not is stuck: a failure."""
        deadline = time.monotonic() + _PATIENCE
        for slot in range(len(self)):
            ended = self.wait(slot, deadline)
            self.failed += ended is not True

    def wait(self, slot: int, deadline: float) -> bool | None:
        """Wait until a process ends: whether without an error; None: it did not until then."""
        if self._pids[slot] == 0:
            return True
        ended, status = os.waitpid(self._pids[slot], os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.001)
            ended, status = os.waitpid(self._pids[slot], os.WNOHANG)
        if not ended:
            return None
        self._pids[slot] = 0
        return status == 0


def fork(run: Callable[[], None]) -> int:
    """Start a process that runs this; return its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        gc.disable()  # this life is too short for it
        run()
        status = 0
    except BaseException:  # noqa: BLE001  it must not go on as the supervisor
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
