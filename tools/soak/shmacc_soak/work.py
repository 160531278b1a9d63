"""The work of a campaign's processes until they are killed, or asked to stop."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmacc
from shmacc import NEVER_STALE, errors
from shmacc_soak.books import Applied, Count, Doing, Fate
from shmacc_soak.members import MOST
from shmacc_soak.plans import MOST_WAITING

if TYPE_CHECKING:
    from shmacc_soak.books import Books
    from shmacc_soak.plans import Plan

_PAUSE: Final = 0.001  # seconds that a worker pauses while many gradients wait
_LONGEST_BLOCK: Final = 0.005  # seconds in the block, after the round is noted
_TIMEOUT: Final = 0.25  # seconds of each wait, so that the request to stop is noticed
_REQUIRED: Final = (1, 1, 2, 4, 8, 16, 32)
_ON_DEATH: Final = ("wait", "raise")
_NEVER: Final = np.iinfo(np.int32).max  # later than any step
# Probabilities:
_OF_THIS_STEP: Final = 0.25  # a gradient is for the current step, so it may be refused
_ONCE_MORE: Final = 0.1  # an accepted gradient with a contributor is applied again
_IN_A_ROUND: Final = 0.5  # a take is a round
_LOOKED_AT: Final = 0.1  # a taker takes a snapshot first
_GIVEN_UP: Final = 0.1  # a block raises
_RESTORED: Final = 0.3  # a chief restores the round that it holds
_FAILS: Final = 0.01  # a worker fails after an apply


class _GivenUpError(Exception):
    """Raised in a round's block."""


class FailedError(Exception):
    """Ends a worker's turn, which then begins again."""


def work(books: Books, plan: Plan, name: str, slot: int) -> None:
    """Apply gradients, one after another, and keep accounts; fail now and then."""
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
                time.sleep(_PAUSE)
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
    """Apply a gradient, unless its fate is settled.

    A worker that was killed in an apply applies a gradient with a contributor once more, for the
    same step. Without a contributor it is not applied again: nobody can say whether it is in.
    """
    fate, contribute = books.fate[number], plan.gradients.contribute
    if fate > Fate.BEGUN or (fate == Fate.BEGUN and not contribute):
        return
    again = fate == Fate.BEGUN
    since = int(books.since[number]) if again else acc.global_step
    # A gradient for this step is in the round of this step or in none.
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
    """Take round after round, and keep accounts."""
    acc = _attach(books, name, slot)
    with acc:
        while not books.stopping and acc.running:
            if random.random() < _LOOKED_AT:
                books.check(slot, plan, acc.snapshot())
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
    """Take directly or by a round; note afterwards what was taken."""
    required = random.choice(_REQUIRED)
    books.at_risk[slot] = 1
    try:
        with books.timed(slot, Doing.TAKE):
            if random.random() < _IN_A_ROUND:
                with acc.round(required, **terms) as taken:
                    _be_in_block()
            else:
                taken = acc.take(required, **terms)
        books.note(slot, plan, taken)
    except _GivenUpError:
        books.add(slot, Count.GIVEN_UP)
    finally:
        books.at_risk[slot] = 0


def _have_round(books: Books, plan: Plan, acc: Any, slot: int, terms: dict[str, Any]) -> None:
    """Note the round in its block; then end it, give it up, or restore its accumulator."""
    restored = False
    try:
        required = random.choice(_REQUIRED)
        with books.timed(slot, Doing.TAKE), acc.round(required, **terms) as taken:
            books.in_block[slot] = 1
            books.note(slot, plan, taken)
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
