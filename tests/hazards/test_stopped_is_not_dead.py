"""A process that is stopped while it owns the lock keeps the lock until it continues or dies.

A stopped take keeps its place in the queue, and gradients are accepted again after a grace period.
A process that is stopped while it attaches delays only those that want to attach or unlink: they
get an error after a while, because only the stopped process may decide about the name.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.killing_scenes import NAME, Scene, path
from helpers.lock_holder import held
from helpers.stepping_stops import (
    APPLYING,
    FIRST,
    LONGER,
    SECOND,
    TAKING,
    THIRD,
    add,
    middle,
    others,
    queued,
    stopped_half_way,
    take,
    take_in_vain,
    taken,
    what_is_left,
    whole,
)
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import stopped
from helpers.support import SOON, slept, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, errors, inspection


@needs_ptrace
@pytest.mark.parametrize("scene", [APPLYING, TAKING], ids=str)
def test_no_process_gets_the_lock_while_its_owner_is_stopped(scene: Scene) -> None:
    with stopped_half_way(scene) as owner:
        start = time.monotonic()
        before = inspection.describe(NAME)
        assert before.lock.pid == owner.pid
        with others((add,), (take, 1), (take_in_vain, 1, 0.3), (take_in_vain, 1, 0)) as crew:
            adder, taker, hasty, trier = crew
            trier.result()
            hasty.result()
            time.sleep(start + LONGER - time.monotonic())
            now = inspection.describe(NAME)
            assert now.generation == before.generation
            assert now.lock == before.lock
            assert not adder.pipe.poll()
            assert not taker.pipe.poll()
            owner.resume()
            adder.result()
            first = taker.result()
            assert inspection.describe(NAME).stats.recoveries == 0
    left = what_is_left()
    # What the owner takes is not in `left`.
    expected, count = (whole(FIRST, SECOND, THIRD), 3) if scene is APPLYING else (whole(THIRD), 1)
    assert first.count + left.count == count
    np.testing.assert_array_equal(taken(first, left), expected)


@needs_ptrace
def test_a_stopped_owner_that_is_killed_is_dead() -> None:
    with stopped_half_way(APPLYING) as owner, others((add,)) as (adder,):
        time.sleep(0.2)
        assert not adder.pipe.poll()
        owner.kill()
        adder.result()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, THIRD))


@contextmanager
def goes_on() -> Iterator[None]:
    """Stop the lock's owner during the block; check that its operation then ends as usual."""
    with stopped_half_way(APPLYING) as owner:
        yield
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))


@needs_ptrace
def test_waiting_takes_can_leave_while_the_locks_owner_is_stopped() -> None:
    """The takes leave by their timeout or by cancel, which need no lock."""
    step = middle(APPLYING)
    with (
        queued((take_in_vain, 5, 0.5), (take, 5)) as (hasty, patient),
        stopped(APPLYING.act, step) as owner,
    ):
        generation = inspection.describe(NAME).generation
        hasty.result()
        inspection.cancel(NAME)
        with pytest.raises(errors.CancelledError):
            patient.result()
        assert inspection.describe(NAME).queue == ()
        assert inspection.describe(NAME).generation == generation
        owner.resume()
    np.testing.assert_array_equal(taken(what_is_left()), whole(FIRST, SECOND))


@needs_ptrace
def test_waits_for_a_stopped_processs_lock_can_be_cancelled() -> None:
    """These waits are not in the queue yet."""
    with goes_on(), others((take, 1)) as (taker,):
        until(lambda: "waits for the lock" in activities())
        inspection.cancel(NAME)
        with pytest.raises(errors.CancelledError):
            taker.result()


def activities() -> list[str]:
    return [process.activity for process in inspection.describe(NAME).processes]


@needs_ptrace
def test_processes_look_attach_and_leave_while_the_locks_owner_is_stopped() -> None:
    with goes_on():
        start = slept()
        with shmacc.attach(NAME) as acc:
            assert acc.num_accumulated() == 1
            assert acc.global_step == 0
            assert acc.stats().attached == 2
        assert slept() - start < SOON


