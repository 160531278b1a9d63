"""The work of a campaign's processes until they are killed, or asked to stop."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmacc
from shmacc import NEVER_STALE, errors
from shmacc_soak.books import MOST, Doing, Fate
from shmacc_soak.plans import MOST_WAITING

if TYPE_CHECKING:
    from shmacc_soak.books import Books
    from shmacc_soak.plans import Plan

_PAUSE: Final = 0.001  # of workers that hold back
_IN_A_ROUND: Final = 0.5  # of takes
_LONGEST_BLOCK: Final = 0.005  # seconds
_TIMEOUT: Final = 0.25  # of takes, so that takers notice the request to stop
_REQUIRED: Final = (1, 1, 2, 4, 8, 16, 32)
_OF_THIS_STEP: Final = 0.25  # so often a gradient is for the present step, and may be refused


def number_of(slot: int, turn: int, workers: int) -> int:
    """Return the number of a worker's turn-th gradient."""
    return turn * workers + slot


def work(books: Books, plan: Plan, name: str, slot: int, workers: int) -> None:
    """Apply gradient after gradient, and keep accounts."""
    acc = _attach(books, name, slot)
    with acc:
        while not books.stopping:
            if acc.num_accumulated() > MOST_WAITING:
                time.sleep(_PAUSE)
                continue
            turn = int(books.turn[slot])
            number = number_of(slot, turn, workers)
            if number >= MOST:
                return
            books.turn[slot] = turn + 1
            gradient = plan.gradient(number, slot, turn)
            since = acc.global_step
            step = since if random.random() < _OF_THIS_STEP else NEVER_STALE
            books.since[number] = since
            books.fate[number] = Fate.BEGUN
            with books.timed(slot, Doing.APPLY):
                accepted = acc.apply_grad(*gradient, local_step=step)
            books.until[number] = acc.global_step
            books.fate[number] = Fate.ACCEPTED if accepted else Fate.REFUSED


def take(books: Books, plan: Plan, name: str, slot: int) -> None:
    """Take round after round, and keep accounts."""
    acc = _attach(books, name, slot)
    with acc:
        while not books.stopping:
            books.at_risk[slot] = 1
            try:
                with books.timed(slot, Doing.TAKE):
                    taken = _take(acc, random.choice(_REQUIRED))
            except errors.DeadlineExceededError:
                pass
            else:
                note(books, plan, slot, taken)
            books.at_risk[slot] = 0


def _take(acc: Any, required: int) -> Any:
    """Take at once, or in a round's block: a death in there consumes nothing."""
    if random.random() < _IN_A_ROUND:
        with acc.round(required, timeout=_TIMEOUT) as taken:
            time.sleep(random.random() * _LONGEST_BLOCK)
            return taken
    return acc.take(required, timeout=_TIMEOUT)


def note(books: Books, plan: Plan, slot: int, taken: Any) -> None:
    """Record a take in the accounts."""
    contents = plan.contents(taken)
    books.torn[slot] += not contents.whole
    books.doubled[slot] += np.count_nonzero(books.taken_at[contents.numbers])
    books.taken_at[contents.numbers] = taken.step + 1
    books.logged[taken.step] = taken.count + 1


def _attach(books: Books, name: str, slot: int) -> Any:
    random.seed()
    with books.timed(slot, Doing.ATTACH):
        return shmacc.attach(name)
