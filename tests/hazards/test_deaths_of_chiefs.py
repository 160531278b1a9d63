"""The death or failure of the chief ends all waits for the step with ``on_death="raise"``.

A process that looks while another one leaves or takes reports no false death.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from helpers.apart import Apart, Pipe
from helpers.departures import NAME, make, news, worker
from helpers.departures import acc as acc
from helpers.lock_holder import activity
from helpers.stepping_calls import Calling, needs_failures
from helpers.stepping_tracer import Mark
from helpers.support import LONG, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors

Look = Callable[[Any], tuple[Any, ...] | None]


def chief_died(acc: Any) -> tuple[Any, ...] | None:
    """Return the pids and reasons that a wait for the step reports; None: no chief has died."""
    step = acc.global_step
    told: list[tuple[Any, ...] | None] = []
    for wait in (
        lambda: acc.wait_step(step, timeout=0, on_death="raise"),
        lambda: [None for _ in acc.steps(timeout=0, on_death="raise")],
    ):
        try:
            wait()
        except errors.ChiefDiedError as error:
            told.append((error.pids, error.reasons))
        except errors.DeadlineExceededError:
            told.append(None)
    assert told[0] == told[1]
    return told[0]


def lead(how: str = "take", *, pipe: Pipe) -> None:
    """Run a chief that stays until a message says how it ends."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    if how == "take":
        own.take(1)
    else:
        with own.round(1):
            if how == "in the block":
                pipe.turn()
    pipe.say()
    if pipe.hear() == "fail":
        with suppress(ValueError), own:
            raise ValueError("diverged")
    own.close()
    pipe.say()


def chief(how: str = "take") -> Apart:
    """Start a chief that has taken a round or still holds it."""
    return Apart(lead, how).ready()


@pytest.mark.parametrize("how", ["take", "round", "in the block"])
def test_a_chiefs_death_ends_all_waits_for_the_step(acc: ConditionalAccumulator, how: str) -> None:
    assert chief_died(acc) is None
    with chief(how) as leader:
        assert chief_died(acc) is None
        leader.kill()
        for _ in range(2):
            assert chief_died(acc) == ((leader.pid,), ("killed",))
        ConditionalAccumulator.attach(NAME).close()
        assert news(acc) is not None  # the chief had applied, too
        assert chief_died(acc) == ((leader.pid,), ("killed",))
    # A step that has moved on, or the run's end, is reported before a death.
    assert acc.wait_step(acc.global_step - 1, on_death="raise") == acc.global_step
    for wait in (acc.wait_step, lambda _, timeout: list(acc.steps(timeout=timeout))):
        with pytest.raises(errors.DeadlineExceededError):
            wait(9, timeout=0.01)
    acc.finish()
    with pytest.raises(errors.FinishedError):
        acc.wait_step(9, on_death="raise")


def test_the_failure_of_the_chief_is_reported(acc: ConditionalAccumulator) -> None:
    with chief() as leader:
        leader.turn("fail")
        assert chief_died(acc) == ((leader.pid,), ("ValueError: diverged",))


def take_and_announce_a_failure(*, pipe: Pipe) -> None:
    own = ConditionalAccumulator.attach(NAME)
    own.take(1)
    own._handle.announce_end(ValueError("diverged"))
    pipe.turn()


