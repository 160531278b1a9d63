"""Which ends of a process a take reports, for each way to start it, use a handle, and end it."""

import concurrent.futures
import itertools
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import interpreter
from helpers.apart import Apart, Pipe
from helpers.departures import NAME, news
from helpers.departures import acc as acc
from helpers.support import LONG, START_METHODS, until

import shmacc
from shmacc import ConditionalAccumulator

# Ways to start a process. Each runs a function in a child and waits for the child's end.

Run = Callable[..., None]


def fork(function: Run, *args: Any) -> None:
    """Fork; the child goes on to the end of the program."""
    if os.fork() == 0:
        function(*args)
    else:
        os.wait()


def fork_in_a_thread(function: Run, *args: Any) -> None:
    """Fork in a thread; Python calls nothing at the end of such a child."""
    thread = threading.Thread(target=fork, args=(function, *args))
    thread.start()
    thread.join()


def by_process(method: str) -> Run:
    def run(function: Run, *args: Any) -> None:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=function, args=args)
        process.start()
        process.join()
        process.close()

    return run


def while_handling(function: Run, *args: Any) -> None:
    """Fork while the parent handles an exception, which must not count as the child's."""
    try:
        int("the parent's")
    except ValueError:
        by_process("fork")(function, *args)


def by_pool(function: Run, *args: Any) -> None:
    with multiprocessing.get_context("fork").Pool(1, function, args) as pool:
        pool.apply(os.getpid)  # after the function, which is the initializer
        pool.close()
        pool.join()


def by_executor(function: Run, *args: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(1, context, function, args) as pool:
        pool.submit(os.getpid).result(LONG)


STARTED: Final[dict[str, Run]] = {
    "fork": fork, "fork in a thread": fork_in_a_thread,
    **{f"Process, {method}": by_process(method) for method in START_METHODS},
    "Process, fork, while handling": while_handling, "Pool": by_pool, "Executor": by_executor,
}  # fmt: skip

# Ways to end: code that a child runs after its apply, and what a take reports (or None).

ENDS: Final = {
    "pass": None,
    "acc.close()": None,
    "sys.exit()": None,
    "sys.exit(0)": None,
    "with acc: sys.exit(0)": None,
    "try: raise ValueError\nexcept ValueError: pass": None,
    "try: raise ValueError\nexcept ValueError: sys.exit(0)": None,
    "leave_a_daemon(acc)": None,
    "apply_after_the_main_thread(acc)": None,
    "apply_after_the_main_thread(acc); sys.exit(0)": None,
    "if os.fork() == 0: sys.exit(0)\nos.wait()": None,
    "sys.exit(3)": "SystemExit: 3",
    "sys.exit('no data')": "SystemExit: no data",
    "raise ValueError('a')": "ValueError: a",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "with acc: raise ValueError('a')": "ValueError: a",
    "with acc: sys.exit(3)": "SystemExit: 3",
    # multiprocessing's finalizers come before those of `acc`.
    "import multiprocessing.util; own = shmacc.attach(NAME); raise KeyError(5)": "KeyError: 5",
    # torch.multiprocessing.spawn ends its processes as in the next case.
    "try: raise ValueError('a')\nexcept ValueError: sys.exit(1)": "ValueError: a",
    "try: raise ValueError('a')\nexcept ValueError: raise SystemExit(1) from None": "ValueError: a",
    "try: raise ValueError('a')\nexcept ValueError: sys.exit('no data')": "SystemExit: no data",
    "try: raise ValueError('a')\nexcept ValueError:\n"
    "  try: sys.exit(2)\n  finally: sys.exit(1)": "ValueError: a",
    "with acc:\n  try: raise ValueError('a')\n  except ValueError: sys.exit(3)": "ValueError: a",
    "try:\n  with acc: raise ValueError('a')\nexcept ValueError: sys.exit(3)": "ValueError: a",
    "leave_a_daemon(acc); raise ValueError('a')": "ValueError: a",
    "os._exit(0)": "killed",
    "os.kill(os.getpid(), 9)": "killed",
}
# Blocks and multiprocessing see every exit, but no hook sees a SystemExit that ends a program.
NO_FAILURES_OF_PROGRAMS: Final = {
    end for end in ENDS if re.search(r"sys.exit|SystemExit", end) and "with acc" not in end
}
# spawn starts processes slowly, so it has fewer cases.
SPAWNED: Final = ["pass", "apply_after_the_main_thread(acc)", *list(ENDS)[-9:]]


def leave_a_daemon(acc: ConditionalAccumulator) -> None:
    threading.Thread(target=lambda: acc.take(2**40), daemon=True).start()
    until(lambda: acc.stats().waiting > 0)


def apply_after_the_main_thread(acc: ConditionalAccumulator) -> None:
    main = threading.main_thread()

    def apply() -> None:
        until(lambda: main not in threading.enumerate() or not main.is_alive())
        acc.apply_grad(1.0, shmacc.NEVER_STALE)

    threading.Thread(target=apply).start()


_kept: list[Any] = []  # keeps handles open until the process ends


def apply_and_end(given: ConditionalAccumulator | None, number: int, end: str) -> None:
    """Run a child: apply through the parent's handle or a new one, and end."""
    acc = given or ConditionalAccumulator.attach(NAME)
    _kept.append(acc)
    acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=number)
    print(number, os.getpid(), flush=True)  # noqa: T201 - the test reads it
    exec(end, {**globals(), "acc": acc})  # noqa: S102 - it stands above


def cases_of(started: str) -> list[tuple[str, bool]]:
    """List the ends to try for this way to start, and whether to use the parent's handle."""
    if started in {"Process, spawn", "Process, forkserver"}:
        return list(zip(SPAWNED, itertools.cycle((False, True))))
    return list(itertools.product(ENDS, (False, True)))


