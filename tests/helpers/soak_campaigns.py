"""The soak's campaigns: processes apply to one accumulator, and are killed and replaced meanwhile.

Workers and takers write down in the books what they are about to do, and how it ended. At the end
every accepted gradient must be in exactly one take, once, in all of its members.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
from helpers.apart import Apart
from helpers.books import MOST, Applied, Books, Count, Doing, Fate, Findings, audit
from helpers.soak_plans import MOST_WAITING, Plan

import shmacc
from shmacc import NEVER_STALE, errors

TAKERS: Final = 2  # processes that take, or chiefs
_BETWEEN_KILLS: Final = 0.004  # seconds, on the average
_SHORTEST_STOP, _LONGEST_STOP = 0.005, 0.06  # seconds, around the lock's slice of 20 ms
_STOP_SHARE: Final = 0.1  # the share of stops among stops and kills
_PATIENCE: Final = 30.0  # seconds for all processes to end once they are asked to
_PAUSE: Final = 0.002  # seconds
_NAME: Final = "soak"
_FINISHED: Final = 0.5  # share of campaigns that end by `finish`, not by a request
_LONGEST_BLOCK: Final = 0.005  # seconds in the block, after the round is noted
_TIMEOUT: Final = 0.25  # seconds of each wait, so that the request to stop is noticed
_REQUIRED: Final = (1, 1, 2, 4, 8, 16, 32)
_ON_DEATH: Final = ("wait", "raise")
_NEVER: Final = np.iinfo(np.int32).max  # later than any step
# Probabilities:
_OF_THIS_STEP: Final = 0.25  # a gradient is for the current step, and may become stale
_ONCE_MORE: Final = 0.1  # an accepted gradient with a contributor is applied again
_IN_A_ROUND: Final = 0.5  # a take is a round
_LOOKED_AT: Final = 0.1  # a taker takes a snapshot first
_GIVEN_UP: Final = 0.1  # a block raises
_RESTORED: Final = 0.3  # a chief restores the round that it holds
_FAILS: Final = 0.01  # a worker fails after an apply


class Campaign:
    """Carries out a plan for some seconds."""

    def __init__(self, plan: Plan) -> None:
        """Make the accumulator. `run` removes it."""
        self.title, self._plan = plan.title, plan
        jobs = [work] * plan.gradients.workers + [take] * TAKERS
        self._books = books = Books(len(jobs))
        self._processes = RandomKills(
            books, [partial(job, books, plan, _NAME, slot) for slot, job in enumerate(jobs)]
        )
        # Chiefs restore the round that they hold, and a restore would reopen a finished run.
        self._finishes = not plan.chief and random.random() < _FINISHED
        plan.create(_NAME).close()

    def run(self, seconds: float) -> Findings:
        """Run the campaign and audit it."""
        self._processes.work(seconds, self._ask_all_to_end)
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
                assert not acc.running
                acc.restore(acc.state())
            if acc.num_accumulated():
                plan.note(books, books.own, acc.take(1, timeout=1.0))
            with suppress(shmacc.errors.DeadlineExceededError):
                try:
                    acc.take(1, timeout=0, on_death="raise")
                except shmacc.errors.WorkerDiedError as error:
                    books.tell(books.own, error.reasons or ())
            stats = acc.stats()
            acc.unlink()
        return stats


class RandomKills:
    """Processes that are killed, stopped for a while, continued and replaced at random.

    Args:
        books: The books in which deaths are noted.
        jobs: The functions of the processes; a process's slot is its index here.
    """

    def __init__(self, books: Books, jobs: list[Callable[[], None]]) -> None:
        self._books, self._jobs = books, jobs
        self._processes: dict[int, Apart] = {}  # by slot
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
                assert self.ends(slot, deadline), f"process {slot} is stuck"
        finally:
            for slot in range(len(self._jobs)):
                self.kill(slot)

    def start(self, slot: int) -> None:
        self._processes[slot] = Apart(self._jobs[slot])

    def kill(self, slot: int) -> bool:
        """Kill the slot's process; return whether there was one. If it failed, raise its error."""
        process = self._processes.pop(slot, None)
        if process is None:
            return False
        self._stopped.pop(slot, None)
        with process:
            process.kill()
            self._books.killed(slot)
            if os.WIFEXITED(process.wait()):
                process.result()
        return True

    def _stop_for_a_while(self, slot: int) -> bool:
        """Stop the slot's process; return False if it is stopped already."""
        if slot in self._stopped:
            return False
        now = time.monotonic()
        os.kill(self._processes[slot].pid, signal.SIGSTOP)
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
                os.kill(self._processes[slot].pid, signal.SIGCONT)

    def ends(self, slot: int, deadline: float) -> bool:
        """Wait for a process; return whether it ended in time. If it failed, raise its error."""
        if slot not in self._processes:
            return True
        while not self._processes[slot].pipe.poll(_PAUSE / 2):
            if time.monotonic() >= deadline:
                return False
            self.continue_those_due()
        with self._processes.pop(slot) as process:
            process.result()
        return True


class _GivenUpError(Exception):
    """Leaves a round's block, which gives the round up."""


class FailedError(Exception):
    """Ends a worker's loop as a failure; the worker then attaches again."""


