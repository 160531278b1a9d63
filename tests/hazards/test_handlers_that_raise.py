"""A signal handler that raises anywhere: no round is left open, no exception is swallowed.

A round that a living process leaves open stops all others for as long as that process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.at_every_point import Points, coming_between
from helpers.support import LONG, SANITIZED

import shmacc
from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.beyond_asan

EXCEPTIONS: Final = 300 if SANITIZED else 1500
OFTEN: Final = 0.0003  # seconds until a signal comes, on the average


class AlarmError(Exception):
    """Raised by the handler."""


class Alarms:
    """Signals that come at any moment; the handler counts and raises."""

    def __init__(self) -> None:
        """None have come yet."""
        self.raised = 0

    def alarm(self, *_: object) -> None:
        """Be the handler."""
        self.raised += 1
        raise AlarmError(self.raised)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """One comes in this block, at most."""
        signal.setitimer(signal.ITIMER_REAL, OFTEN * (0.2 + 1.6 * ((self.raised * 37) % 100) / 100))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _caught_in(work: Callable[[], None], is_free: Callable[[], bool]) -> tuple[int, int, int]:
    """Work until the handler has raised so often.

    Args:
        work: What is interrupted.
        is_free: Whether no round is open, while the exception and its traceback are kept.

    Returns:
        How many exceptions were raised, how many were caught here, and how often a round was open.
    """
    unraisable: list[Any] = []
    sys.unraisablehook = unraisable.append
    gc.callbacks.clear()  # other packages', for tests: Python drops what is raised in one
    alarms, caught, open_rounds = Alarms(), 0, 0
    signal.signal(signal.SIGALRM, alarms.alarm)
    deadline = time.monotonic() + 50

    def work_in_time() -> None:
        assert time.monotonic() < deadline, "an exception was swallowed, or signals are slow"
        work()

    kept = None
    while alarms.raised < EXCEPTIONS and time.monotonic() < deadline:
        try:
            try:
                with alarms.coming():
                    while True:
                        work_in_time()
            except AlarmError as raised:
                kept = raised  # with the frames of its traceback, and what they have
                caught += 1
        except AlarmError as raised:  # it came at the end of `coming`
            kept = raised
            caught += 1
        open_rounds += not is_free()
    signal.setitimer(signal.ITIMER_REAL, 0)
    del kept
    assert not unraisable, f"{len(unraisable)} exceptions were swallowed: {unraisable[0]}"
    return alarms.raised, caught, open_rounds


def _in_rounds(kind: str) -> tuple[int, int, int]:
    with ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        step = 0

        def work() -> None:
            nonlocal step
            step = acc.global_step
            if acc.num_accumulated() == 0:
                acc.apply_grad(1.0, step)
            if kind == "block":
                with acc.round(1, timeout=0) as taken:
                    assert taken.count >= 1
            elif kind == "kept":
                block = acc.round(1, timeout=0)
                with block as taken:
                    assert taken.count >= 1
            else:
                _raise_in_a_block(acc)

        return _caught_in(work, lambda: acc.stats().round_pid is None)


def _raise_in_a_block(acc: Any) -> None:
    with contextlib.suppress(KeyError), acc.round(1, timeout=0):
        raise KeyError


@pytest.mark.parametrize("kind", ["block", "kept", "raising"])
def test_no_round_is_left_open(kind: str) -> None:
    if kind == "kept" and sys.version_info[:2] == (3, 14):
        pytest.skip(
            "Python 3.14 runs handlers between __enter__ and the block: locks stay locked, too"
        )
    raised, caught, open_rounds = run_apart(_in_rounds, kind)
    assert raised >= EXCEPTIONS
    assert caught == raised
    assert open_rounds == 0


# Not at collections: what is raised there Python reports and drops.
@pytest.mark.parametrize("points", [Points.LINES, Points.INSTRUCTIONS])
@pytest.mark.parametrize("how", ["in order", "by an exception", "waiting in vain"])
def test_at_every_point_of_a_round(points: Points, how: str) -> None:
    """Wherever Python can run a handler, and more."""
    with ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        number = 0
        came = True
        while came:
            number += 1
            step = acc.global_step
            acc.apply_grad(1.0, step)

            def alarm() -> None:
                raise AlarmError

            error: BaseException | None = None
            try:
                with coming_between(alarm, points, number) as between:
                    _have_round(acc, how)
            except (AlarmError, KeyError, errors.DeadlineExceededError) as raised:
                error = raised
            came = between.came
            assert acc.stats().round_pid is None, f"left open at point {number}"
            assert (acc.global_step - step, acc.num_accumulated()) in {(0, 1), (1, 0)}
            assert came or not isinstance(error, AlarmError)
            acc.take_partial(0)


def _have_round(acc: Any, how: str) -> None:
    with acc.round(1 if how != "waiting in vain" else 2, timeout=0.01):
        if how == "by an exception":
            raise KeyError


# What is raised in a weak reference's callback, and asyncio's tasks have some, Python drops.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("points", [Points.LINES, Points.INSTRUCTIONS])
@pytest.mark.parametrize("how", ["in order", "by an exception", "waiting in vain", "a take"])
def test_at_every_point_of_a_coroutines_round(points: Points, how: str) -> None:
    """While the exception is kept, with the frames of its traceback, and what they have."""
    with ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        number = 0
        came = True
        while came:
            number += 1
            step = acc.global_step
            acc.apply_grad(1.0, step)

            def alarm() -> None:
                raise AlarmError

            error: BaseException | None = None
            with asyncio.Runner() as runner:
                runner.get_loop()
                try:
                    with coming_between(alarm, points, number) as between:
                        runner.run(_have_round_async(acc, how))
                except (AlarmError, KeyError, errors.DeadlineExceededError) as raised:
                    error = raised
            came = between.came
            # A coroutine that was thrown away leaves its thread to end, which may open the round
            # yet, and gives it up.
            for thread in threading.enumerate():
                if thread.name == "shmacc: a coroutine's wait":
                    thread.join(LONG)
            assert acc.stats().round_pid is None, f"left open at point {number}"
            del error
            assert (acc.global_step - step, acc.num_accumulated()) in {(0, 1), (1, 0)}
            acc.take_partial(0)


async def _have_round_async(acc: Any, how: str) -> None:
    if how == "a take":
        await acc.take_async(1, timeout=LONG)
        return
    async with acc.round_async(1 if how != "waiting in vain" else 2, timeout=0.01):
        if how == "by an exception":
            raise KeyError


def test_an_interrupted_constructor_says_nothing() -> None:
    """Not even when it is collected."""

    def construct() -> list[str]:
        said: list[Any] = []
        sys.unraisablehook = said.append
        with ConditionalAccumulator("f8", ()) as acc:
            number, came = 0, True
            while came:
                number += 1

                def alarm() -> None:
                    raise AlarmError

                try:
                    with coming_between(alarm, Points.INSTRUCTIONS, number) as between:
                        acc.round(1)
                        acc.round_async(1)
                except AlarmError:
                    pass
                came = between.came
                gc.collect()
        return [str(each) for each in said]

    assert run_apart(construct) == []


# Conversions


class Slow:
    """An array of another package, whose view takes a while, in Python."""

    def __init__(self, error: BaseException | None) -> None:
        """The error that a handler raises meanwhile."""
        self._error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Be viewed; a signal comes meanwhile."""
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(3):  # where handlers run
            pass
        return np.ones(2, dtype)


