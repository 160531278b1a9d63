"""A signal handler interrupts a take at any instant: its round is not lost.

Either the take consumed nothing, or a later take returns what it had taken.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.lock_holder import activity
from helpers.support import LONG, AlarmError, alarm, slept, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, SparseConditionalAccumulator, errors
from shmacc._values import dtypes

# The test runner's own time limit is an alarm, too, so interrupts happen in other processes.
pytestmark = pytest.mark.threads

NAME: Final = "interrupted"
WIDTH: Final = 64
# Rows: copying LARGE takes about a millisecond, copying SMALL almost no time.
SMALL, LARGE = 4, 10_000
# Copying this many rows takes so long that a signal sent when it has begun arrives in time.
HUGE: Final = 200_000


def make(kind: Any, dtype: str = "float32") -> Any:
    """Make an accumulator of sums; each gradient adds 1 to its first number."""
    return kind(dtype, None, NAME, reduction_type="SUM")


def gradient(acc: Any, rows: int) -> tuple[Any, ...]:
    values = np.ones((rows, WIDTH), acc.dtype)
    kind = type(acc)
    return (values,) if kind is ConditionalAccumulator else (np.arange(rows), values)


def number(taken: Any) -> int:
    """Return how many gradients a take returned, as its sums show."""
    for field in ("value", "values"):
        taken = getattr(taken, field, taken)
    return int(taken.flat[0])


METHODS: Final[dict[str, Callable[[Any], Any]]] = {
    "take": lambda acc: acc.take(1, timeout=0),
    "take_grad": lambda acc: acc.take_grad(1, timeout=0),
    "take_partial": lambda acc: acc.take_partial(1, timeout=0),
    "take_partial of anything": lambda acc: acc.take_partial(0, timeout=0, seal=True),
    "take_indexed_slices_grad": lambda acc: acc.take_indexed_slices_grad(1, timeout=0),
    "raw op": lambda acc: shmacc.raw_ops.SparseAccumulatorTakeGradient(acc, 1, acc.dtype),
}


def _take_under_fire(kind: Any, rows: int, dtype: str, method: str, hits: int) -> None:
    """Take round after round, with one alarm for each at a random instant."""
    armed = False

    def raise_it(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise AlarmError

    signal.signal(signal.SIGALRM, raise_it)
    take, applied, hit = METHODS[method], 0, 0
    rng = random.Random(1)
    with make(kind, dtype) as acc:
        each = gradient(acc, rows)
        lasted = 0.0
        while hit < hits:
            gradients = rng.randint(1, 3)
            applied += gradients
            acc.unseal()
            for _ in range(gradients):
                assert acc.apply_grad(*each, local_step=NEVER_STALE)
            taken: Any = None
            armed = lasted > 0
            try:
                # The alarm comes within a little more than a take's time, so it hits some takes.
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.uniform(0, 1.2 * lasted))
                began = time.perf_counter()
                taken = take(acc)
                armed = False
                lasted += 0.1 * (time.perf_counter() - began - lasted)
            except AlarmError:
                hit += 1
            if taken is None:
                taken = take(acc)
            assert (number(taken), acc.num_accumulated()) == (gradients, 0)
        stats = acc.stats()
        assert (stats.applied, stats.taken, stats.waiting) == (applied, applied, 0)
        acc.unlink()


@pytest.mark.parametrize(
    ("kind", "method", "rows", "dtype"),
    [
        *((SparseConditionalAccumulator, method, SMALL, "float32") for method in METHODS),
        *((ConditionalAccumulator, method, SMALL, "float32") for method in list(METHODS)[:4]),
        (SparseConditionalAccumulator, "take", LARGE, "float32"),
        # These results are also converted.
        (SparseConditionalAccumulator, "take", LARGE, "bfloat16"),
        (ConditionalAccumulator, "take_partial", LARGE, "int16"),
    ],
)
def test_each_gradient_is_taken_once_whatever_alarms_interrupt(
    kind: Any, method: str, rows: int, dtype: str
) -> None:
    run_apart(_take_under_fire, kind, rows, dtype, method, 200 if rows == SMALL else 60)


@pytest.fixture
def huge() -> Iterator[Any]:
    """Yield an accumulator with one gradient, which takes long to copy."""
    with make(SparseConditionalAccumulator) as acc:
        assert acc.apply_grad(*gradient(acc, HUGE))
        yield acc
        acc.unlink()


def _signal_amid_the_copy(taker: Apart) -> None:
    """Send a signal during the copy; on a slow machine it may come later: then the test retries."""
    taker.hear()
    until(lambda: activity(NAME, taker.pid) == "takes" or taker.pipe.poll())
    taker.signal(signal.SIGUSR1)


def _take_with_a_handler(handler: Callable[[Any], Any], *, pipe: Pipe) -> tuple[Any, ...]:
    """Return the handler's result, the take's count and step, and how long the take slept."""
    acc = shmacc.attach(NAME)
    handled: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(handler(acc)))
    pipe.say("ready")
    start = slept()
    count = step = 0
    with contextlib.suppress(errors.DeadlineExceededError):  # the handler may take the gradient
        taken = acc.take(1, timeout=0.2)
        count, step = taken.count, taken.step
    return handled[0] if handled else None, count, step, slept() - start


def _attempts(huge: Any) -> Iterator[None]:
    """Apply one gradient and yield, again and again until a signal comes in time."""
    for _ in range(100):
        huge.take_partial(0)
        assert huge.apply_grad(*gradient(huge, HUGE), local_step=NEVER_STALE)
        yield
    pytest.fail("the signal always came too late")


def _with_a_handler(huge: Any, handler: Callable[[Any], Any], count: int) -> tuple[Any, ...]:
    """Repeat `_take_with_a_handler` until the handler ran in the copy, as the count shows."""
    for _ in _attempts(huge):
        with Apart(_take_with_a_handler, handler) as taker:
            _signal_amid_the_copy(taker)
            handled, got, step, sleeping = taker.result()
        if got == count:
            break
    return handled, step, sleeping


def test_a_handler_that_ends_the_process_during_a_take_consumes_nothing(huge: Any) -> None:
    for _ in _attempts(huge):
        with Apart(_take_with_a_handler, lambda _: os._exit(0)) as taker:
            _signal_amid_the_copy(taker)
            taker.wait()
        if huge.num_accumulated() == 1:
            break
    assert huge.take(1, timeout=0).count == 1


def _apply_one(acc: Any) -> bool:
    return bool(acc.apply_grad([0], np.ones((1, WIDTH), acc.dtype), local_step=NEVER_STALE))


def test_a_handler_may_apply_during_a_take(huge: Any) -> None:
    """The apply does not wait for the interrupted take, which includes its gradient."""
    applied, _, sleeping = _with_a_handler(huge, _apply_one, count=2)
    assert applied
    assert sleeping < 0.9  # an apply would wait longer for a head that does not take
    assert huge.num_accumulated() == 0


def test_a_handler_may_set_the_step_during_a_take(huge: Any) -> None:
    """The take reports the step at its commit, not at the start of its copy."""
    new = 1_000_000
    for _ in _attempts(huge):
        huge.set_global_step(0)
        with Apart(_take_with_a_handler, lambda acc: acc.set_global_step(new)) as taker:
            _signal_amid_the_copy(taker)
            _, _, step, _ = taker.result()
        if huge.stats().global_step == new + 1:
            break
    assert step == new


HANDLERS: Final[tuple[Callable[[Any], int], ...]] = (
    lambda acc: acc.take(1, timeout=LONG).count,
    lambda acc: acc.take_partial(0, timeout=0).count,
)


@pytest.mark.parametrize("handler", HANDLERS, ids=["take", "take_partial"])
def test_a_handler_may_take_during_a_take(huge: Any, handler: Any) -> None:
    """The interrupted take then has nothing, and waits on."""
    in_handler, *_ = _with_a_handler(huge, handler, count=0)
    assert in_handler == 1
    assert (huge.num_accumulated(), huge.stats().waiting) == (0, 0)


def _fork_in_the_copy(*, pipe: Pipe) -> tuple[int, int]:
    """Return the count of a take whose handler forks, and the count of the child's take."""
    acc = shmacc.attach(NAME)
    child = -1

    def fork(*_: object) -> None:
        nonlocal child
        child = os.fork()

    signal.signal(signal.SIGUSR1, fork)
    pipe.say("ready")
    count = 0
    with contextlib.suppress(errors.CancelledError):
        count = acc.take(1, timeout=LONG).count
    if child == 0:
        os._exit(count)
    return count, 1 if child < 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_handler_may_fork_during_a_take(huge: Any) -> None:
    """The take and its entry in the queue stay the parent's."""
    for _ in _attempts(huge):
        with Apart(_fork_in_the_copy) as taker:
            _signal_amid_the_copy(taker)
            mine, childs = taker.result()
        assert mine == 1
        assert huge.stats().waiting == 0
        if childs == 0:  # if not, the fork came too late: both have the result
            break


