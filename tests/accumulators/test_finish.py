"""When a run is finished, all waits end, and later calls raise or return False."""

import asyncio
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activities
from helpers.support import LONG, left_behind, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, errors

NAME: Final = "acc"


@pytest.fixture(params=[1, 2])
def lanes(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_finished_run_accepts_and_returns_nothing(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.5, contributor=4)
    assert (acc.running, acc.stats().finished) == (True, False)
    for _ in range(2):
        acc.finish()
    assert (acc.running, acc.stats().finished) == (False, True)
    assert acc.apply_grad(2.0) is False
    assert acc.apply_grad(2.0, NEVER_STALE, contributor=1) is False
    partial = shmacc.DensePartial(np.array(1.0), 1, 0)
    assert acc.apply_partial(partial, NEVER_STALE) is False
    assert acc.stats().dropped == 3
    for wait in (
        lambda: acc.take(1), lambda: acc.take_grad(1), lambda: acc.take(5, at_least=1, timeout=0),
        lambda: acc.round(1).__enter__(), lambda: acc.wait_step(0), lambda: acc.take_partial(2),
    ):  # fmt: skip
        with pytest.raises(errors.FinishedError) as caught:
            wait()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.step, again.accumulated, str(again)) == (0, 1, str(caught.value))
    # Pending gradients can still be read.
    assert acc.snapshot().value == 1.5
    assert acc.contributors().tolist() == [4]
    assert acc.state()
    assert acc.take_partial(1).value == 1.5
    assert acc.take_partial(0).count == 0


async def _enter(acc: Any) -> None:
    async with acc.round_async(3):
        raise AssertionError


WAITS: Final[dict[str, Callable[[Any], object]]] = {
    "take": lambda acc: acc.take(3),
    "round": lambda acc: acc.round(3).__enter__(),
    "take_partial": lambda acc: acc.take_partial(3),
    "wait_step": lambda acc: acc.wait_step(0),
    "take_async": lambda acc: asyncio.run(acc.take_async(3)),
    "round_async": lambda acc: asyncio.run(_enter(acc)),
    "wait_step_async": lambda acc: asyncio.run(acc.wait_step_async(0)),
}


def wait_for_it(how: str, *, pipe: Pipe) -> str:
    """Wait; return how the wait ended."""
    with ConditionalAccumulator.attach(NAME) as own:
        pipe.say()
        try:
            WAITS[how](own)
        except errors.ShmaccError as error:
            return type(error).__name__
        return "served"


def until_somebody(activity: str) -> None:
    """Return when another process is in this activity."""
    until(lambda: any(activity in what for _, what in activities(NAME)))


@pytest.mark.parametrize("how", WAITS)
def test_finish_ends_a_wait_in_another_process(acc: ConditionalAccumulator, how: str) -> None:
    acc.apply_grad(1.0)
    with Apart(wait_for_it, how).ready() as process:
        until_somebody("waits")
        acc.finish()
        assert process.result() == "FinishedError"


def test_finish_ends_all_takes_in_the_queue(acc: ConditionalAccumulator) -> None:
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(acc.take, number) for number in (2, 3, 4)]
        until(lambda: acc.stats().waiting == 3)
        acc.finish()
        for waiting in waits:
            with pytest.raises(errors.FinishedError):
                waiting.result(LONG)
    assert acc.stats().waiting == 0


def apply(step: int, *, pipe: Pipe) -> bool:
    with ConditionalAccumulator.attach(NAME) as own:
        pipe.hear()
        return own.apply_grad(1.0, step)


def test_finish_makes_a_waiting_apply_return_false() -> None:
    with ConditionalAccumulator("f8", (), NAME, capacity=1, unlink_on_close=True) as acc:
        acc.apply_grad(1.0)
        with Apart(apply, 0) as for_room:
            for_room.say()
            until_somebody("waits for room")
            acc.finish()
            assert for_room.result() is False


