"""One accumulator, and the processes that are killed and replaced while they use it."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import shmacc
from shmacc_soak.audit import audit
from shmacc_soak.books import Books, Count
from shmacc_soak.crew import TAKERS, Crew
from shmacc_soak.work import take, work

if TYPE_CHECKING:
    from shmacc_soak.books import Findings
    from shmacc_soak.plans import Plan

_NAME: Final = "soak"
_FINISHED: Final = 0.5  # share of campaigns that end by `finish`, not by a request


class Campaign:
    """A plan that is carried out for some seconds."""

    def __init__(self, plan: Plan) -> None:
        """Make the accumulator; it is removed by `run`."""
        self.title, self._plan = plan.title, plan
        jobs = [work] * plan.gradients.workers + [take] * TAKERS
        self._books = books = Books(len(jobs))
        self._crew = Crew(
            books, [partial(job, books, plan, _NAME, slot) for slot, job in enumerate(jobs)]
        )
        # Chiefs restore the round that they hold, which would start a finished run again.
        self._finishes = not plan.chief and random.random() < _FINISHED
        plan.create(_NAME).close()

    def run(self, seconds: float) -> Findings:
        """Run the campaign and audit it."""
        self._crew.work(seconds, self._ask_all_to_end)
        return audit(self._books, self._take_the_rest())

    def _ask_all_to_end(self) -> None:
        if self._finishes:
            with shmacc.attach(_NAME) as acc:
                acc.finish()
        else:
            self._books.stop()

    def _take_the_rest(self) -> shmacc.Stats:
        plan, books, acc = self._plan, self._books, shmacc.attach(_NAME)
        with acc:
            if self._finishes:
                books.add(books.own, Count.FAILED, acc.running)
                acc.restore(acc.state())
            if acc.num_accumulated():
                books.note(books.own, plan, acc.take(1, timeout=1.0))
            with suppress(shmacc.errors.DeadlineExceededError):
                try:
                    acc.take(1, timeout=0, on_death="raise")
                except shmacc.errors.WorkerDiedError as error:
                    books.tell(books.own, error.reasons or ())
            stats = acc.stats()
            acc.unlink()
        return stats
