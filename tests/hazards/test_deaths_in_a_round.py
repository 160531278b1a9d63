"""A process dies, stops or forks in a round's block or in an apply: no gradient is lost or doubled.

A round whose block did not end consumes nothing, and blocks nobody. Several applies run at a time.
Of a killed worker's gradients, the accumulator has all that were done, and at most the one that was
under way. Each worker counts what it has begun and done, in memory that it shares with the test.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.lock_holder import activity
from helpers.support import LONG, until

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    TensorSpec,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.numpy_model import Array


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums with two gradients in it."""
    with ConditionalAccumulator(np.float64, (), "rounds", reduction_type="SUM") as made:
        made.apply_grad(1.0)
        made.apply_grad(2.0)
        yield made
        made.unlink()


def hold(*, pipe: Pipe) -> int:
    """Be in the block until something is said."""
    with ConditionalAccumulator.attach("rounds") as own:
        with own.round(1) as taken:
            pipe.say(taken.value.item())
            pipe.hear()
        return int(own.global_step)


def take_two() -> tuple[float, int]:
    with ConditionalAccumulator.attach("rounds") as own:
        taken = own.take(2, timeout=LONG)
        return taken.value.item(), taken.step


def apply_later() -> bool:
    with ConditionalAccumulator.attach("rounds") as own:
        return bool(own.apply_grad(4.0, NEVER_STALE))


