"""A child that ends in order has left in order, whichever handles it used, in whichever order.

A child of fork has its parent's handle and may attach by name, too; it applies through either, and
closes either, or leaves both to the end of the process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import multiprocessing.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers import interpreter
from helpers.departures import news
from helpers.support import LONG, START_METHODS, until

import shmacc
from shmacc import ConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ACTS: Final = ("attach", "apply to given", "apply to own", "close given", "close own")
BEFORE: Final = (
    ("attach", "apply to own"),
    ("attach", "close own"),
    ("apply to given", "close given"),
    ("apply to own", "close own"),
)
Order = tuple[str, ...]


def orders() -> Iterator[Order]:
    """All orders of all choices of acts, an apply among them."""
    for count in range(1, len(ACTS) + 1):
        for order in itertools.permutations(ACTS, count):
            if "attach" not in order and ("apply to own" in order or "close own" in order):
                continue
            if any(order.index(b) < order.index(a) for a, b in BEFORE if {a, b} <= set(order)):
                continue
            if any(act.startswith("apply") for act in order):
                yield order


ORDERS: Final = tuple(orders())
_kept: list[Any] = []  # until the process ends


def act_in_order(given: ConditionalAccumulator, order: Order) -> None:
    own: Any = None
    for act in order:
        if act == "attach":
            own = ConditionalAccumulator.attach(given.shared_name)
        one = own if act.endswith("own") else given
        if act.startswith("apply"):
            assert one.apply_grad(1.0, shmacc.NEVER_STALE)
        elif act.startswith("close"):
            one.close()
    _kept.append((given, own))


def act_in_all_orders(given: list[ConditionalAccumulator]) -> None:
    """Do all of them, each with an accumulator of its own."""
    for acc, order in zip(given, ORDERS, strict=True):
        act_in_order(acc, order)


def task() -> int:
    """Be a task that comes after the initializer."""
    return len(_kept)


def by_process(context: Any, given: list[ConditionalAccumulator]) -> None:
    process = context.Process(target=act_in_all_orders, args=(given,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


def by_pool(context: Any, given: list[ConditionalAccumulator]) -> None:
    with context.Pool(1, act_in_all_orders, (given,)) as pool:
        assert pool.apply(task) == len(ORDERS)
        pool.close()
        pool.join()


def by_executor(context: Any, given: list[ConditionalAccumulator]) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, context, act_in_all_orders, (given,)) as pool:
        assert pool.submit(task).result(LONG) == len(ORDERS)


def assert_left_in_order(accumulators: list[ConditionalAccumulator]) -> None:
    """Nobody who applied is dead, or attached."""
    for acc, order in zip(accumulators, ORDERS, strict=True):
        applies = sum(act.startswith("apply") for act in order)
        try:
            with pytest.raises(errors.DeadlineExceededError):
                acc.take(applies + 1, timeout=0, on_death="raise")
        except errors.WorkerDiedError as error:
            raise AssertionError(f"{order}: {error.reasons}") from None
        assert acc.num_accumulated() == applies, order
        assert acc.stats().attached == 1, order


@pytest.fixture
def accumulators() -> Iterator[list[ConditionalAccumulator]]:
    made = [
        ConditionalAccumulator("f8", (), f"order{i}", unlink_on_close=True)
        for i in range(len(ORDERS))
    ]
    yield made
    for acc in made:
        acc.close()


@pytest.mark.parametrize(
    ("run", "method"),
    [
        *[(by_process, method) for method in START_METHODS],
        (by_pool, "fork"),
        (by_executor, "forkserver"),
    ],
)
def test_a_child_that_ends_in_order_is_not_dead(
    accumulators: list[ConditionalAccumulator], run: Any, method: str
) -> None:
    """A forked child's copy need not be closed, and an object kept until the end is closed then."""
    run(multiprocessing.get_context(method), accumulators)
    assert_left_in_order(accumulators)


