"""A signal handler raises at any point: no round stays open, and no exception is swallowed.

A round that a living process leaves open would stop all others for as long as that process lives.
"""

import asyncio
import contextlib
import gc
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.at_every_point import Points, coming_between
from helpers.support import LONG, AlarmError, alarm

import shmacc
from shmacc import errors

pytestmark = pytest.mark.beyond_asan


def _at_every_point(attempt: Callable[[Any], None]) -> None:
    """Raise at each point; while the exception and its traceback exist, no round may be open."""
    with shmacc.ConditionalAccumulator("f8", (), reduction_type="SUM") as acc:
        number, came = 0, True
        while came:
            number += 1
            step = acc.global_step
            acc.apply_grad(1.0, step)
            error: BaseException | None = None
            with coming_between(alarm, Points.INSTRUCTIONS, number) as between:
                try:
                    attempt(acc)
                except (AlarmError, KeyError, errors.DeadlineExceededError) as raised:
                    error = raised
            came = between.came
            # The thread of a dropped coroutine may still open the round, and then gives it up.
            for thread in threading.enumerate():
                if thread.name == "shmacc: a coroutine's wait":
                    thread.join(LONG)
            assert acc.stats().round_pid is None, f"left open at point {number}"
            assert (acc.global_step - step, acc.num_accumulated()) in {(0, 1), (1, 0)}
            assert came or not isinstance(error, AlarmError)
            del error
            acc.take_partial(0)


HOW: Final = ("in order", "by an exception", "waiting in vain")


# Garbage collections are left out: Python prints and drops exceptions raised in them.
@pytest.mark.parametrize("how", [*HOW, "kept by a variable"])
def test_a_handler_may_raise_at_every_point_of_a_round(how: str) -> None:
    """The points are all places where Python can run a handler, and more."""
    if how == "kept by a variable" and sys.version_info[:2] == (3, 14):
        pytest.skip(
            "Python 3.14 runs handlers between __enter__ and the block: locks stay locked, too"
        )

    def have_round(acc: Any) -> None:
        if how == "kept by a variable":
            block = acc.round(1)
            with block:
                return
        with acc.round(1 if how != "waiting in vain" else 2, timeout=0.01):
            if how == "by an exception":
                raise KeyError

    _at_every_point(have_round)


async def _have_round_async(acc: Any, how: str) -> None:
    if how == "a take":
        await acc.take_async(1, timeout=LONG)
        return
    async with acc.round_async(1 if how != "waiting in vain" else 2, timeout=0.01):
        if how == "by an exception":
            raise KeyError


# Python drops exceptions raised in callbacks of weak references, which asyncio's tasks have.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", [*HOW, "a take"])
def test_a_handler_may_raise_at_every_point_of_a_coroutines_round(how: str) -> None:
    def have_round(acc: Any) -> None:
        with asyncio.Runner() as runner:
            runner.run(_have_round_async(acc, how))

    _at_every_point(have_round)


def test_an_interrupted_constructor_gives_no_warning() -> None:
    """There is no warning even when the object is collected."""

    def construct() -> list[str]:
        said: list[Any] = []
        sys.unraisablehook = said.append
        with shmacc.ConditionalAccumulator("f8", ()) as acc:
            number, came = 0, True
            while came:
                number += 1
                with (
                    contextlib.suppress(AlarmError),
                    coming_between(alarm, Points.INSTRUCTIONS, number) as between,
                ):
                    acc.round(1)
                    acc.round_async(1)
                came = between.came
                gc.collect()
        return [str(each) for each in said]

    assert run_apart(construct) == []


# Conversions


