"""Real processes, under every start method, share nothing but names and pickled handles."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.apart import Apart, Crew, every_start_method
from helpers.lock_holder import sleeps_in
from helpers.support import LONG, stop, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

pytestmark = pytest.mark.threads


def apply_one(acc: ConditionalAccumulator, value: float, step: int = 0) -> bool:
    with acc:
        return acc.apply_grad(value, step)


def open_and_apply(value: float) -> bool:
    """Create the accumulator or attach to it, and apply."""
    with ConditionalAccumulator(np.float64, (), "acc", reduction_type="SUM") as acc:
        return acc.apply_grad(value)


def open_otherwise() -> None:
    SparseConditionalAccumulator(np.float64, (), "acc").close()


def take_one(num_required: int, timeout: float = LONG) -> tuple[float, int, int]:
    with ConditionalAccumulator.attach("acc") as acc:
        taken = acc.take(num_required, timeout=timeout)
        return taken.value.item(), taken.count, taken.step


@every_start_method
def test_processes_meet_by_pickled_handle_and_name(crew: Crew, acc: ConditionalAccumulator) -> None:
    children = [crew.start(apply_one, acc, 1.0)]
    children.append(crew.start(open_and_apply, 2.0))
    assert [child.result() for child in children] == [True, True]
    # Now the parent applies and a child takes.
    acc.apply_grad(4.0)
    taker = crew.start(take_one, 3)
    assert taker.result() == (7.0, 3, 0)
    assert acc.global_step == 1
    assert crew.start(apply_one, acc, 1.0, 0).result() is False
    assert acc.stats().dropped == 1


@pytest.mark.parametrize("crew", ["spawn"], indirect=True)
def test_private_handles_and_child_errors_pickle(crew: Crew, acc: ConditionalAccumulator) -> None:
    with ConditionalAccumulator(np.float32) as private:
        child = crew.start(apply_one, private, 1.0)
        otherwise = crew.start(open_otherwise)
        assert private.take_grad(1, timeout=LONG).item() == 1.0
        assert child.result()
        # The child closed its handle and ended; the creator's segment remains.
        assert private.apply_grad(1.0, local_step=1)
    with pytest.raises(errors.InvalidArgumentError):
        otherwise.result()
    assert acc.num_accumulated() == 0


# Takes of all processes wait in one queue: its order, its head, and every way to leave it.


def queue_up(crew: Crew, acc: ConditionalAccumulator, *numbers: int) -> list[Apart]:
    """For each number, start a process that takes that many gradients, in this order."""
    takers = []
    for place, number in enumerate(numbers, start=1):
        takers.append(crew.start(take_one, number))
        until(lambda place=place: acc.stats().waiting == place)  # type: ignore[misc]
    return takers


def test_takes_are_served_in_order(crew: Crew, acc: ConditionalAccumulator) -> None:
    takers = queue_up(crew, acc, 1, 1, 2, 1)
    for step, value in enumerate([1.0, 2.0]):
        assert acc.apply_grad(value, local_step=step)
    # The third take is next, and needs two gradients.
    for value in (4.0, 8.0):
        assert acc.apply_grad(value, local_step=2)
    assert acc.apply_grad(16.0, local_step=3)
    results = [taker.result() for taker in takers]
    assert results == [(1.0, 1, 0), (2.0, 1, 1), (12.0, 2, 2), (16.0, 1, 3)]


def test_the_head_of_the_queue_blocks_later_takes(crew: Crew, acc: ConditionalAccumulator) -> None:
    first, second = queue_up(crew, acc, 3, 1)
    for value in (1.0, 2.0):
        acc.apply_grad(value)
        # The second take would have enough, but it is the first take's turn.
        assert acc.stats().waiting == 2
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(1, timeout=0)
    assert acc.num_accumulated() == 2
    acc.apply_grad(4.0)
    assert first.result() == (7.0, 3, 0)
    assert not second.pipe.poll()
    assert acc.apply_grad(8.0, local_step=1)
    assert second.result() == (8.0, 1, 1)


def test_if_the_head_times_out_the_next_is_served(crew: Crew, acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    first = crew.start(take_one, 3, 0.4)
    until(lambda: acc.stats().waiting == 1 or first.pipe.poll())
    second = crew.start(take_one, 1)
    with pytest.raises(errors.DeadlineExceededError):
        first.result()
    # The first take consumed nothing, and the second was served without a new apply.
    assert second.result() == (1.0, 1, 0)
    assert acc.stats().waiting == 0


def test_take_partial_of_0_does_not_queue_up(crew: Crew, acc: ConditionalAccumulator) -> None:
    (first,) = queue_up(crew, acc, 2)
    for seal in (False, True):
        acc.apply_grad(1.0)
        partial = acc.take_partial(0, timeout=0, seal=seal)
        assert (partial.count, partial.value.item(), acc.stats().sealed) == (1, 1.0, seal)
        assert acc.take_partial(0, timeout=0).count == 0
        assert acc.stats().waiting == 1
    acc.unseal()
    for value in (2.0, 4.0):
        acc.apply_grad(value)
    assert first.result() == (6.0, 2, 0)


def test_take_partial_of_0_leaves_the_heads_round(crew: Crew, acc: ConditionalAccumulator) -> None:
    """The head owns the round even before it wakes up."""
    acc.apply_grad(1.0)
    (first,) = queue_up(crew, acc, 2)
    until(lambda: sleeps_in("acc", first.pid, "waits in the queue"))
    stop(first.pid)
    acc.apply_grad(2.0)
    assert acc.take_partial(0, timeout=0).count == 0
    assert acc.take_partial(0, timeout=0, seal=True).count == 0
    assert acc.num_accumulated() == 2
    assert not acc.apply_grad(4.0)
    os.kill(first.pid, signal.SIGCONT)
    assert first.result() == (3.0, 2, 0)
    acc.unseal()
    assert acc.apply_grad(8.0, local_step=1)
    assert acc.take_partial(0, timeout=0).count == 1


def test_cancel_ends_waits_in_every_process(crew: Crew, acc: ConditionalAccumulator) -> None:
    takers = queue_up(crew, acc, 1, 2)
    with shmacc.attach("acc") as other:
        other.cancel()
    for taker in takers:
        with pytest.raises(errors.CancelledError, match="was cancelled"):
            taker.result()
    assert acc.stats().waiting == 0
    # The cancel leaves no lasting state.
    (later,) = queue_up(crew, acc, 1)
    acc.apply_grad(5.0)
    assert later.result() == (5.0, 1, 0)


def test_close_ends_only_this_handles_takes(crew: Crew, acc: ConditionalAccumulator) -> None:
    mine = shmacc.attach("acc")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(mine.take, 1, timeout=LONG)]
        waits.append(pool.submit(mine.wait_step, 0, timeout=LONG))
        until(lambda: acc.stats().waiting >= 1)
        behind = acc.stats().waiting + 1
        theirs = crew.start(take_one, 1)
        until(lambda: acc.stats().waiting == behind)
        mine.close()
        for wait in waits:
            with pytest.raises((errors.CancelledError, errors.FailedPreconditionError)):
                wait.result()
        with pytest.raises(errors.CancelledError, match="was cancelled"):
            waits[0].result()
    acc.apply_grad(3.0)
    assert theirs.result() == (3.0, 1, 0)
