"""Processes that are started, killed, stopped for a while, continued and replaced."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final

from shmacc_soak.books import Count

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_soak.books import Books

TAKERS: Final = 2  # processes that take, or chiefs
_BETWEEN_KILLS: Final = 0.004  # seconds, on the average
_SHORTEST_STOP, _LONGEST_STOP = 0.005, 0.06  # seconds, around the lock's slice of 20 ms
_STOP_SHARE: Final = 0.1  # the share of stops among stops and kills
_PATIENCE: Final = 30.0  # seconds for all processes to end once they are asked to
_PAUSE: Final = 0.002  # seconds


class Crew:
    """The processes of a campaign: each has a slot, whose job it runs."""

    def __init__(self, books: Books, jobs: list[Callable[[], None]]) -> None:
        self._books, self._jobs = books, jobs
        self._pids = [0] * len(jobs)
        self._stopped: dict[int, tuple[float, float]] = {}  # by slot: since when, until when

    def work(
        self,
        seconds: float,
        ask_to_end: Callable[[], None],
        now_and_then: Callable[[], None] = lambda: None,
        slots: int | None = None,
    ) -> None:
        """Run the first `slots` processes, kill and stop them at random; then let all end."""
        those, end = range(slots or len(self._jobs)), time.monotonic() + seconds
        try:
            for slot in those:
                self.start(slot)
            while time.monotonic() < end and not self._books.stopping:
                time.sleep(random.expovariate(1 / _BETWEEN_KILLS))
                self.continue_those_due()
                slot = random.choice(those)
                if not (random.random() < _STOP_SHARE and self._stop_for_a_while(slot)):
                    self.kill(slot)
                    self.start(slot)
                now_and_then()
            while self._stopped:
                time.sleep(_PAUSE)
                self.continue_those_due()
            ask_to_end()
            deadline = time.monotonic() + _PATIENCE
            for slot in range(len(self._jobs)):
                if self.wait(slot, deadline) is None:  # it is stuck
                    self._books.add(slot, Count.FAILED)
        finally:
            for slot in range(len(self._jobs)):
                self.kill(slot)

    def start(self, slot: int) -> None:
        """Start the slot's process."""
        self._pids[slot] = os.fork()
        if self._pids[slot]:
            return
        status = 1
        try:
            gc.disable()  # the process lives too briefly to need it
            self._jobs[slot]()
            status = 0
        except BaseException:  # noqa: BLE001  the child must not run the supervisor's code
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def kill(self, slot: int) -> bool:
        """Kill the slot's process; return whether there was one."""
        if self._pids[slot] == 0:
            return False
        os.kill(self._pids[slot], signal.SIGKILL)
        _, status = os.waitpid(self._pids[slot], 0)
        self._pids[slot] = 0
        self._stopped.pop(slot, None)
        self._books.killed(slot)
        self._books.add(slot, Count.FAILED, os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0)
        return True

    def _stop_for_a_while(self, slot: int) -> bool:
        """Stop the slot's process; return False if it is stopped already."""
        if slot in self._stopped:
            return False
        now = time.monotonic()
        os.kill(self._pids[slot], signal.SIGSTOP)
        self._stopped[slot] = now, now + random.uniform(_SHORTEST_STOP, _LONGEST_STOP)
        self._books.add(slot, Count.STOPPED)
        return True

    def continue_those_due(self) -> None:
        """Continue processes that were stopped for long enough."""
        now = time.monotonic()
        for slot, (since, until) in list(self._stopped.items()):
            if now >= until:
                del self._stopped[slot]
                self._books.stopped[slot] += now - since
                os.kill(self._pids[slot], signal.SIGCONT)

    def wait(self, slot: int, deadline: float) -> bool | None:
        """Wait for a process; return whether it ended without an error, None at the deadline."""
        if self._pids[slot] == 0:
            return True
        while not (ended := os.waitpid(self._pids[slot], os.WNOHANG))[0]:
            if time.monotonic() >= deadline:
                return None
            self.continue_those_due()
            time.sleep(_PAUSE / 2)
        self._pids[slot] = 0
        self._books.add(slot, Count.FAILED, ended[1] != 0)
        return ended[1] == 0