def add_often(times: int) -> list[tuple[float, float]]:
    """Add the third gradient `times` times; return how long each apply took and slept."""
    seconds = []
    acc: Any = shmacc.attach(NAME)
    with acc:
        for _ in range(times):
            began, start = time.monotonic(), slept()
            assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)
            seconds.append((time.monotonic() - began, slept() - start))
    return seconds


def test_a_stopped_take_keeps_its_place_in_the_queue() -> None:
    APPLYING.prepare().write(path())
    with queued((take, 3), (take, 1)) as (first, second):
        first.signal(signal.SIGSTOP)
        # Two applies complete the first take's number, so the third apply waits for that take to
        # run, but only for a while. Later applies do not wait.
        seconds = run_apart(add_often, 5)
        assert max(sleeping for _, sleeping in (*seconds[:2], *seconds[3:])) < 0.9
        assert seconds[2][0] > 0.9
        assert seconds[2][1] < 1.9
        # No other take gets the stopped take's gradients.
        with others((take_in_vain, 1, 0.1)) as (hasty,):
            hasty.result()
        assert not second.pipe.poll()
        first.signal(signal.SIGCONT)
        got = first.result()
        assert got.count == 6
        np.testing.assert_array_equal(taken(got), whole(FIRST, *[THIRD] * 5))
        run_apart(add_often, 1)
        np.testing.assert_array_equal(taken(second.result()), whole(THIRD))
    assert what_is_left().count == 0


def test_the_death_of_a_stopped_take_is_noticed() -> None:
    APPLYING.prepare().write(path())
    with queued((take, 2), (take, 1)) as (first, second):
        first.signal(signal.SIGSTOP)
        run_apart(add_often, 1)
        first.kill()
        assert second.result().count == 2
    assert what_is_left().count == 0


def test_a_stopped_take_that_was_cancelled_delays_nobody() -> None:
    """Not even a process that has seen the stopped take at the queue's head has to wait."""
    APPLYING.prepare().write(path())
    acc: Any = shmacc.attach(NAME)
    with acc, queued((take, 3)) as (first,):
        first.signal(signal.SIGSTOP)
        assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)
        acc.cancel()
        start = slept()
        assert acc.take(2, timeout=0).count == 2
        assert slept() - start < SOON
        first.signal(signal.SIGCONT)
        with pytest.raises(errors.CancelledError):
            first.result()
    assert what_is_left().count == 0


def test_a_process_stopped_while_attaching_delays_nobody_who_is_attached() -> None:
    with ConditionalAccumulator("float32", (), NAME, reduction_type="SUM") as acc:
        with held(NAME, layout.NAME_BYTE) as stopped:
            for _ in range(100):
                start = slept()
                acc.apply_grad(1.0)
                assert slept() - start < SOON
            assert acc.take_grad(100, timeout=0) == 100.0
            with (
                Apart(_attach) as other,
                pytest.raises(errors.DeadlineExceededError, match="stopped"),
            ):
                other.result()
            stopped.signal(signal.SIGCONT)
            stopped.say("let go")
            stopped.wait()
        with Apart(_attach) as other:
            other.result()
        acc.unlink()


def test_the_death_of_a_process_stopped_while_attaching_lets_others_in() -> None:
    with (
        ConditionalAccumulator("float32", (), NAME, unlink_on_close=True),
        held(NAME, layout.NAME_BYTE) as stopped,
        Apart(_attach) as other,
    ):
        until(lambda: len(inspection.describe(NAME).processes) == 2)
        stopped.kill()
        other.result()


def test_an_opener_that_gives_up_leaves_no_semaphore() -> None:
    """The opener made a missing semaphore, and meanwhile the segment's name was removed."""
    with ConditionalAccumulator("float32", (), NAME):
        file = Path(path())
        (semaphore,) = file.parent.glob(f"sem.{file.name}.*")
        semaphore.unlink()
        with held(NAME, layout.NAME_BYTE), Apart(_attach) as other:
            until(semaphore.exists)
            file.unlink()
            with pytest.raises(errors.DeadlineExceededError):
                other.result()
    assert not semaphore.exists()


def _attach() -> None:
    shmacc.attach(NAME).close()