def work(books: Books, plan: Plan, name: str, slot: int) -> None:
    """Apply gradients one after another, and note them in the books; fail now and then."""
    while True:
        try:
            return _work(books, plan, name, slot)
        except FailedError:
            books.applied[slot] = Applied.NO


def _work(books: Books, plan: Plan, name: str, slot: int) -> None:
    acc = _attach(books, name, slot)
    with acc:
        while not books.stopping and acc.running:
            if acc.num_accumulated() > MOST_WAITING:
                time.sleep(_PAUSE / 2)
                continue
            turn = int(books.turn[slot])
            number = plan.gradients.number(slot, turn)
            if number >= MOST:
                return
            apply(books, plan, acc, slot, number)
            books.turn[slot] = turn + 1
            if books.applied[slot] == Applied.YES and random.random() < _FAILS:
                books.applied[slot] = Applied.FAILING
                books.add(slot, Count.WORKERS_FAILED)
                raise FailedError(slot)


def apply(books: Books, plan: Plan, acc: Any, slot: int, number: int) -> None:
    """Apply a gradient if its fate is still open.

    If a worker was killed in an apply, its successor applies the gradient again, for the same step.
    But a gradient without a contributor is not applied again: it could be in a round twice.
    """
    fate, contribute = books.fate[number], plan.gradients.contribute
    if fate > Fate.BEGUN or (fate == Fate.BEGUN and not contribute):
        return
    again = fate == Fate.BEGUN
    since = int(books.since[number]) if again else acc.global_step
    # A gradient for this step can be in no other round than this step's.
    of_this_step = contribute or random.random() < _OF_THIS_STEP
    books.since[number] = since
    books.until[number] = since if of_this_step else _NEVER
    books.attempts[number] += 1
    books.fate[number] = Fate.BEGUN
    step = since if of_this_step else NEVER_STALE
    books.applied[slot] = max(int(books.applied[slot]), Applied.PERHAPS)
    try:
        with books.timed(slot, Doing.APPLY):
            accepted = plan.apply(acc, number, step, _TIMEOUT if plan.capacity else None)
    except errors.DeadlineExceededError:
        books.fate[number] = Fate.TIMED_OUT
        return
    if accepted:
        books.until[number] = min(acc.global_step, int(books.until[number]))
        books.fate[number] = Fate.ACCEPTED
        books.applied[slot] = Applied.YES
        if contribute and random.random() < _ONCE_MORE:
            books.attempts[number] += 1
            plan.apply(acc, number, step, None)
        return
    books.fate[number] = Fate.IN_DOUBT if again else Fate.REFUSED
    if contribute:
        with suppress(errors.DeadlineExceededError, errors.FinishedError):
            acc.wait_step(since, timeout=_TIMEOUT)


def take(books: Books, plan: Plan, name: str, slot: int) -> None:
    """Take round after round, and note the rounds in the books."""
    acc = _attach(books, name, slot)
    with acc:
        while not books.stopping and acc.running:
            if random.random() < _LOOKED_AT:
                plan.check(books, slot, acc.snapshot())
                books.add(slot, Count.SNAPSHOTS)
            terms = {"timeout": _TIMEOUT, "on_death": random.choice(_ON_DEATH)}
            books.asking[slot] = terms["on_death"] == "raise"
            try:
                if plan.chief:
                    _have_round(books, plan, acc, slot, terms)
                else:
                    _take(books, plan, acc, slot, terms)
            except (errors.DeadlineExceededError, errors.FinishedError):
                pass
            except errors.WorkerDiedError as error:
                books.tell(slot, error.reasons or ())
            books.asking[slot] = 0


def _take(books: Books, plan: Plan, acc: Any, slot: int, terms: dict[str, Any]) -> None:
    """Take directly or by a round; note the taken gradients afterwards."""
    required = random.choice(_REQUIRED)
    books.at_risk[slot] = 1
    try:
        with books.timed(slot, Doing.TAKE):
            if random.random() < _IN_A_ROUND:
                with acc.round(required, **terms) as taken:
                    _be_in_block()
            else:
                taken = acc.take(required, **terms)
        plan.note(books, slot, taken)
    except _GivenUpError:
        books.add(slot, Count.GIVEN_UP)
    finally:
        books.at_risk[slot] = 0


def _have_round(books: Books, plan: Plan, acc: Any, slot: int, terms: dict[str, Any]) -> None:
    """Note the round in its block; then consume it, give it up, or restore its accumulator."""
    restored = False
    try:
        required = random.choice(_REQUIRED)
        with books.timed(slot, Doing.TAKE), acc.round(required, **terms) as taken:
            books.in_block[slot] = 1
            plan.note(books, slot, taken)
            if random.random() < _RESTORED:
                # Nothing changes in an open round, so the state is the same before and after.
                acc.restore(acc.state())
                restored = True
                books.add(slot, Count.RESTORES)
            _be_in_block()
    except _GivenUpError:
        books.add(slot, Count.GIVEN_UP)
    except errors.FailedPreconditionError:
        if not restored:  # a restore ends the round before the block does
            raise
    finally:
        books.in_block[slot] = 0


def _be_in_block() -> None:
    time.sleep(random.random() * _LONGEST_BLOCK)
    if random.random() < _GIVEN_UP:
        raise _GivenUpError


def _attach(books: Books, name: str, slot: int) -> Any:
    random.seed()
    with books.timed(slot, Doing.ATTACH):
        return shmacc.attach(name)