# --- a taken round that did not get to the caller ------------------------------------------------


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparseConditionalAccumulator]:
    """Yield an accumulator that keeps a taken round, since its conversion had no memory."""
    narrow, attempts = dtypes.DType.narrow, iter([MemoryError("no memory")])

    def narrow_later(self: dtypes.DType, results: Any) -> Any:
        for error in attempts:
            raise error
        return narrow(self, results)

    monkeypatch.setattr(dtypes.DType, "narrow", narrow_later)
    with make(SparseConditionalAccumulator, "float16") as acc:
        acc.apply_grad([0], [[1.0]])
        with pytest.raises(errors.ResourceExhaustedError, match="next take"):
            acc.take(1)
        assert (acc.num_accumulated(), acc.global_step) == (0, 1)
        yield acc
    with shmacc.attach(NAME) as again:
        again.unlink()


def _take_in_vain(acc: Any) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(1, timeout=0)


def test_any_later_take_returns_the_kept_round(half: SparseConditionalAccumulator) -> None:
    """The exceptions are a partial take and a forked child's take."""
    assert half.take_partial(0).count == 0
    run_apart(_take_in_vain, half)
    half.apply_grad([0], [[2.0]], local_step=1)
    with ThreadPoolExecutor(1) as pool:
        taken: Any = pool.submit(half.take, 5, timeout=0).result()
    assert (taken.count, taken.step, taken.values.tolist()) == (1, 0, [[1.0]])
    taken = half.take(1, timeout=0)
    assert (taken.count, taken.step, taken.values.tolist()) == (1, 1, [[2.0]])
    _take_in_vain(half)


def test_a_take_of_another_kind_returns_the_round_of_an_interrupted_take(
    half: SparseConditionalAccumulator,
) -> None:
    assert half.take_grad(1, timeout=0).values.tolist() == [[1.0]]


def test_a_kept_round_is_lost_with_its_handle(half: SparseConditionalAccumulator) -> None:
    with shmacc.attach(NAME) as other:
        half.close()
        with pytest.raises(errors.FailedPreconditionError):
            half.take(1, timeout=0)
        _take_in_vain(other)


def test_an_interrupted_empty_partial_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with ConditionalAccumulator("f4", (3,)) as acc:
        with monkeypatch.context() as patched:
            patched.setattr(np, "zeros", alarm)
            with pytest.raises(AlarmError):
                acc.take_partial(0)
        acc.apply_grad([1.0, 2.0, 3.0])
        assert acc.take_partial(1).count == 1