def test_a_round_that_is_open_at_finish_is_consumed_at_its_end(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with Apart(apply, NEVER_STALE) as later, acc.round(1) as taken:
        later.say()
        until_somebody("waits for the end of the round")
        acc.finish()
        assert not acc.running
        assert later.result() is False  # the apply no longer waits for the block's end
        assert taken.value == 1.0
        assert acc.global_step == 0
    assert (acc.global_step, acc.num_accumulated(), acc.stats().taken) == (1, 0, 1)
    with pytest.raises(errors.FinishedError):
        acc.take(1)


def test_a_block_that_raises_does_not_reopen_a_finished_run(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with pytest.raises(KeyError), acc.round(1):
        acc.finish()
        raise KeyError
    assert acc.num_accumulated() == 1
    assert acc.apply_grad(1.0) is False


def test_wait_step_returns_a_step_reached_before_finish(acc: ConditionalAccumulator) -> None:
    acc.advance_step(5)
    acc.finish()
    assert acc.wait_step(4) == 5
    assert asyncio.run(acc.wait_step_async(0)) == 5
    with pytest.raises(errors.FinishedError):
        acc.wait_step(5)


def test_finish_does_not_wait_for_a_stopped_process(acc: ConditionalAccumulator) -> None:
    def hold_the_lock(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0)
            pipe.say()
            while True:
                own.take_partial(0)

    with Apart(hold_the_lock).ready() as process:
        for _ in range(20):  # in some tries the process holds the lock when stopped
            process.signal(signal.SIGSTOP)
            acc.finish()
            assert not acc.running
            with pytest.raises(errors.FinishedError):
                acc.wait_step(acc.global_step)
            process.signal(signal.SIGCONT)
            acc.restore(acc.state())


def test_a_restore_begins_the_run_again(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    state = acc.state()
    acc.restore(state)  # a run that is not finished stays unfinished
    acc.finish()
    acc.restore(state)
    assert acc.running
    assert acc.apply_grad(2.0)
    assert acc.take(2).value == 3.0
    for _ in range(2):
        acc.finish()
        assert not acc.running
        acc.restore(acc.state())
        assert acc.running


def create_and(end: str, *, pipe: Pipe) -> None:
    """Create a segment with unlink_on_close, and end it as `end` says."""
    acc = ConditionalAccumulator("f8", (), NAME, unlink_on_close=True)
    pipe.turn()
    if end == "unlink":
        acc.unlink()
        pipe.turn()
    if end == "del":
        del acc
    else:
        acc.close()


@pytest.mark.parametrize("end", ["close", "del"])
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_close_that_unlinks_finishes_the_run(end: str) -> None:
    with (
        Apart(create_and, end).ready() as creator,
        Apart(wait_for_it, "wait_step").ready() as worker,
    ):
        until_somebody("waits for the step")
        creator.say()
        assert worker.result() == "FinishedError"
        creator.result()
    assert left_behind() == ()


CHIEF: Final = """
    import atexit, sys, threading, time

    def stay() -> None:
        thread.join(0.3)
        print("waits" if thread.is_alive() else "ended", flush=True)

    atexit.register(stay)  # after those of the library, which is imported later
    import shmacc

    acc = shmacc.ConditionalAccumulator("f8", (), "acc", unlink_on_close=True)
    thread = threading.Thread(target=acc.take, args=(99,), daemon=True)
    thread.start()
    while acc.stats().waiting == 0:
        time.sleep(0.001)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_program_that_ends_normally_finishes_the_run() -> None:
    """The program's own waiting threads get no error, since they would print it at the end."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(CHIEF)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as chief:
        assert chief.stdout is not None
        assert chief.stdout.readline() == "ready\n"
        with ConditionalAccumulator.attach(NAME) as acc, ThreadPoolExecutor() as executor:
            waiting = executor.submit(acc.wait_step, 0, timeout=LONG)
            until_somebody("waits for the step")
            assert chief.communicate("end\n", timeout=LONG) == ("waits\n", "")
            assert isinstance(waiting.exception(), errors.FinishedError)
    assert left_behind() == ()


@pytest.mark.parametrize("unlink_on_close", [True, False])
def test_a_close_cancels_own_waits_and_finishes_those_of_others(*, unlink_on_close: bool) -> None:
    """The close also finishes the run; only the waits of other handles report that."""
    name = NAME if unlink_on_close else None  # a private segment ends with its handle anyway
    acc = ConditionalAccumulator("f8", (), name, unlink_on_close=unlink_on_close)
    with ThreadPoolExecutor() as executor, pickle.loads(pickle.dumps(acc)) as others:
        own = executor.submit(acc.take, 9, timeout=LONG)
        other = executor.submit(others.take, 9, timeout=LONG)
        until(lambda: others.stats().waiting == 2)
        acc.close()
        assert isinstance(own.exception(), errors.CancelledError)
        assert isinstance(other.exception(), errors.FinishedError)


def test_unlink_does_not_finish_the_run() -> None:
    with Apart(create_and, "unlink").ready() as creator, ConditionalAccumulator.attach(NAME) as acc:
        creator.turn()
        assert acc.running
        assert acc.apply_grad(1.0)
        creator.finish()
        assert not acc.running


@pytest.mark.parametrize("how", ["attach", "create"])
def test_unlink_after_close_removes_its_own_name_only(how: str) -> None:
    acc = ConditionalAccumulator("f8", (), NAME)
    if how == "attach":
        acc.close()
        acc = ConditionalAccumulator.attach(NAME)
    acc.close()
    acc.unlink()
    with ConditionalAccumulator("f8", (), NAME, if_exists="error") as new:
        acc.unlink()  # must not remove the new segment's name
        ConditionalAccumulator.attach(NAME).close()
        new.unlink()
