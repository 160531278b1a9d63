"""Who left in order, who failed, who died: however the process was started and came to its end."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart
from helpers.departures import NAME, fail_in_a_block, make, news
from helpers.interpreter import run
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, raw_ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with make() as made:
        yield made
        made.unlink()


def apply_by_name(how: str = "close") -> None:
    """Open it by name, in a child that may have its parent's, too."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    if how == "close":
        own.close()
    else:
        _kept.append(own)


_kept: list[Any] = []


def test_the_last_one_that_it_has_opened_is_what_attaches_a_child(
    acc: ConditionalAccumulator,
) -> None:
    """Not its parent's handle, which it has and does not use."""

    def close_and_stay(*, pipe: Pipe) -> None:
        apply_by_name()
        pipe.say()
        pipe.hear()
        acc.apply_grad(1.0, shmacc.NEVER_STALE)  # it can be used all the same
        pipe.say()
        pipe.hear()
        acc.close()

    with Apart(close_and_stay) as child:
        child.hear()
        assert acc.stats().attached == 1
        child.say()
        child.hear()
        assert acc.stats().attached == 2
        child.say()
        child.result()
    assert news(acc) is None
    assert acc.num_accumulated() == 2


def apply_in_pool(task: int) -> int:
    with ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=task)
    return task


def test_workers_of_pools_leave_in_order(acc: ConditionalAccumulator) -> None:
    context: Any = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        assert sorted(executor.map(apply_in_pool, range(4))) == list(range(4))
        assert acc.stats().attached == 1
    with context.Pool(2) as pool:
        assert pool.map(apply_in_pool, range(4, 8)) == list(range(4, 8))
        assert acc.stats().attached == 1
        pool.close()
        pool.join()
    assert news(acc) is None
    assert acc.take(8, timeout=0).contributors.tolist() == list(range(8))


def fail_by_name(text: str) -> None:
    apply_by_name("keep")
    raise ValueError(text)


def fail_with_the_parents(acc: Any, text: str) -> None:
    acc.apply_grad(1.0, shmacc.NEVER_STALE)
    raise ValueError(text)


def ended(method: str, target: Any, *args: Any) -> int:
    """Run a child of multiprocessing to its end; its pid."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=target, args=args)
    process.start()
    pid: int = process.pid
    process.join()
    process.close()
    return pid


@pytest.mark.parametrize(
    ("method", "by_name"), [("fork", True), ("spawn", False), ("forkserver", True)]
)
def test_a_child_that_is_ended_by_an_exception_has_failed(
    acc: ConditionalAccumulator, method: str, *, by_name: bool
) -> None:
    how = (fail_by_name,) if by_name else (fail_with_the_parents, acc)
    pid = ended(method, *how, "bad batch")
    assert news(acc) == ((pid,), ("ValueError: bad batch",), ())
    assert news(acc) is None


def leave(status: Any) -> None:
    apply_by_name("keep")
    sys.exit(status)


@pytest.mark.parametrize(
    ("target", "end", "reason"),
    [
        (apply_by_name, "keep", None),
        (fail_by_name, "keep", "ValueError: keep"),
        (leave, 3, "SystemExit: 3"),
    ],
)
def test_what_the_parent_handles_is_no_failure_of_its_child(
    acc: ConditionalAccumulator, target: Any, end: Any, reason: str | None
) -> None:
    """A worker that is started again where the loss of the first one is handled."""
    try:
        int("the parent's")
    except ValueError:
        pid = ended("fork", target, end)
    assert news(acc) == (((pid,), (reason,), ()) if reason else None)


def fail_as(end: Any) -> None:
    """Fail by an exception, and end by another one while it is handled."""
    try:
        fail_by_name("bad batch")
    except ValueError:
        if end == "exit in an exit":
            try:
                sys.exit(2)
            finally:
                sys.exit(1)
        if end == "from None":
            raise SystemExit(1) from None
        sys.exit(end)


@pytest.mark.parametrize(
    ("method", "target", "end", "reason"),
    [
        ("fork", leave, None, None),
        ("fork", leave, 0, None),
        ("fork", leave, 3, "SystemExit: 3"),
        ("fork", leave, "no data", "SystemExit: no data"),
        ("spawn", fail_as, 1, "ValueError: bad batch"),  # as torch.multiprocessing.spawn ends them
        ("fork", fail_as, "exit in an exit", "ValueError: bad batch"),
        ("fork", fail_as, "from None", "ValueError: bad batch"),
        ("fork", fail_as, "no data", "SystemExit: no data"),
        ("fork", fail_as, 0, None),
    ],
)
def test_a_childs_exit_says_how_it_ends(
    acc: ConditionalAccumulator, method: str, target: Any, end: Any, reason: str | None
) -> None:
    """By its status, and by the exception that is handled meanwhile."""
    pid = ended(method, target, end)
    assert news(acc) == (((pid,), (reason,), ()) if reason else None)
    assert news(acc) is None


# Programs


PROGRAMS: Final = """
    def leave_a_daemon():
        daemon(lambda: acc.take(99))
        until(lambda: acc.stats().waiting)

    for number, end in enumerate(sys.argv[2:]):
        pid = os.fork()
        if pid == 0:
            acc = shmacc.attach(sys.argv[1])
            acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=number)
            exec(end)
            break
        os.waitpid(pid, 0)
        print(pid, flush=True)
