"""What happens to a round and to other processes if its holder dies, stops or forks in its block.

test_soak.py kills processes at random in rounds and applies, in several lanes.
"""

import os
import signal

import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.lock_holder import activity
from helpers.support import LONG, until

from shmacc import NEVER_STALE, ConditionalAccumulator, errors


@pytest.fixture
def acc(acc: ConditionalAccumulator) -> ConditionalAccumulator:
    """A named accumulator of sums with two gradients in it."""
    acc.apply_grad(1.0)
    acc.apply_grad(2.0)
    return acc


def hold(*, pipe: Pipe) -> int:
    """Stay in a round's block until the test sends a message."""
    with ConditionalAccumulator.attach("acc") as own:
        with own.round(1) as taken:
            pipe.turn(taken.value.item())
        return int(own.global_step)


def take_two() -> tuple[float, int]:
    with ConditionalAccumulator.attach("acc") as own:
        taken = own.take(2, timeout=LONG)
        return taken.value.item(), taken.step


def apply_later() -> bool:
    with ConditionalAccumulator.attach("acc") as own:
        return bool(own.apply_grad(4.0, NEVER_STALE))


def test_a_killed_holders_gradients_go_to_the_next_take(acc: ConditionalAccumulator) -> None:
    with Apart(hold) as holder:
        assert holder.hear() == 3.0  # it has the round, so the next take must wait
        with Apart(take_two) as next_one:
            until(lambda: acc.stats().waiting == 1)
            assert acc.stats().round_pid == holder.pid
            holder.kill()
            assert next_one.result(LONG) == (3.0, 0)
    assert (acc.stats().taken, acc.global_step) == (2, 1)


def test_a_killed_holders_step_is_open_again(acc: ConditionalAccumulator) -> None:
    with Apart(hold).ready() as holder:
        assert not acc.apply_grad(4.0)
        holder.kill()
    assert acc.stats().round_pid is None
    acc.unseal()
    assert acc.apply_grad(4.0)
    with acc.round(3, timeout=0) as taken:
        assert taken.value.item() == 7.0


def test_applies_that_wait_for_a_killed_holder_go_on(acc: ConditionalAccumulator) -> None:
    with Apart(hold).ready() as holder, Apart(apply_later) as later:
        until(lambda: activity("acc", later.pid) == "waits for the end of the round")
        holder.kill()
        assert later.result(LONG)
    assert acc.take(3, timeout=0).value.item() == 7.0


def test_a_stopped_holder_keeps_the_round(acc: ConditionalAccumulator) -> None:
    with Apart(hold).ready() as holder:
        holder.signal(signal.SIGSTOP)
        assert not acc.apply_grad(4.0)
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(1, timeout=0.05)
        with pytest.raises(errors.DeadlineExceededError), acc.round(1, timeout=0.05):
            raise AssertionError
        holder.signal(signal.SIGCONT)
        assert holder.finish() == 1
    assert (acc.global_step, acc.num_accumulated()) == (1, 0)


def test_advance_step_ends_a_stopped_holders_round(acc: ConditionalAccumulator) -> None:
    with Apart(hold).ready() as holder:
        holder.signal(signal.SIGSTOP)
        assert acc.advance_step(3) == 2
        assert acc.apply_grad(4.0, 3)
        holder.signal(signal.SIGCONT)
        holder.say()
        with pytest.raises(errors.FailedPreconditionError, match="ended"):
            holder.result()
    assert (acc.global_step, acc.num_accumulated()) == (3, 1)


def test_a_forked_child_cannot_end_its_parents_block(acc: ConditionalAccumulator) -> None:
    block = acc.round(2)
    block.__enter__()
    with pytest.raises(errors.FailedPreconditionError):
        run_apart(lambda: block.__exit__(None, None, None))
    with pytest.raises(errors.DeadlineExceededError):  # the apply waits for the parent's block
        run_apart(lambda: acc.apply_grad(4.0, 1, timeout=0.05))
    run_apart(acc.close)
    assert (acc.global_step, acc.stats().round_pid) == (0, os.getpid())
    block.__exit__(None, None, None)
    assert acc.global_step == 1
