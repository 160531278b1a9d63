"""A process killed in the queue of waiting takes has taken nothing, and delays nobody."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from typing import Any, Final

import pytest
from helpers.apart import Apart, run_apart
from helpers.killing_images import Image, Windows
from helpers.killing_scenes import NAME, Record, Scene, path, rows
from helpers.stepping_tracer import Traced, needs_ptrace
from helpers.stepping_walk import LockView, judge, walk
from helpers.support import LONG, until

import shmacc
from shmacc import NEVER_STALE, _core, errors

pytestmark = pytest.mark.beyond_asan


def scene(name: str, operation: Callable[[Any], object]) -> Scene:
    return Scene(
        name, "float32", 3, lambda acc: acc.apply_grad(*rows(1, 2)), operation, more=(2, 3)
    )


WAITING: Final = scene("in the queue", lambda acc: acc.take(5, timeout=LONG))
ADDING: Final = scene("an apply that finds them", lambda acc: acc.apply_grad(*rows(2, 4)))
CANCELLING: Final = scene("cancel", lambda acc: acc.cancel())


@needs_ptrace
def test_a_waiting_take_killed_anywhere_loses_nothing(record_property: Record) -> None:
    image = WAITING.prepare()
    before = WAITING.testimony(image)
    looks = walk(WAITING.act, {NAME: image}, {NAME: image}, NAME, ends=False)
    assert len(looks) > 5
    record_property("judged", judge(WAITING, looks, before, before))


def wait_for(number: int) -> int:
    """Wait in the queue; return how many gradients came."""
    with shmacc.attach(NAME) as acc:
        return int(acc.take(number, timeout=LONG).count)


def queued() -> int:
    return sum(take.alive for take in shmacc.inspection.describe(NAME).queue)


@contextmanager
def waiting(*numbers: int) -> Iterator[list[Apart]]:
    """Start processes that wait in the queue, in this order."""
    with ExitStack() as stack:
        waiters = []
        for place, number in enumerate(numbers, start=1):
            waiters.append(stack.enter_context(Apart(wait_for, number)))
            until(lambda place=place: queued() == place)  # type: ignore[misc]
        yield waiters


@needs_ptrace
def test_an_apply_killed_among_dead_queue_entries_is_whole(record_property: Record) -> None:
    clean, done = ADDING.prepare(), ADDING.perform()
    clean.write(path())
    with waiting(2, 3, 1):
        pass  # the end of the block kills them
    image = Image.of(path())
    before = ADDING.testify()
    looks = walk(ADDING.act, {NAME: image}, {NAME: clean}, NAME)
    record_property("judged", judge(ADDING, looks, before, ADDING.testimony(done)))


def add_one() -> None:
    acc: Any = shmacc.attach(NAME)
    with acc:
        assert acc.apply_grad(*rows(3, 4), local_step=NEVER_STALE)


@needs_ptrace
def test_a_take_goes_on_if_the_apply_that_should_wake_it_is_killed() -> None:
    """The apply had committed and released the lock, but woken nobody."""
    ADDING.prepare().write(path())
    with waiting(2) as (waiter,), Traced(ADDING.act) as applier, closing(LockView()) as lock:
        applier.run_to_mark()
        applier.run_until(lock.held)
        applier.run_until(lambda: not lock.held())
        applier.kill()
        assert waiter.result() == 2
    ADDING.testify()


@needs_ptrace
def test_a_take_killed_while_it_joins_the_queue_blocks_nobody() -> None:
    """The entry was a living process's before; the dead take must not pass for that process's."""
    ADDING.prepare().write(path())
    acc: Any = shmacc.attach(NAME)
    view = _core.view(path())[2]
    assert view is not None
    with acc, closing(view):
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(5, timeout=0.01)
        with Traced(WAITING.act) as child, closing(LockView()) as lock:
            child.run_to_mark()
            child.run_until(lock.held)
            while not view.waiters():
                child.step()
            child.kill()
        assert acc.take(1, timeout=0).count == 1
        acc.unlink()


def all_or_none_are_cancelled(waiters: list[Apart]) -> bool:
    """Return whether a cancel ended the waiting takes; check that it ended both or neither."""
    cancelled = []
    for waiter in waiters:
        # A take that still waits is served, so the test need not know how long a cancel takes.
        run_apart(add_one)
        run_apart(add_one)
        try:
            assert waiter.result() >= 1
            cancelled.append(False)
        except errors.CancelledError:
            cancelled.append(True)
    assert len(set(cancelled)) == 1
    return cancelled[0]


@needs_ptrace
def test_a_kill_after_any_change_of_a_cancel_keeps_the_queue_whole() -> None:
    """This includes a kill between the cancel's commit and its wake-ups."""
    image = ADDING.prepare()
    outcomes = []
    for changes in range(4):
        image.write(path())
        with (
            waiting(3, 1) as waiters,
            Traced(CANCELLING.act) as canceller,
            closing(Windows(path(), image)) as windows,
        ):
            canceller.run_to_mark()
            windows.look()
            looks = (step for step in canceller.steps_to_mark() if windows.look())
            for _ in islice(looks, changes):
                pass
            canceller.kill()
            outcomes.append(all_or_none_are_cancelled(waiters))
        CANCELLING.testify()
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