"""
ENDS: Final = {
    "try: raise ValueError\nexcept ValueError: pass": None,
    "acc.close()": None,
    "sys.exit()": None,
    "with acc: sys.exit(0)": None,
    "leave_a_daemon()": None,
    "raise ValueError('no such file')": "ValueError: no such file",
    "with acc: raise ValueError('no such file')": "ValueError: no such file",
    "with acc: sys.exit(3)": "SystemExit: 3",
    "with acc:\n  try: raise ValueError('a')\n  except ValueError: sys.exit(3)": "ValueError: a",
    "try:\n  with acc: raise ValueError('b')\nexcept ValueError: sys.exit(3)": "ValueError: b",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "leave_a_daemon(); raise ValueError('beside it')": "ValueError: beside it",
    "import multiprocessing.util; own = shmacc.attach(sys.argv[1]); raise ValueError('late')": (
        "ValueError: late"  # multiprocessing's finalizers come before those of `acc`
    ),
    "os._exit(0)": "killed",
}


def test_ends_of_programs(acc: ConditionalAccumulator) -> None:
    status, output, _ = run(PROGRAMS, NAME, *ENDS, warnings="ignore")
    assert status == 0
    of_pids = dict(zip(map(int, output.split()), ENDS, strict=True))
    pids, reasons, contributors = news(acc) or ((), (), ())
    found = {of_pids[pid]: reason for pid, reason in zip(pids, reasons, strict=True)}
    assert found == {end: reason for end, reason in ENDS.items() if reason}
    assert contributors == tuple(i for i, end in enumerate(ENDS) if ENDS[end])
    assert news(acc) is None
    assert acc.stats().attached == 1


FORKS_IN_A_THREAD: Final = """
    parents = shmacc.attach(sys.argv[1])

    def work():
        until(lambda: threading.main_thread() not in threading.enumerate())
        acc.apply_grad(1.0, shmacc.NEVER_STALE)

    def child(number, end):
        global acc
        acc = parents if number % 2 else shmacc.attach(sys.argv[1])
        acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=number)
        exec(end, globals())

    def one(number, end):
        pid = os.fork()
        if pid == 0:
            child(number, end)
        else:
            os.wait()
            print(pid, flush=True)

    for number, end in enumerate(sys.argv[2:]):
        thread = threading.Thread(target=one, args=(number, end))
        thread.start()
        thread.join()
"""
ENDS_OF_THREADS: Final = {
    "sys.exit(0)": None,
    "sys.exit()": None,
    "pass": None,
    "acc.close()": None,
    "threading.Thread(target=work).start()": None,
    "threading.Thread(target=work).start(); sys.exit(0)": None,
    "if os.fork() == 0: sys.exit(0)\nos.wait()": None,
    "sys.exit(3)": "SystemExit: 3",
    "raise ValueError('no such file')": "ValueError: no such file",
    "with acc: raise KeyError(5)": "KeyError: 5",
    "os._exit(0)": "killed",
    "os.kill(os.getpid(), 9)": "killed",
}


def test_ends_of_children_that_a_thread_has_forked(acc: ConditionalAccumulator) -> None:
    """Python calls nothing at their ends, whether they have their parent's handle or their own."""
    for ends in (list(ENDS_OF_THREADS), ["pass", *ENDS_OF_THREADS]):
        status, output, _ = run(FORKS_IN_A_THREAD, NAME, *ends, warnings="ignore")
        assert status == 0
        of_pids = dict(zip(map(int, output.split()), ends, strict=True))
        pids, reasons, _ = news(acc) or ((), (), ())
        told = {of_pids[pid]: why for pid, why in zip(pids, reasons, strict=True)}
        assert told == {end: why for end, why in ENDS_OF_THREADS.items() if why}
        assert news(acc) is None
        assert acc.stats().attached == 1
        assert acc.take(1, timeout=0).count == len(ends) + 2


# Blocks


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyError("w"), "KeyError: 'w'"),
        (RuntimeError(), "RuntimeError"),
        (GeneratorExit(), "GeneratorExit"),  # an error in a loop may have closed the generator
        (SystemExit("no data"), "SystemExit: no data"),
        (ValueError("\U0001f600" * 1000), "ValueError: " + "\U0001f600" * 200),
        (ValueError("a\nb\x00c\ud800"), "ValueError: a\nb\x00c?"),
        # This library's errors end with what to do, which is not cut off.
        (errors.DataLossError("é" * 300 + ": do"), "DataLossError: " + "é" * 300 + ": do"),
        (
            errors.DataLossError("é" * 1000 + ": do"),
            "DataLossError: " + "é" * 243 + " ... " + "é" * 248 + ": do",
        ),
    ],
)
def test_an_exception_that_leaves_the_block_is_a_failure(
    acc: ConditionalAccumulator, error: BaseException, reason: str
) -> None:
    with Apart(fail_in_a_block, error, 7) as process:
        process.hear()
        assert news(acc) == ((process.pid,), (reason,), (7,))
        assert news(acc) is None
        assert acc.stats().attached == 1
        process.say()
        process.result()
    assert news(acc) is None