def test_a_chief_that_fails_and_is_killed_counts_as_failed(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with Apart(take_and_announce_a_failure).ready() as leader:
        leader.kill()
        for _ in range(2):
            assert chief_died(acc) == ((leader.pid,), ("ValueError: diverged",))
            ConditionalAccumulator.attach(NAME).close()  # frees the dead process's entry


def test_waits_for_the_step_survive_a_chief_that_left_in_order(acc: ConditionalAccumulator) -> None:
    with chief() as leader:
        leader.finish()
    assert chief_died(acc) is None
    with chief() as dead:
        dead.kill()
        with chief() as leader:
            assert chief_died(acc) is None  # somebody alive has taken
            leader.finish()
        assert chief_died(acc) == ((dead.pid,), ("killed",))
        with Apart(lambda: ConditionalAccumulator.attach(NAME).take(99)) as waiting:
            until(lambda: acc.stats().waiting == 1)
            assert chief_died(acc) is None  # somebody waits to take
            waiting.kill()
        assert chief_died(acc) == ((dead.pid,), ("killed",))


def leave_while_asked(acc: Any, process: Callable[[], Apart], look: Look, place: int) -> bool:
    """Let a process leave just before another one's `place`-th question to the kernel who lives.

    Returns whether the other process asks that often.
    """

    def look_twice(mark: Mark) -> None:
        look(acc)  # the forked child attaches
        mark()
        assert look(acc) is None
        mark()

    with process() as leaver, Calling(look_twice) as child:
        child.run_to_mark()
        asked = 0
        for call in child.calls_to_mark():
            asked += child.asks(call)
            if child.asks(call) and asked == place:
                leaver.finish()
        child.finish()
    return asked >= place


@needs_failures
@pytest.mark.parametrize(("process", "look"), [(worker, news), (chief, chief_died)])
def test_a_process_that_leaves_during_a_look_is_not_reported_as_dead(
    acc: ConditionalAccumulator, process: Callable[[], Apart], look: Look
) -> None:
    place = 1
    while leave_while_asked(acc, process, look, place):
        place += 1
    assert place > 1


def follow(*, pipe: Pipe) -> None:
    """Run a second chief, which attaches before the first one dies and takes after that."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    pipe.turn()
    own.take(1)
    pipe.turn()


def serve_while_asked(acc: ConditionalAccumulator, place: int) -> bool:
    """Give a new chief its round just before another process's `place`-th question who lives.

    Returns whether the other process asks that often.
    """

    def wait_twice(mark: Mark) -> None:
        acc.wait_step(-1)  # the forked child attaches before anybody dies
        mark()
        with suppress(errors.DeadlineExceededError):
            acc.wait_step(acc.global_step, timeout=0, on_death="raise")
        mark()

    with Apart(follow) as new, Calling(wait_twice) as child:
        new.hear()
        child.run_to_mark()
        with chief() as old:
            old.kill()
        new.say()
        until(lambda: acc.stats().waiting == 1)
        asked = 0
        for call in child.calls_to_mark():
            asked += child.asks(call)
            if child.asks(call) and asked == place:
                acc.apply_grad(1.0, shmacc.NEVER_STALE)
                new.hear()
        child.finish()
    return asked >= place


@needs_failures
def test_a_new_chief_may_take_while_another_process_looks_for_dead_chiefs() -> None:
    asked, place = True, 1
    while asked:
        with make() as acc:
            asked = serve_while_asked(acc, place)
            acc.unlink()
        place += 1
    assert place > 2


def test_the_death_of_the_chief_ends_a_wait_that_has_begun(acc: ConditionalAccumulator) -> None:
    told: list[Any] = []

    def wait() -> None:
        try:
            acc.wait_step(99, timeout=LONG, on_death="raise")
        except errors.ChiefDiedError as error:
            told.append(error.pids)

    with chief() as leader:
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: activity(NAME, os.getpid()) == "waits for the step")
        leader.kill()
        thread.join(LONG)
        assert told == [(leader.pid,)]


def test_a_failure_in_a_group_ends_takes_and_waits_for_the_step() -> None:
    def fail(*, pipe: Pipe) -> None:
        with suppress(ValueError), AccumulatorGroup.attach(NAME) as own:
            own.apply({"a": 1.0}, 0, contributor=9)
            with own.round(1) as taken:
                assert taken.count == 1
            own.apply({"a": 1.0}, 1, contributor=9)
            raise ValueError("bad")
        pipe.turn()

    with (
        AccumulatorGroup({"a": TensorSpec(())}, NAME, unlink_on_close=True) as group,
        Apart(fail).ready() as process,
    ):
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
        assert news(group) == ((process.pid,), ("ValueError: bad",), (9,))
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