class Slow:
    """A foreign array whose conversion runs Python code, during which a signal arrives."""

    def __init__(self, error: BaseException | None) -> None:
        """Keep the error that the handler raises meanwhile."""
        self._error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Send a signal while NumPy reads this array."""
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(3):  # handlers run between these steps
            pass
        return np.ones(2, dtype)

    def __float__(self) -> float:
        """Send a signal while this number is read."""
        return float(self.__array__()[0])


@pytest.fixture
def handler() -> Iterator[Callable[[BaseException], None]]:
    """Yield a function that sets what the handler of SIGUSR1 raises."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_to(error: BaseException) -> None:
        def handle(*_: object) -> None:
            raise error

        signal.signal(signal.SIGUSR1, handle)

    yield set_to
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [
    ValueError("of a handler"), MemoryError("of a handler"),
    errors.InvalidArgumentError("of a handler"), KeyboardInterrupt(),
], ids=repr)  # fmt: skip
def test_a_handlers_exception_is_not_reported_as_a_bad_argument(
    handler: Callable[[BaseException], None], error: BaseException
) -> None:
    handler(error)
    with (
        shmacc.ConditionalAccumulator("f8", (2,)) as dense,
        shmacc.SparseConditionalAccumulator("f8", (None, 2)) as sparse,
        shmacc.AccumulatorGroup({"a": shmacc.TensorSpec((2,), "f8")}) as group,
    ):
        for call in (
            lambda: dense.apply_grad(Slow(error)),
            lambda: sparse.apply_grad([1], [Slow(error)]),
            lambda: sparse.apply_grad(Slow(error), np.ones((2, 2))),
            lambda: group.apply({"a": Slow(error)}, 0),
            lambda: shmacc.SharedArrays({"a": Slow(error)}),
            lambda: shmacc.optim.SGD(Slow(error)),  # type: ignore[arg-type]
        ):
            with pytest.raises(type(error)) as caught:
                call()
            assert caught.value is error
        assert dense.num_accumulated() == sparse.num_accumulated() == group.num_accumulated() == 0


# An apply in the block


@pytest.mark.usefixtures("handler")
def test_an_apply_that_would_wait_for_its_own_block_is_refused() -> None:
    """This holds for other handles and in signal handlers, but not after the block's end."""
    with (
        shmacc.ConditionalAccumulator("f8", (), "blocked", reduction_type="SUM") as acc,
        shmacc.ConditionalAccumulator.attach("blocked") as other,
        shmacc.ConditionalAccumulator("f8", (), reduction_type="SUM") as private,
    ):
        acc.apply_grad(1.0)
        private.apply_grad(5.0)
        partial = private.take_partial()
        refused = 0

        def apply(*_: object) -> None:
            nonlocal refused
            calls: tuple[Callable[[], Any], ...] = (
                lambda: acc.apply_grad(2.0, 1),
                lambda: acc.apply_grad(2.0, shmacc.NEVER_STALE, timeout=10.0),
                lambda: acc.apply_partial(partial, shmacc.NEVER_STALE),
                lambda: other.apply_grad(2.0, 7),
            )
            for call in calls:
                with pytest.raises(errors.FailedPreconditionError, match="own step"):
                    call()
                refused += 1

        with contextlib.suppress(KeyError), acc.round(1):
            assert acc.apply_grad(2.0, 0) is False
            apply()
            signal.signal(signal.SIGUSR1, apply)
            signal.raise_signal(signal.SIGUSR1)
            raise KeyError
        assert refused == 8
        assert acc.apply_grad(1.0, shmacc.NEVER_STALE)
        with acc.round(2) as taken:
            assert taken.value == 2.0
        assert acc.apply_grad(2.0, 1)
        assert acc.take(1, timeout=0).value == 2.0
        acc.unlink()


# Steps


@pytest.mark.parametrize("points", [Points.LINES, Points.INSTRUCTIONS])
def test_a_handler_may_raise_at_every_point_of_a_loop_over_steps(points: Points) -> None:
    """The loop goes on: no step is skipped, none comes twice."""
    with shmacc.ConditionalAccumulator("f8", ()) as acc:
        for number in itertools.count(1):
            steps = acc.steps(timeout=0)
            seen = []
            with coming_between(alarm, points, number) as between, contextlib.suppress(AlarmError):
                seen.append(next(steps))
            if not seen:
                seen.append(next(steps))
            acc.set_global_step(seen[0] + 1)
            seen.append(next(steps))
            assert seen == [acc.global_step - 1, acc.global_step], number
            if not between.came:
                break
