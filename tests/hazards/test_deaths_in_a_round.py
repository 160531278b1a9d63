"""A process dies, stops or forks in a round's block: the round consumes nothing, and blocks nobody.

test_soak.py kills processes at random in rounds and applies, in several lanes.
"""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.lock_holder import activity
from helpers.support import LONG, until

from shmacc import NEVER_STALE, ConditionalAccumulator, errors


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums with two gradients in it."""
    with ConditionalAccumulator(np.float64, (), "rounds", reduction_type="SUM") as made:
        made.apply_grad(1.0)
        made.apply_grad(2.0)
        yield made
        made.unlink()


def hold(*, pipe: Pipe) -> int:
    """Stay in the block until told to end it."""
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


def test_a_killed_holders_gradients_go_to_the_next_take(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        assert holder.hear() == 3.0  # it has the round: only now may another ask for it
        with Apart(take_two) as next_one:
            until(lambda: acc.stats().waiting == 1)
            assert acc.stats().round_pid == holder.pid
            holder.kill()
            assert next_one.result(LONG) == (3.0, 0)
    assert (acc.stats().taken, acc.global_step) == (2, 1)


def test_a_step_reopens_when_its_holder_is_killed(acc: ConditionalAccumulator) -> None:
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


def test_a_holder_that_closes_gives_the_round_up(acc: ConditionalAccumulator) -> None:
    def leave() -> None:
        own = ConditionalAccumulator.attach("rounds")
        own.round(1).__enter__()
        own.close()

    with Apart(leave) as holder:
        holder.result()
    assert acc.take(2, timeout=0).value.item() == 3.0


def test_a_forked_child_cannot_end_its_parents_block(acc: ConditionalAccumulator) -> None:
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