PROGRAM: Final = """
    sys.path[:0] = sys.argv[1:]
    from test_orders_of_leaving import ORDERS, act_in_all_orders

    given = [shmacc.ConditionalAccumulator.attach(f"order{i}") for i in range(len(ORDERS))]
    child = os.fork()
    if child == 0:
        act_in_all_orders(given)
    else:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_bare_fork_that_ends_as_a_program_does_is_not_dead(
    accumulators: list[ConditionalAccumulator],
) -> None:
    path = [*sys.path, str(Path(__file__).parent)]
    assert interpreter.run(PROGRAM, *path, warnings="ignore") == (0, "", "")
    assert_left_in_order(accumulators)


def exit_code(
    method: str, act: Callable[[ConditionalAccumulator], None], acc: ConditionalAccumulator
) -> int | None:
    """Run a child of multiprocessing to its end."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=act, args=(acc,))
    process.start()
    process.join()
    code: int | None = process.exitcode
    process.close()
    return code


def leave_a_daemon_waiting(acc: ConditionalAccumulator) -> None:
    """Be a child that has applied, and ends while a daemon thread of it waits."""

    def wait() -> None:
        with contextlib.suppress(errors.CancelledError):
            acc.take(2**40)

    threading.Thread(target=wait, daemon=True).start()
    until(lambda: acc.stats().waiting == 1)
    acc.apply_grad(1.0)


def leave_a_thread_applying(acc: ConditionalAccumulator) -> None:
    """Be a child whose thread, which is no daemon, applies after the child's function."""
    ends = threading.Event()

    def apply() -> None:
        ends.wait(LONG)
        for _ in range(2):
            acc.apply_grad(1.0)

    acc.apply_grad(1.0)
    multiprocessing.util.Finalize(None, ends.set, exitpriority=-1)
    threading.Thread(target=apply).start()


@pytest.mark.threads
@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(
    ("leave", "applies"), [(leave_a_daemon_waiting, 1), (leave_a_thread_applying, 3)]
)
def test_a_child_of_several_threads(
    method: str, leave: Callable[[ConditionalAccumulator], None], applies: int
) -> None:
    with ConditionalAccumulator("f8", (), "threads", unlink_on_close=True) as acc:
        assert exit_code(method, leave, acc) == 0
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(applies + 1, timeout=0, on_death="raise")
        assert acc.num_accumulated() == applies


def leave_a_thread_working(acc: ConditionalAccumulator, works: Any) -> None:
    """Be a child whose thread applies after the child's function, and then for ever waits."""

    def apply() -> None:
        until(lambda: not threading.main_thread().is_alive())  # and it has called its finalizers
        acc.apply_grad(1.0)
        works.set()
        threading.Event().wait()

    threading.Thread(target=apply).start()


@pytest.mark.threads
@pytest.mark.parametrize("method", START_METHODS)
def test_a_kill_of_a_child_whose_thread_works_on_is_told(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    works = context.Event()
    with ConditionalAccumulator("f8", (), "threads", unlink_on_close=True) as acc:
        process = context.Process(target=leave_a_thread_working, args=(acc, works))
        process.start()
        assert works.wait(LONG)
        assert news(acc) is None
        process.kill()
        process.join()
        assert news(acc) == ((process.pid,), ("killed",), ())


def fail_while_a_thread_closes(acc: ConditionalAccumulator) -> None:
    """Fail, and have a thread close the accumulator while the error's text is made."""
    asked, closed = threading.Event(), threading.Event()

    class FailedError(Exception):
        def __str__(self) -> str:
            asked.set()
            closed.wait(LONG)
            return "slow"

    def close() -> None:
        asked.wait(LONG)
        acc.close()
        closed.set()

    acc.apply_grad(1.0)
    threading.Thread(target=close).start()
    raise FailedError


@pytest.mark.threads
@pytest.mark.parametrize("method", START_METHODS)
def test_a_child_that_fails_while_a_thread_closes(method: str) -> None:
    with ConditionalAccumulator("f8", (), "threads", unlink_on_close=True) as acc:
        assert exit_code(method, fail_while_a_thread_closes, acc) == 1
