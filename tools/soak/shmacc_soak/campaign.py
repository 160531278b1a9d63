"""One accumulator, and the processes that are killed and replaced while they use it."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import shmacc
from shmacc_soak.audit import Findings, Toll, audit
from shmacc_soak.books import Books, Doing
from shmacc_soak.crew import take, work
from shmacc_soak.processes import Processes

if TYPE_CHECKING:
    from shmacc_soak.plans import Plan

_NAME: Final = "soak"
_STOP_SHARE: Final = 0.1  # the share of stops among stops and kills
_PAUSE: Final = 0.005  # seconds, while processes are stopped
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
        size = effort.workers + effort.takers
        self._books = books = Books(size + 1)  # the last one is this process's own
        jobs = [work] * effort.workers + [take] * effort.takers
        self._processes = Processes(
            [partial(job, books, plan, _NAME, slot) for slot, job in enumerate(jobs)]
        )
        self._toll = Toll()
        # A chief that restores what it holds, as these do, would start the run again.
        self._finishes = not plan.chief and random.random() < _FINISHED
        plan.create(_NAME).close()

    @property
    def title(self) -> str:
        """The plan's."""
        return self._plan.title

    def run(self, seconds: float) -> Findings:
        """Carry it out, and audit it."""
        processes, end = self._processes, time.monotonic() + seconds
        try:
            for slot in range(len(processes)):
                processes.start(slot)
            while time.monotonic() < end:
                time.sleep(random.expovariate(1 / self._effort.pause))
                slot = random.randrange(len(processes))
                self._continue_those_due()
                if not (random.random() < _STOP_SHARE and processes.stop_for_a_while(slot)):
                    self._kill(slot)
                    processes.start(slot)
            while processes.any_stopped:
                time.sleep(_PAUSE)
                self._continue_those_due()
            self._ask_all_to_end()
            processes.wait_for_all()
        finally:
            for slot in range(len(processes)):
                self._kill(slot)
        stats, toll = self._take_the_rest(), self._toll
        toll.kills, toll.stops = processes.kills, processes.stops
        toll.failed += processes.failed
        return audit(self._books, stats, toll)

    def _kill(self, slot: int) -> None:
        if not self._processes.kill(slot):
            return
        toll, books = self._toll, self._books
        toll.risked += int(books.at_risk[slot])
        toll.in_blocks += int(books.in_block[slot])
        toll.unheard += int(books.asking[slot])
        toll.surely_gone += int(books.applied[slot]) == 2  # noqa: PLR2004  as the crew has it
        toll.perhaps_gone += int(books.applied[slot]) == 1
        toll.in_applies += books.killed(slot) is Doing.APPLY

    def _continue_those_due(self) -> None:
        def note(slot: int, seconds: float) -> None:
            self._books.stopped[slot] += seconds

        self._processes.continue_those_due(note)

    def _ask_all_to_end(self) -> None:
        if self._finishes:
            with shmacc.attach(_NAME) as acc:
                acc.finish()
        else:
            self._books.stop()

    def _take_the_rest(self) -> shmacc.Stats:
        plan, acc = self._plan, shmacc.attach(_NAME)
        with acc:
            if self._finishes:
                self._toll.failed += acc.running
                acc.restore(acc.state())
            if acc.num_accumulated():
                taken = acc.take(1, timeout=1.0)
                contents, contribute = plan.contents(taken), plan.gradients.contribute
                self._books.note(len(self._processes), taken, contents, contribute=contribute)
            with suppress(shmacc.errors.DeadlineExceededError):
                try:
                    acc.take(1, timeout=0, on_death="raise")
                except shmacc.errors.WorkerDiedError as error:
                    self._books.tell(len(self._processes), error.reasons or ())
            stats = acc.stats()
            acc.unlink()
        return stats
