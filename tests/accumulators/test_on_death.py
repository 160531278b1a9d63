"""A take that asks to be told of deaths is told of each of them once, and of nothing else."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.support import LONG, START_METHODS, refused, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.threads

NAME: Final = "mortal"


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def acc(request: pytest.FixtureRequest) -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator("f8", (), NAME, reduction_type="SUM", lanes=request.param) as made:
        yield made
        made.unlink()


def work(contributor: int | None, *, pipe: Pipe) -> None:
    """Apply, say so, and stay until told to end."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
    pipe.say()
    pipe.hear()
    own.close()


def worker(contributor: int | None = None) -> Apart:
    """A process that has applied."""
    process = Apart(work, contributor)
    process.hear()
    return process


def test_a_death_before_the_take_ends_its_wait(acc: ConditionalAccumulator) -> None:
    with worker(7) as dead:
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(2, timeout=LONG, on_death="raise")
        error = caught.value
        assert (tuple(error.pids or ()), tuple(error.contributors or ())) == ((dead.pid,), (7,))
        assert str(dead.pid) in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (again.pids, again.contributors) == (error.pids, error.contributors)
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)
    # Once: the next take waits.
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=0.05, on_death="raise")
    assert acc.take(1, timeout=0).contributors.tolist() == [7]


def test_one_that_waits_without_a_take_is_told_the_same_once(acc: ConditionalAccumulator) -> None:
    with worker(7) as dead, worker(8):
        acc._handle.check_departures()
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc._handle.check_departures()
        error = caught.value
        assert (tuple(error.pids or ()), tuple(error.contributors or ())) == ((dead.pid,), (7,))
        acc._handle.check_departures()
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(3, timeout=0.05, on_death="raise")
    assert acc.take(2, timeout=0).contributors.tolist() == [7, 8]


@pytest.mark.parametrize("how", ["take", "round"])
def test_a_death_during_the_wait_ends_it(acc: ConditionalAccumulator, how: str) -> None:
    def wait() -> Any:
        if how == "take":
            return acc.take(3, timeout=LONG, on_death="raise")
        with acc.round(3, timeout=LONG, on_death="raise") as taken:
            return taken

    with worker(1) as dead, worker(2), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        until(lambda: acc.stats().waiting == 1)
        dead.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            waiting.result(LONG)
        assert tuple(caught.value.pids or ()) == (dead.pid,)
        assert acc.stats().waiting == 0
        assert acc.take(2, timeout=0).count == 2


def test_without_it_deaths_are_nothing(acc: ConditionalAccumulator) -> None:
    with worker() as dead:
        dead.kill()
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=0.05)
    with pytest.raises(errors.DeadlineExceededError):
        acc.take_partial(2, timeout=0.05)
    assert acc.take(1, timeout=0).count == 1


def test_several_deaths_are_told_together(acc: ConditionalAccumulator) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(i or None)) for i in range(3)]
        for process in workers:
            process.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(4, timeout=LONG, on_death="raise")
        assert sorted(caught.value.pids or ()) == sorted(process.pid for process in workers)
        assert sorted(caught.value.contributors or ()) == [1, 2]


def test_each_death_ends_one_wait(acc: ConditionalAccumulator) -> None:
    with worker(1) as first, worker(2) as second:
        first.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(5, timeout=LONG, on_death="raise")
        assert tuple(caught.value.pids or ()) == (first.pid,)
        second.kill()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(5, timeout=LONG, on_death="raise")
        assert tuple(caught.value.pids or ()) == (second.pid,)


def test_a_quorum_that_is_there_is_served(acc: ConditionalAccumulator) -> None:
    with worker(1) as dead:
        dead.kill()
        for how in ("take", "round"):
            if how == "take":
                assert acc.take(1, timeout=LONG, on_death="raise").count == 1
                acc.apply_grad(1.0, acc.global_step)
                continue
            with acc.round(1, timeout=LONG, on_death="raise") as taken:
                assert taken.count == 1


def test_a_process_that_never_applied_is_not_missed(acc: ConditionalAccumulator) -> None:
    with Apart(_attach_only) as dead:
        dead.hear()
        dead.kill()
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(1, timeout=0.05, on_death="raise")


def _attach_only(*, pipe: Pipe) -> None:
    own = ConditionalAccumulator.attach(NAME)
    own.num_accumulated()
    pipe.say()
    pipe.hear()
    own.close()


def test_who_closes_is_not_dead(acc: ConditionalAccumulator) -> None:
    run_apart(_apply_and_close, method="spawn")
    assert acc.num_accumulated() == 1
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=0.05, on_death="raise")


def _apply_and_close() -> None:
    with ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0, contributor=1)


def _apply(name: str) -> None:
    global _kept  # noqa: PLW0603 - open until the very end
    _kept = ConditionalAccumulator.attach(name)
    _kept.apply_grad(1.0, shmacc.NEVER_STALE)


_kept: ConditionalAccumulator


@pytest.mark.parametrize("method", START_METHODS)
def test_who_returns_from_its_function_is_not_dead(
    acc: ConditionalAccumulator, method: str
) -> None:
    """A child of multiprocessing, which ends by os._exit: no finalizer of the interpreter runs."""
    run_apart(_apply, NAME, method=method)
    assert acc.num_accumulated() == 1
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(2, timeout=0.05, on_death="raise")


def _apply_and_exit(*, pipe: Pipe) -> None:
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0)
    pipe.say()
    os._exit(3)


def test_who_leaves_without_a_word_is_dead(acc: ConditionalAccumulator) -> None:
    with Apart(_apply_and_exit) as process:
        process.hear()
        process.wait()
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(2, timeout=LONG, on_death="raise")
        assert tuple(caught.value.pids or ()) == (process.pid,)


def test_of_two_waits_one_is_told(acc: ConditionalAccumulator) -> None:
    def wait() -> Any:
        try:
            return acc.take(3, timeout=LONG, on_death="raise").count
        except errors.WorkerDiedError as error:
            return tuple(error.pids or ())

    with worker() as dead, ThreadPoolExecutor() as pool:
        waits = [pool.submit(wait) for _ in range(2)]
        until(lambda: acc.stats().waiting == 2)
        dead.kill()
        until(lambda: any(waiting.done() for waiting in waits))
        told = [waiting.result() for waiting in waits if waiting.done()]
        assert told == [(dead.pid,)]
        for _ in range(2):
            acc.apply_grad(1.0)
        assert sorted(waiting.result(LONG) == 3 for waiting in waits) == [False, True]


def test_of_a_group() -> None:
    with AccumulatorGroup({"a": TensorSpec(())}, "group") as group:
        with Apart(_apply_to_the_group) as dead:
            dead.hear()
            dead.kill()
            with (
                pytest.raises(errors.WorkerDiedError) as caught,
                group.round(2, timeout=LONG, on_death="raise"),
            ):
                raise AssertionError
            assert tuple(caught.value.contributors or ()) == (9,)
        assert group.take(1, timeout=0).count == 1
        group.unlink()


def _apply_to_the_group(*, pipe: Pipe) -> None:
    own = AccumulatorGroup.attach("group")
    own.apply({"a": 1}, 0, contributor=9)
    pipe.say()
    pipe.hear()


@pytest.mark.parametrize("word", ["ignore", None, True, b"raise"])
def test_what_is_no_such_word(acc: ConditionalAccumulator, word: Any) -> None:
    with refused():
        acc.take(1, timeout=0, on_death=word)
    with refused():
        acc.round(1, timeout=0, on_death=word)