@pytest.fixture
def handler() -> Iterator[Callable[[BaseException], None]]:
    """Sets what the handler of SIGUSR1 raises."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_to(error: BaseException) -> None:
        def handle(*_: object) -> None:
            raise error

        signal.signal(signal.SIGUSR1, handle)

    yield set_to
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of a handler"),
        TypeError("of a handler"),
        MemoryError("of a handler"),
        errors.InvalidArgumentError("of a handler"),
        TimeoutError("of a handler"),
        KeyboardInterrupt(),
        SystemExit(4),
    ],
    ids=repr,
)
def test_a_handlers_exception_passes_through_a_conversion(
    handler: Callable[[BaseException], None], error: BaseException
) -> None:
    handler(error)
    with (
        ConditionalAccumulator("f8", (2,)) as dense,
        SparseConditionalAccumulator("f8", (None, 2)) as sparse,
        AccumulatorGroup({"a": TensorSpec((2,), "f8")}) as group,
    ):
        for call in (
            lambda: dense.apply_grad(Slow(error)),
            lambda: sparse.apply_grad([1], [Slow(error)]),
            lambda: sparse.apply_grad(Slow(error), np.ones((2, 2))),
            lambda: group.apply({"a": Slow(error)}, 0),
            lambda: shmacc.SharedArrays({"a": Slow(error)}),
        ):
            with pytest.raises(type(error)) as caught:
                call()
            assert caught.value is error
        assert dense.num_accumulated() == sparse.num_accumulated() == group.num_accumulated() == 0


class Bad:
    """What cannot be viewed."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Fail by itself."""
        raise ValueError("no numbers here")


def test_a_conversions_own_exception_is_what_it_was() -> None:
    with (
        ConditionalAccumulator("f8", (2,)) as acc,
        pytest.raises(errors.InvalidArgumentError, match="ValueError: no numbers here"),
    ):
        acc.apply_grad(Bad())


# An apply in the block


def test_an_apply_that_would_wait_for_its_own_block_is_refused() -> None:
    with ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        acc.apply_grad(1.0)
        with ConditionalAccumulator("f8", (), reduction_type="SUM") as other:
            other.apply_grad(5.0)
            partial = other.take_partial()
        with acc.round(1):
            assert acc.apply_grad(2.0, 0) is False
            for step in (1, 7, NEVER_STALE):
                with pytest.raises(errors.FailedPreconditionError, match="own step"):
                    acc.apply_grad(2.0, step)
                with pytest.raises(errors.FailedPreconditionError, match="own step"):
                    acc.apply_grad(2.0, step, timeout=10.0)
            with pytest.raises(errors.FailedPreconditionError):
                acc.apply_partial(partial, NEVER_STALE)
        assert acc.apply_grad(2.0, 1)
        assert acc.take(1, timeout=0).value == 2.0


def test_also_of_another_handle_and_in_a_handler(handler: Callable[[Any], None]) -> None:
    with (
        ConditionalAccumulator("f8", (), "blocked", unlink_on_close=True) as acc,
        ConditionalAccumulator.attach("blocked") as other,
    ):
        acc.apply_grad(1.0)
        told: list[BaseException] = []

        def apply(*_: object) -> None:
            try:
                other.apply_grad(2.0, NEVER_STALE)
            except errors.FailedPreconditionError as error:
                told.append(error)

        handler(ValueError())
        signal.signal(signal.SIGUSR1, apply)
        with acc.round(1):
            signal.raise_signal(signal.SIGUSR1)
            apply()
        assert len(told) == 2


def test_after_the_block_was_given_up_it_is_not() -> None:
    with ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        acc.apply_grad(1.0)
        for _ in range(2):
            with contextlib.suppress(KeyError), acc.round(1):
                raise KeyError
            assert acc.apply_grad(1.0, NEVER_STALE)
        assert acc.take(3, timeout=0).value == 3.0
