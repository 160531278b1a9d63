"""One accumulator, and the processes that are killed and replaced while they use it."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import shmacc
from shmacc_soak.audit import Findings, Toll, audit
from shmacc_soak.books import Books, Doing
from shmacc_soak.crew import take, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_soak.plans import Plan

_NAME: Final = "soak"
_STOP_SHARE: Final = 0.1  # the share of stops among stops and kills
_SHORTEST_STOP, _LONGEST_STOP = 0.005, 0.06  # around the lock's slice of 20 ms
_PATIENCE: Final = 30.0  # for all processes to end when they are asked to
_FINISHED: Final = 0.5  # they are not asked: the run is finished


@dataclass(frozen=True)
class Effort:
    """How much is done.

    Attributes:
        workers: Processes that apply.
        takers: Processes that take.
        pause: Seconds between two kills, on the average.
    """

    workers: int = 3
    takers: int = 2
    pause: float = 0.004


class Campaign:
    """A plan carried out for some seconds, in names of its own."""

    def __init__(self, plan: Plan, effort: Effort) -> None:
        """Make the accumulator; it is removed by `run`."""
        self._plan, self._effort = plan, effort
        self._size = effort.workers + effort.takers
        self._books = Books(self._size + 1)  # the last one is this process's own
        self._pids = [0] * self._size
        self._stopped: dict[int, tuple[float, float]] = {}  # when, and until when
        self._toll = Toll()
        self._finishes = random.random() < _FINISHED
        plan.create(_NAME).close()

    def run(self, seconds: float) -> Findings:
        """Carry it out, and audit it."""
        end = time.monotonic() + seconds
        try:
            for slot in range(self._size):
                self._start(slot)
            while time.monotonic() < end:
                time.sleep(random.expovariate(1 / self._effort.pause))
                slot = random.randrange(self._size)
                self._continue_those_due()
                if slot not in self._stopped and random.random() < _STOP_SHARE:
                    self._stop_for_a_while(slot)
                else:
                    self._kill(slot)
                    self._start(slot)
            while self._stopped:
                time.sleep(_SHORTEST_STOP)
                self._continue_those_due()
            self._end_in_order()
        finally:
            for slot in range(self._size):
                self._kill(slot)
        return audit(self._books, self._take_the_rest(), self._toll)

    def _start(self, slot: int) -> None:
        plan, books = self._plan, self._books
        job = work if slot < self._effort.workers else take
        self._pids[slot] = _fork(lambda: job(books, plan, _NAME, slot))

    def _kill(self, slot: int) -> None:
        if self._pids[slot] == 0:
            return
        os.kill(self._pids[slot], signal.SIGKILL)
        _, status = os.waitpid(self._pids[slot], 0)
        self._pids[slot] = 0
        self._stopped.pop(slot, None)
        toll, books = self._toll, self._books
        toll.kills += 1
        toll.failed += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        toll.risked += int(books.at_risk[slot])
        toll.in_blocks += int(books.in_block[slot])
        toll.unheard += int(books.asking[slot])
        toll.surely_gone += int(books.applied[slot]) == 2  # noqa: PLR2004  as the crew has it
        toll.perhaps_gone += int(books.applied[slot]) == 1
        toll.in_applies += books.killed(slot) is Doing.APPLY

    def _stop_for_a_while(self, slot: int) -> None:
        now = time.monotonic()
        os.kill(self._pids[slot], signal.SIGSTOP)
        self._stopped[slot] = now, now + random.uniform(_SHORTEST_STOP, _LONGEST_STOP)
        self._toll.stops += 1

    def _continue_those_due(self) -> None:
        for slot, (since, until) in list(self._stopped.items()):
            now = time.monotonic()
            if now >= until:
                del self._stopped[slot]
                self._books.stopped[slot] += now - since
                os.kill(self._pids[slot], signal.SIGCONT)

    def _end_in_order(self) -> None:
        """Let all processes end; one that does not is stuck, which is a failure."""
        if self._finishes:
            with shmacc.attach(_NAME) as acc:
                acc.finish()
        else:
            self._books.stop()
        deadline = time.monotonic() + _PATIENCE
        for slot, pid in enumerate(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            while not ended and time.monotonic() < deadline:
                time.sleep(0.001)
                ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids[slot] = 0
            self._toll.failed += not ended or status != 0

    def _take_the_rest(self) -> shmacc.Stats:
        plan, acc = self._plan, shmacc.attach(_NAME)
        with acc:
            if self._finishes:
                self._toll.failed += acc.running
                acc.restore(acc.state())
            if acc.num_accumulated():
                taken = acc.take(1, timeout=1.0)
                contents, contribute = plan.contents(taken), plan.gradients.contribute
                self._books.note(self._size, taken, contents, contribute=contribute)
            with suppress(shmacc.errors.DeadlineExceededError):
                try:
                    acc.take(1, timeout=0, on_death="raise")
                except shmacc.errors.WorkerDiedError as error:
                    self._books.tell(self._size, error.reasons or ())
            stats = acc.stats()
            acc.unlink()
        return stats


def _fork(run: Callable[[], None]) -> int:
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