def test_the_killed_holders_gradients_go_to_the_next_in_line(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        assert holder.hear() == 3.0  # it has the round: only now may another ask for it
        with Apart(take_two) as next_one:
            until(lambda: acc.stats().waiting == 1)
            assert acc.stats().round_pid == holder.pid
            holder.kill()
            assert next_one.result(LONG) == (3.0, 0)
    assert (acc.stats().taken, acc.global_step) == (2, 1)


def test_a_killed_holders_step_is_open_again(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        holder.hear()
        assert not acc.apply_grad(4.0)
        holder.kill()
    assert acc.stats().round_pid is None
    acc.unseal()
    assert acc.apply_grad(4.0)
    with acc.round(3, timeout=0) as taken:
        assert taken.value.item() == 7.0


def test_applies_that_wait_for_a_killed_holder_go_on(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        holder.hear()
        with Apart(apply_later) as later:
            until(lambda: activity("rounds", later.pid) == "waits for the end of the round")
            holder.kill()
            assert later.result(LONG)
    assert acc.take(3, timeout=0).value.item() == 7.0


def test_a_stopped_holder_keeps_the_round(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        holder.hear()
        holder.signal(signal.SIGSTOP)
        assert not acc.apply_grad(4.0)
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(1, timeout=0.05)
        with pytest.raises(errors.DeadlineExceededError), acc.round(1, timeout=0.05):
            raise AssertionError
        holder.signal(signal.SIGCONT)
        holder.say()
        assert holder.result() == 1
    assert (acc.global_step, acc.num_accumulated()) == (1, 0)


def test_a_stopped_holder_does_not_keep_the_step(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        holder.hear()
        holder.signal(signal.SIGSTOP)
        assert acc.advance_step(3) == 2
        assert acc.apply_grad(4.0, 3)
        holder.signal(signal.SIGCONT)
        holder.say()
        with pytest.raises(errors.FailedPreconditionError, match="ended"):
            holder.result()
    assert (acc.global_step, acc.num_accumulated()) == (3, 1)


def test_a_holder_that_exits_in_order_gives_it_up(acc: ConditionalAccumulator) -> None:
    def leave() -> None:
        own = ConditionalAccumulator.attach("rounds")
        own.round(1).__enter__()
        own.close()

    with Apart(leave) as holder:
        holder.result()
    assert acc.take(2, timeout=0).value.item() == 3.0


def test_the_end_of_the_block_is_not_a_forked_childs(acc: ConditionalAccumulator) -> None:
    block = acc.round(2)
    block.__enter__()
    with pytest.raises(errors.FailedPreconditionError):
        run_apart(lambda: block.__exit__(None, None, None))
    with pytest.raises(errors.DeadlineExceededError):  # it waits for its parent's end
        run_apart(lambda: acc.apply_grad(4.0, 1, timeout=0.05))
    run_apart(acc.close)
    assert (acc.global_step, acc.stats().round_pid) == (0, os.getpid())
    block.__exit__(None, None, None)
    assert acc.global_step == 1


# --- in lanes -------------------------------------------------------------------------------------


NAME: Final = "lanes"
WORKERS: Final = 4
STEPS: Final = 1 << 20  # more than any machine gets to; those that it does not cost nothing


def shared_array(*shape: int) -> Array:
    """Zeros that forked processes share."""
    size = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, 8 * size), np.int64, size).reshape(shape)


@dataclass(frozen=True)
class Books:
    """What every process writes down.

    Attributes:
        begun: Gradients that each worker has begun to apply.
        done: Those that it has applied.
        taken: Of each step, what the chief had in its round of each worker.
    """

    begun: Array = field(default_factory=lambda: shared_array(WORKERS))
    done: Array = field(default_factory=lambda: shared_array(WORKERS))
    taken: Array = field(default_factory=lambda: shared_array(STEPS, WORKERS))


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[AccumulatorGroup]:
    """A group in whose members each worker has a row, or a number."""
    specs = {
        "rows": IndexedSlicesSpec((WORKERS, 40), "float64"),
        "array": TensorSpec((WORKERS,), "int64"),
    }
    with AccumulatorGroup(specs, NAME, reduction_type="SUM", lanes=request.param) as made:
        yield made
        made.unlink()


def gradient(worker: int) -> dict[str, Any]:
    """One of this worker's in both members."""
    array = np.zeros(WORKERS, np.int64)
    array[worker] = 1
    return {"rows": ([worker], np.ones((1, 40))), "array": array}


def apply_for_ever(books: Books, worker: int) -> None:
    """Apply one gradient after the other."""
    with AccumulatorGroup.attach(NAME) as own:
        mine = gradient(worker)
        while True:
            books.begun[worker] = books.done[worker] + 1
            assert own.apply(mine, NEVER_STALE)
            books.done[worker] += 1


def counted(taken: Any) -> Array:
    """How many gradients of each worker are in it: as many in the one member as in the other."""
    if not taken.count:
        return np.zeros(WORKERS, np.int64)
    array, rows = taken["array"].value, np.zeros(WORKERS, np.int64)
    rows[taken["rows"].indices] = taken["rows"].row_counts
    assert rows.tolist() == array.tolist(), "a gradient is torn"
    assert (taken["rows"].values == rows[taken["rows"].indices, None]).all()
    assert taken.count == rows.sum()
    return rows


def have_rounds_for_ever(books: Books) -> None:
    """Have one round after the other, and write down what was in it before it ends."""
    with AccumulatorGroup.attach(NAME) as own:
        while True:
            with own.round(5) as taken:
                books.taken[taken.step] = counted(taken)


@pytest.mark.parametrize("group", [2, 4], indirect=True, ids=lambda lanes: f"{lanes} lanes")
def test_all_that_was_applied_is_taken_once(group: AccumulatorGroup) -> None:
    """Workers and the chief are killed; a round that was held when its holder died is whole."""
    books, in_doubt, rng = Books(), [0] * WORKERS, random.Random(40)
    start = [partial(Apart, apply_for_ever, books, i) for i in range(WORKERS)]
    start.append(partial(Apart, have_rounds_for_ever, books))
    chiefs = 0

    def kill(who: int) -> None:
        nonlocal chiefs
        processes[who].kill()
        chiefs += who == WORKERS
        if who < WORKERS:
            books.begun[who] = max(books.begun[who], books.done[who])
            in_doubt[who] += books.begun[who] - books.done[who]

    with ExitStack() as stack:
        processes = [stack.enter_context(begin()) for begin in start]
        for _ in range(16):
            applied = group.stats().applied + rng.randrange(1, 20)
            until(lambda applied=applied: group.stats().applied >= applied)  # type: ignore[misc]
            who = rng.randrange(WORKERS + 1)
            kill(who)
            processes[who] = stack.enter_context(start[who]())
        assert chiefs
        until(lambda: group.global_step > 0)
        for who in range(WORKERS + 1):
            kill(who)
    step = group.global_step
    assert 0 < step < STEPS
    rest = counted(group.take_partial(0, timeout=LONG))
    found = books.taken[:step].sum(axis=0) + rest
    for worker in range(WORKERS):
        assert 0 <= found[worker] - books.done[worker] <= in_doubt[worker]
    stats = group.stats()
    assert stats.applied == found.sum() == stats.taken
    # And each lane can be used.
    for contributor in range(group.lanes):
        assert group.apply(gradient(0), NEVER_STALE, contributor=contributor)
    assert counted(group.take(group.lanes, timeout=0)).tolist() == [group.lanes, 0, 0, 0]
