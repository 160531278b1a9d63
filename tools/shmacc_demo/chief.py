"""The chief: starts the workers, takes their gradients, updates the parameters, keeps accounts."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from typing import TYPE_CHECKING, Self

import shmacc
from shmacc_demo import exchange
from shmacc_demo.board import GIVEN, NOT_YET, Board
from shmacc_demo.crew import Crew
from shmacc_demo.exchange import PARTS, Exchange
from shmacc_demo.ledger import Ledger
from shmacc_demo.model import Adagrad
from shmacc_demo.plan import Outcome, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from shmacc_demo.corpus import Corpus
    from shmacc_demo.model import Gradient
    from shmacc_demo.plan import Plan

_SLICE = 0.05
"""Seconds that the chief waits for gradients before it looks whether a worker has died."""

_KILLINGS = 12
"""About how many workers ``--kill`` kills in a run."""

_WATCH = 0.5
"""Seconds that the chief watches a worker to catch it in the middle of an apply."""

_BLINK = 20e-6
"""Seconds between two looks at it; an apply takes some ten times as long."""

_ATTEMPTS = 5
"""So often it tries; after that, on a very busy machine, it strikes without looking ..."""

_BLINDLY = 5e-3
"""... within this many seconds from the beginning of a step."""


class Chief:
    """A run with processes; a context manager that leaves nothing behind."""

    def __init__(self, plan: Plan, corpus: Corpus) -> None:
        self._plan = plan
        self._corpus = corpus
        self._undo = contextlib.ExitStack()
        self._dice = random.Random(plan.seed)
        self._attempts = self._killed = self._deaths = self._redone = self._spared = 0

    def __enter__(self) -> Self:
        """Put up the board and the accumulators."""
        plan, corpus = self._plan, self._corpus
        run = f"demo-{os.getpid()}-{secrets.token_hex(4)}"
        with self._undo:
            self._board = Board.create(plan, corpus)
            self._undo.callback(self._board.close)
            # Before they are made, so that no interruption can fall between.
            self._undo.callback(exchange.remove, run)
            self._exchange = Exchange.create(run, len(corpus.words), plan.width, plan.workers)
            self._undo.callback(self._exchange.close)
            self._crew = Crew(run, self._board.path)
            self._undo.callback(self._crew.dismiss)
            self._undo = self._undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers, then remove the names."""
        self._undo.close()

    def train(self) -> Iterator[Progress]:
        """Train, step after step."""
        plan, parameters = self._plan, self._board.parameters
        parameters.fill(plan.seed)
        optimizer = Adagrad(parameters, plan.rate, plan.steps)
        for worker in range(plan.workers):
            self._start(worker, 0, PARTS)
        for step in range(plan.steps):
            self._replace_the_fallen(step)
            if self._killed < self._due(step) and self._kill_one(step):
                self._killed += 1
                self._replace_the_fallen(step)
            mean = self._take(step)
            optimizer.follow(mean, step)
            self._exchange.advance(step + 1)
            yield Progress(
                step=step + 1,
                loss=mean.loss,
                # All batches are cut from the same number of words.
                words=mean.words * self._exchange.rest.taken,
                applied=sum(self._board.accepted().values()),
                dropped=self._board.refused(),
                alive=self._crew.alive(),
                killed=self._killed,
            )
        self._crew.finish(timeout=30)

    def outcome(self) -> Outcome:
        """Say what the run came to, when it is over."""
        plan = self._plan
        ledger = Ledger(
            accounts=self._exchange.accounts(self._board.accepted()),
            deaths=self._deaths,
            redone=self._redone,
            spared=self._spared,
            quota=None if plan.backup else plan.workers * plan.steps,
        )
        return Outcome(self._board.parameters, ledger)

    def _take(self, step: int) -> Gradient:
        required = self._plan.workers - self._plan.backup
        while True:
            with contextlib.suppress(shmacc.errors.DeadlineExceededError):
                return self._exchange.take(required, _SLICE)
            self._replace_the_fallen(step)

    def _replace_the_fallen(self, step: int) -> None:
        for worker in self._crew.fallen():
            missing = self._exchange.missing(worker, step)
            self._deaths += 1
            self._redone += len(missing)
            self._spared += len(PARTS) - len(missing)
            self._start(worker, step, missing)

    def _start(self, worker: int, step: int, parts: tuple[str, ...]) -> None:
        self._board.notes["step"][worker] = NOT_YET
        self._crew.start(worker, step, parts)

    def _due(self, step: int) -> int:
        """Say how many workers should have been killed by now."""
        steps = self._plan.steps
        return step * min(_KILLINGS, steps // 4) // steps if self._plan.kill else 0

    def _kill_one(self, step: int) -> bool:
        """Kill a worker in the middle of an apply, or after some vain attempts anywhere.

        Returns:
            False if it was too quick this time.
        """
        victim = self._dice.randrange(self._plan.workers)
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            time.sleep(self._dice.uniform(0, _BLINDLY))
        elif not self._catch(victim, step):
            return False
        self._crew.kill(victim)
        self._attempts = 0
        return True

    def _catch(self, victim: int, step: int) -> bool:
        notes = self._board.notes[victim]
        first = self._dice.randrange(len(PARTS)) + 1
        deadline = time.monotonic() + _WATCH
        while time.monotonic() < deadline and notes["step"] != NOT_YET:
            if notes["step"] == step and notes["giving"] >= first:
                return bool(notes["giving"] != GIVEN)
            # Asleep most of the time, and so scheduled at once when it wakes; a process that polled
            # would have used up its time slice just when there is something to see.
            time.sleep(_BLINK)
        return False
