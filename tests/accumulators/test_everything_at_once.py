"""Threads of several processes apply, take, time out, cancel and close, all at once.

Each accepted gradient has its own row, and exactly one take must return that row. The gradient also
adds its number to one of twenty rows that all gradients share.
"""

import contextlib
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Crew
from helpers.books import Books, Fate
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection

pytestmark = pytest.mark.threads

SHARED: Final = 10**12
PROCESSES: Final = 3
TIMEOUTS: Final = (0, 0.0005, 0.003, 0.02)


def enter(books: Books, taken: Any) -> None:
    """Check that each gradient of a result is whole, and record that it was taken."""
    if not taken.count:
        return
    own = taken.indices < SHARED
    numbers, sums = taken.indices[own], taken.values[:, 0]
    assert len(numbers) == taken.count
    assert (sums[own] == 1).all()
    assert sums[~own].sum() == numbers.sum()
    assert not books.taken_at[numbers].any(), "a gradient was taken twice"
    books.taken_at[numbers] = 1


def apply(acc: Any, books: Books, rng: random.Random, identity: int) -> None:
    step = shmacc.NEVER_STALE if rng.random() < 0.5 else acc.global_step
    rows = [identity, SHARED + rng.randrange(20)]
    if acc.apply_grad(rows, [[1], [identity]], local_step=step):
        books.fate[identity] = Fate.ACCEPTED


def take(acc: Any, books: Books, rng: random.Random, _identity: int) -> None:
    enter(books, acc.take(rng.randint(1, 6), timeout=rng.choice(TIMEOUTS)))


def pass_on(acc: Any, books: Books, rng: random.Random, _identity: int) -> None:
    """Take a partial; half of the time apply it again, otherwise record it."""
    partial = acc.take_partial(rng.randint(0, 3), timeout=rng.choice(TIMEOUTS))
    if rng.random() < 0.5 or not acc.apply_partial(partial, shmacc.NEVER_STALE):
        enter(books, partial)


def take_and_close(acc: Any, books: Books, rng: random.Random, _identity: int) -> None:
    """Take through a handle that another thread closes at about the same time."""
    handle: Any = shmacc.attach(acc.shared_name)
    closing = threading.Timer(rng.random() * 0.004, handle.close)
    closing.start()
    try:
        enter(books, handle.take(rng.randint(1, 3), timeout=0.05))
    finally:
        closing.join()


def cancel(acc: Any, _books: Books, rng: random.Random, _identity: int) -> None:
    time.sleep(rng.random() * 0.005)
    acc.cancel()


ROLES: Final[dict[Callable[..., None], int]] = {
    apply: 300, take: 100, pass_on: 100, take_and_close: 15, cancel: 15,
}  # fmt: skip
REFUSALS: Final = (
    *(errors.DeadlineExceededError, errors.CancelledError, errors.FailedPreconditionError),
)


def work(books: Books, name: str, number: int) -> None:
    """Run each role in a thread of this process, and `apply` in a second thread as well."""

    def play(place: int, role: Callable[..., None], times: int) -> None:
        rng = random.Random(10 * number + place)
        acc: Any = shmacc.attach(name)
        with acc:
            for i in range(times):
                with contextlib.suppress(*REFUSALS):
                    role(acc, books, rng, (10 * number + place) * 10_000 + i)

    cast = [*ROLES.items(), (apply, ROLES[apply])]
    with ThreadPoolExecutor(len(cast)) as pool:
        playing = [pool.submit(play, place, *part) for place, part in enumerate(cast)]
    for thread in playing:
        thread.result()


def test_each_accepted_gradient_is_taken_once(crew: Crew) -> None:
    books = Books(PROCESSES)
    with SparseConditionalAccumulator("int64", shared_name="all", reduction_type="SUM") as acc:
        for child in [crew.start(work, books, "all", number) for number in range(PROCESSES)]:
            child.result()
        enter(books, acc.take_partial(0, timeout=LONG))
        stats = acc.stats()
        acc.unlink()
    assert np.array_equal(books.fate == Fate.ACCEPTED, books.taken_at == 1)
    assert (stats.num_accumulated, stats.waiting, stats.attached) == (0, 0, 1)
    assert stats.applied == stats.taken


# With this many rows, an apply lasts longer than a waiting process polls before it sleeps.
ROWS: Final = 10_000