def fate(started: str, end: str) -> str | None:
    """Return what takes report about such a child; None: nothing."""
    if started == "fork" and end in NO_FAILURES_OF_PROGRAMS:
        return None
    return ENDS[end]


PROGRAM: Final = """
    sys.path[:0] = sys.argv[3:]
    import test_ends_of_processes as ends
    getattr(ends, sys.argv[1])(sys.argv[2])
"""


def run_program(function: Callable[[str], None], started: str) -> str:
    """Call a function of this module in a program of its own; return what it prints."""
    path = [*sys.path, str(Path(__file__).parent)]
    status, output, complaints = interpreter.run(
        PROGRAM, function.__name__, started, *path, warnings="ignore"
    )
    assert status == 0, complaints
    return output


def start_children(started: str) -> None:
    """Start the children one after the other."""
    parent = os.getpid()
    given = ConditionalAccumulator.attach(NAME)
    for number, (end, by_given) in enumerate(cases_of(started)):
        STARTED[started](apply_and_end, given if by_given else None, number, end)
        if os.getpid() != parent:
            return  # this is the child


@pytest.mark.parametrize("started", [name for name in STARTED if name not in {"Pool", "Executor"}])
def test_takes_report_only_failures_and_deaths(acc: ConditionalAccumulator, started: str) -> None:
    output = run_program(start_children, started)
    numbers = {int(pid): int(number) for number, pid in map(str.split, output.splitlines())}
    cases = cases_of(started)
    assert len(numbers) == len(cases)
    pids, reasons, contributors = news(acc) or ((), (), ())
    told = {cases[numbers[pid]]: reason for pid, reason in zip(pids, reasons, strict=True)}
    assert told == {case: fate(started, case[0]) for case in cases if fate(started, case[0])}
    assert contributors == tuple(sorted(numbers[pid] for pid in pids))
    assert news(acc) is None
    assert acc.stats().attached == 1
    assert acc.num_accumulated() == len(cases) + sum("apply" in end for end, _ in cases)


# Several handles, in any order


ACTS: Final = ("attach", "apply to given", "apply to own", "close given", "close own")
BEFORE: Final = (
    ("attach", "apply to own"),
    ("attach", "close own"),
    ("apply to given", "close given"),
    ("apply to own", "close own"),
)
Order = tuple[str, ...]


def orders() -> Iterator[Order]:
    """Yield all possible orders of any of the acts, with at least one apply."""
    for count in range(1, len(ACTS) + 1):
        for order in itertools.permutations(ACTS, count):
            if "attach" not in order and ("apply to own" in order or "close own" in order):
                continue
            if any(order.index(b) < order.index(a) for a, b in BEFORE if {a, b} <= set(order)):
                continue
            if any(act.startswith("apply") for act in order):
                yield order


ORDERS: Final = tuple(orders())


def act_in_all_orders(given: list[ConditionalAccumulator]) -> None:
    """Run a child that performs each order on an accumulator of its own."""
    for shared, order in zip(given, ORDERS, strict=True):
        own: Any = None
        for act in order:
            if act == "attach":
                own = ConditionalAccumulator.attach(shared.shared_name)
            one = own if act.endswith("own") else shared
            if act.startswith("apply"):
                assert one.apply_grad(1.0, shmacc.NEVER_STALE)
            elif act.startswith("close"):
                one.close()
        _kept.append((shared, own))


def start_a_child_of_all_orders(started: str) -> None:
    given = [ConditionalAccumulator.attach(f"order{i}") for i in range(len(ORDERS))]
    STARTED[started](act_in_all_orders, given)


@pytest.mark.parametrize("started", STARTED)
def test_a_child_with_several_handles_that_ends_in_order_is_not_dead(started: str) -> None:
    """The child applies through its parent's handle, its own or both, and closes in any order."""
    with ExitStack() as stack:
        accumulators = [
            stack.enter_context(ConditionalAccumulator("f8", (), f"order{i}", unlink_on_close=True))
            for i in range(len(ORDERS))
        ]
        run_program(start_a_child_of_all_orders, started)
        for each, order in zip(accumulators, ORDERS, strict=True):
            assert news(each) is None, order
            assert each.num_accumulated() == sum(act.startswith("apply") for act in order), order
            assert each.stats().attached == 1, order


def test_a_child_is_attached_only_by_handles_that_it_uses(acc: ConditionalAccumulator) -> None:
    """The parent's handle does not attach the child before the child uses it."""

    def close_and_stay(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0, shmacc.NEVER_STALE)
        pipe.turn()
        acc.apply_grad(1.0, shmacc.NEVER_STALE)  # attaches the child
        pipe.turn()
        acc.close()

    with Apart(close_and_stay).ready() as child:
        assert acc.stats().attached == 1
        child.turn()
        assert acc.stats().attached == 2
        child.finish()
    assert news(acc) is None
    assert acc.num_accumulated() == 2


# Threads that outlive the main thread


def leave_a_thread_working(acc: ConditionalAccumulator, works: Any) -> None:
    """Run a child whose thread applies after the main thread has ended, and then waits."""

    def apply() -> None:
        until(lambda: not threading.main_thread().is_alive())  # finalizers have run, too
        acc.apply_grad(1.0)
        works.set()
        threading.Event().wait()

    threading.Thread(target=apply).start()


@pytest.mark.threads
@pytest.mark.parametrize("method", START_METHODS)
def test_the_kill_of_a_threaded_child_is_reported(acc: ConditionalAccumulator, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    works = context.Event()
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
def test_a_child_may_fail_while_its_thread_closes(acc: ConditionalAccumulator, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=fail_while_a_thread_closes, args=(acc,))
    process.start()
    process.join()
    assert process.exitcode == 1