@pytest.mark.parametrize("status", [None, False])
def test_an_exit_in_order_is_none(acc: ConditionalAccumulator, status: Any) -> None:
    with Apart(fail_in_a_block, SystemExit(status), 7) as process:
        process.hear()
        assert news(acc) is None


def test_a_raw_op_that_refuses_its_argument_is_no_failure(acc: ConditionalAccumulator) -> None:
    """It opens the accumulator by its name; the process goes on."""

    def refuse(*, pipe: Pipe) -> None:
        assert raw_ops.AccumulatorApplyGradient(NAME, shmacc.NEVER_STALE, 1.0)
        with suppress(errors.InvalidArgumentError):
            raw_ops.AccumulatorApplyGradient(NAME, shmacc.NEVER_STALE, [1.0])
        with suppress(errors.InvalidArgumentError):
            raw_ops.AccumulatorTakeGradient(NAME, 1, "int8")
        pipe.say()
        pipe.hear()

    with Apart(refuse) as process:
        process.hear()
        assert news(acc) is None
        process.say()
        process.result()


def test_a_failure_ends_a_wait_that_is_going_on(acc: ConditionalAccumulator) -> None:
    waits: list[Any] = []

    def wait() -> None:
        try:
            acc.take(9, timeout=LONG, on_death="raise")
        except errors.WorkerDiedError as error:
            waits.append(error.reasons)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: acc.stats().waiting == 1)
    with Apart(fail_in_a_block, ValueError("bad"), 7) as process:
        process.hear()
        thread.join(LONG)
    assert waits == [("ValueError: bad",)]


def test_a_failure_is_news_although_the_process_is_still_attached(
    acc: ConditionalAccumulator,
) -> None:
    """It has another handle; and one exception that goes through two blocks is one failure."""

    def fail(*, pipe: Pipe) -> None:
        kept = ConditionalAccumulator.attach(NAME)
        with (
            suppress(ValueError),
            ConditionalAccumulator.attach(NAME),
            ConditionalAccumulator.attach(NAME) as own,
        ):
            own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=3)
            raise ValueError("bad")
        pipe.say()
        pipe.hear()
        kept.apply_grad(1.0, shmacc.NEVER_STALE, contributor=4)
        kept.close()
        pipe.say()
        pipe.hear()

    with Apart(fail) as process:
        process.hear()
        assert acc.stats().attached == 2
        assert news(acc) == ((process.pid,), ("ValueError: bad",), (3,))
        assert news(acc) is None
        process.say()
        process.hear()
        assert acc.stats().attached == 1
        assert news(acc) is None
        process.say()
        process.result()


def test_an_exception_that_is_raised_again_is_another_failure(acc: ConditionalAccumulator) -> None:
    """A future raises the same one each time it is asked."""

    def fail(*, pipe: Pipe) -> None:
        error = ValueError("bad")
        for contributor in (1, 2):
            with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
                own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
                raise error
            pipe.say()
            pipe.hear()

    with Apart(fail) as process:
        for contributor in (1, 2):
            process.hear()
            assert news(acc) == ((process.pid,), ("ValueError: bad",), (contributor,))
            assert news(acc) is None
            process.say()
        process.result()


def fail_in_pool() -> None:
    with ConditionalAccumulator.attach(NAME):
        raise ValueError("bad")


def test_an_exception_with_which_another_process_failed_is_a_failure(
    acc: ConditionalAccumulator,
) -> None:
    """It comes from a pool, whose worker has left its own block by it."""
    context: Any = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        error = executor.submit(fail_in_pool).exception()
    assert isinstance(error, ValueError)
    assert news(acc) is None
    with Apart(fail_in_a_block, error, 7) as process:
        process.hear()
        assert news(acc) == ((process.pid,), ("ValueError: bad",), (7,))


def test_a_forked_childs_exception_is_not_its_parents(acc: ConditionalAccumulator) -> None:
    """The child fails in its parent's block, but has not used the accumulator."""

    def fork(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0, shmacc.NEVER_STALE)
            child = os.fork()
            if child == 0:
                with suppress(ValueError), own:
                    raise ValueError("the child's")
                os._exit(0)
            os.waitpid(child, 0)
            pipe.say()
            pipe.hear()

    with Apart(fork) as process:
        process.hear()
        assert news(acc) is None
        process.say()
        process.result()
    assert news(acc) is None


def test_a_process_that_was_not_told_of_and_leaves_in_order_later(
    acc: ConditionalAccumulator,
) -> None:
    def fail(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as kept:
            with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
                own.apply_grad(1.0, shmacc.NEVER_STALE)
                raise ValueError("bad")
            kept.apply_grad(1.0, shmacc.NEVER_STALE)
        pipe.say()

    with Apart(fail) as process:
        process.hear()
        process.wait()
        assert news(acc) == ((process.pid,), ("ValueError: bad",), ())
        assert news(acc) is None