def test_two_processes_that_apply_all_the_time_take_turns() -> None:
    """An apply in a loop gives the lock back and wants it again within microseconds.

    The other process sleeps, and wakes up more slowly than that. Without a fair lock, the first
    process could go on for seconds.
    """
    fork, processes = multiprocessing.get_context("fork"), 2
    begin, end, done = fork.Barrier(processes), fork.Event(), fork.RawArray("q", processes)

    def apply_often(number: int) -> None:
        acc: Any = shmacc.attach("fair")
        indices, values = np.arange(ROWS), np.ones((ROWS, 64), np.float32)
        begin.wait(LONG)
        while not end.is_set():
            assert acc.apply_grad(indices, values, local_step=shmacc.NEVER_STALE)
            done[number] += 1
            if done[number] >= 1_500:
                end.set()

    with SparseConditionalAccumulator("float32", (ROWS, 64), "fair", reduction_type="SUM") as acc:
        with Apart(apply_often, 0) as one, Apart(apply_often, 1) as other:
            one.result()
            other.result()
        acc.unlink()
        assert acc.stats().num_accumulated == sum(done)
        assert min(done) > max(done) / 10


# A reader without the lock sees one whole commit, however many commits happen meanwhile. Readers
# and writers are threads of one process, so that `make tsan` sees every word that they share.
ROUNDS: Final = 40


MOST: Final = np.iinfo(np.int64).max


def add_rows(acc: Any, number: int) -> None:
    """Add old and new rows, so that the undo log grows, which is a commit of its own."""
    rows = np.arange(number % 7, 40 * (number % ROUNDS + 1), 3)
    acc.apply_grad(rows, np.ones((len(rows), 2), np.int64), shmacc.NEVER_STALE)


def overflow(acc: Any, _number: int) -> None:
    """Change rows in place and undo the change: the undo is another kind of commit."""
    rows = np.arange(10**6, 10**6 + 8)  # no other part uses these rows
    values = np.ones((8, 2), np.int64)
    for last in (1, MOST):  # the second overflows unless a take came first
        values[-1] = last
        with contextlib.suppress(errors.OutOfRangeError):
            acc.apply_grad(rows, values, shmacc.NEVER_STALE)


def add_array(acc: Any, number: int) -> None:
    """Add dense arrays, with another shape in each round."""
    try:
        acc.apply_grad(np.ones(number % 5 + 1, np.int64), shmacc.NEVER_STALE)
    except errors.InvalidArgumentError:  # the round's first gradient has another shape
        assert acc.num_accumulated() >= 0


def empty(acc: Any, number: int) -> None:
    """Take all gradients, or throw them away."""
    if number % 3:
        with contextlib.suppress(errors.CancelledError):
            acc.take_partial(0)
    else:
        acc.advance_step(acc.global_step + 1)


def look(acc: Any, _number: int) -> None:
    """Compare counters that agree only if they are from one commit."""
    stats = acc.stats()
    assert stats.applied == stats.taken + stats.discarded + stats.num_accumulated
    assert stats.recoveries == 0
    step = acc.global_step
    try:
        assert acc.wait_step(step, timeout=0.001) > step
    except errors.DeadlineExceededError:
        assert acc.global_step >= step


def describe(acc: Any, _number: int) -> None:
    """Read processes, waiting takes, the round's shape and rows from outside."""
    seen = inspection.describe(acc.shared_name)
    assert seen.stats.num_accumulated >= 0
    inspection.check(acc.shared_name)


def wait_a_little(acc: Any, number: int) -> None:
    """Wait in the queue until the timeout or a cancel."""
    with pytest.raises((errors.DeadlineExceededError, errors.CancelledError)):
        acc.take_partial(10**9, timeout=0.001)
    if number % 4 == 0:
        acc.cancel()


def open_and_close(acc: Any, _number: int) -> None:
    """Use a handle that another thread closes."""
    handle: Any = shmacc.attach(acc.shared_name)
    closing = threading.Thread(target=handle.close)
    closing.start()
    with contextlib.suppress(errors.FailedPreconditionError):
        assert handle.num_accumulated() >= 0
    closing.join()


ANY: Final = (empty, look, look, describe, wait_a_little, open_and_close)


@pytest.mark.parametrize(("kind", "parts"), [
    (SparseConditionalAccumulator, (add_rows, add_rows, overflow)),
    (ConditionalAccumulator, (add_array, add_array)),
])  # fmt: skip
def test_readers_without_the_lock_see_one_commit(kind: Any, parts: tuple[Any, ...]) -> None:
    parts += ANY
    together = threading.Barrier(len(parts))

    def play(part: Callable[[Any, int], None]) -> None:
        together.wait(LONG)
        for number in range(ROUNDS):
            part(acc, number)

    with (
        kind("int64", shared_name="seen", reduction_type="SUM") as acc,
        ThreadPoolExecutor(len(parts)) as pool,
    ):
        for played in [pool.submit(play, part) for part in parts]:
            played.result()
        acc.unlink()
