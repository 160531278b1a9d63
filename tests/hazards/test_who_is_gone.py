"""Who left in order, who failed, who died: however the process was started, whatever came between.

Each death or failure of a process that had applied ends one wait that asks for it: not none, and
not two.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart, Pipe
from helpers.interpreter import run
from helpers.support import LONG, START_METHODS, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, errors, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "gone"
FIELDS: Final = ("pids", "reasons", "contributors")


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator("f8", (), NAME, reduction_type="SUM", lanes=2) as made:
        yield made
        made.unlink()


def news(acc: Any) -> tuple[Any, ...] | None:
    """What a take is told that has to wait; None: nothing."""
    try:
        acc.take(2**40, timeout=0, on_death="raise")
    except errors.WorkerDiedError as error:
        return tuple(getattr(error, field) for field in FIELDS)
    except errors.DeadlineExceededError:
        return None
    raise AssertionError


def work(contributor: int | None = None, *, pipe: Pipe) -> None:
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


# Children of multiprocessing


def apply_by_name(how: str = "close") -> None:
    """Open it by name, in a child that may have its parent's, too."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    if how == "close":
        own.close()
    else:
        _kept.append(own)


_kept: list[Any] = []


@pytest.mark.parametrize("how", ["close", "keep"])
@pytest.mark.parametrize("method", START_METHODS)
def test_a_child_that_opens_it_by_name_leaves_in_order(
    acc: ConditionalAccumulator, method: str, how: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=apply_by_name, args=(how,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    assert acc.stats().attached == 1
    assert news(acc) is None


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
    """A task."""
    with ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=task)
    return task


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_of_pools_leave_in_order(acc: ConditionalAccumulator, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
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
    """Fail, without a block."""
    apply_by_name("keep")
    raise ValueError(text)


def fail_with_the_parents(acc: Any, text: str) -> None:
    """Fail, with what came as an argument."""
    acc.apply_grad(1.0, shmacc.NEVER_STALE)
    raise ValueError(text)


@pytest.mark.parametrize("whose", ["by name", "as an argument"])
@pytest.mark.parametrize("method", START_METHODS)
def test_a_child_that_is_ended_by_an_exception_has_failed(
    acc: ConditionalAccumulator, method: str, whose: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    if whose == "by name":
        process = context.Process(target=fail_by_name, args=("bad batch",))
    else:
        process = context.Process(target=fail_with_the_parents, args=(acc, "bad batch"))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert news(acc) == ((process.pid,), ("ValueError: bad batch",), ())
    assert news(acc) is None
    process.close()


@pytest.mark.parametrize(
    ("status", "failed"), [(None, False), (0, False), (3, True), ("no data", True)]
)
def test_a_childs_exit_status_says_how_it_ends(
    acc: ConditionalAccumulator, status: Any, *, failed: bool
) -> None:
    def leave() -> None:
        apply_by_name("keep")
        sys.exit(status)

    process: Any = multiprocessing.get_context("fork").Process(target=leave)
    process.start()
    process.join()
    found = news(acc)
    assert found == (((process.pid,), (f"SystemExit: {status}",), ()) if failed else None)
    process.close()


def fail_as(end: str, text: str) -> None:
    """Fail by an exception, and end by another one while it is handled."""
    try:
        fail_by_name(text)
    except ValueError:
        if end == "exit in an exit":
            try:
                sys.exit(2)
            finally:
                sys.exit(1)
        if end == "from None":
            raise SystemExit(1) from None
        sys.exit(1 if end == "status" else 0 if end == "in order" else end)


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("status", "ValueError: bad batch"),  # as torch.multiprocessing.spawn ends its workers
        ("exit in an exit", "ValueError: bad batch"),
        ("from None", "ValueError: bad batch"),
        ("no data", "SystemExit: no data"),
        ("in order", None),
    ],
)
def test_an_exit_while_an_exception_is_handled_is_told_by_that_exception(
    acc: ConditionalAccumulator, method: str, end: str, reason: str | None
) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=fail_as, args=(end, "bad batch"))
    process.start()
    process.join()
    assert news(acc) == (((process.pid,), (reason,), ()) if reason else None)
    assert news(acc) is None
    process.close()


# Programs


PROGRAM: Final = """
    import os, sys, threading, time
    import shmacc

    acc = shmacc.attach({name!r})
    acc.apply_grad(1.0, shmacc.NEVER_STALE, contributor=5)

    def leave_a_daemon():
        threading.Thread(target=acc.take, args=(99,), daemon=True).start()
        while not acc.stats().waiting:
            time.sleep(0.001)

    {end}
"""


def run_program(end: str) -> int:
    """Run a program that applies, and ends so; its pid."""
    text = textwrap.dedent(PROGRAM).format(name=NAME, end=end)
    with subprocess.Popen([sys.executable, "-P", "-c", text], stderr=subprocess.DEVNULL) as program:
        program.wait()
        return program.pid


@pytest.mark.parametrize(
    "end",
    [
        "",
        "acc.close()",
        "sys.exit()",
        "sys.exit(0)",
        "with acc: sys.exit(0)",
        "leave_a_daemon()",
        "try: raise ValueError\nexcept ValueError: pass",
    ],
)
def test_programs_that_end_in_order(acc: ConditionalAccumulator, end: str) -> None:
    run_program(end)
    assert news(acc) is None
    assert acc.stats().attached == 1


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise ValueError('no such file')", "ValueError: no such file"),
        ("with acc: raise ValueError('no such file')", "ValueError: no such file"),
        ("with acc: sys.exit(3)", "SystemExit: 3"),
        (
            "with acc:\n        try: raise ValueError('a')\n        except ValueError: sys.exit(3)",
            "ValueError: a",
        ),
        (
            "try:\n        with acc: raise ValueError('a')\nexcept ValueError: sys.exit(3)",
            "ValueError: a",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("leave_a_daemon(); raise ValueError('beside it')", "ValueError: beside it"),
    ],
)
def test_programs_that_fail(acc: ConditionalAccumulator, end: str, reason: str) -> None:
    pid = run_program(end)
    assert news(acc) == ((pid,), (reason,), (5,))
    assert news(acc) is None
    assert acc.stats().attached == 1


def test_a_program_that_leaves_without_a_word_is_dead(acc: ConditionalAccumulator) -> None:
    pid = run_program("os._exit(0)")
    assert news(acc) == ((pid,), ("killed",), (5,))


# Blocks


def fail_in_a_block(error: BaseException, contributor: int, *, pipe: Pipe) -> None:
    """Leave the block of an accumulator by an exception, and live on."""
    with suppress(type(error)), ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
        raise error
    pipe.say()
    pipe.hear()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyError("w"), "KeyError: 'w'"),
        (RuntimeError(), "RuntimeError"),
        (SystemExit("no data"), "SystemExit: no data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 200),
        (ValueError("\U0001f600" * 1000), "ValueError: " + "\U0001f600" * 200),
        (ValueError("a\nb\x00c\ud800"), "ValueError: a\nb\x00c?"),
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


@pytest.mark.parametrize("status", [None, 0, False])
def test_an_exit_in_order_is_none(acc: ConditionalAccumulator, status: Any) -> None:
    with Apart(fail_in_a_block, SystemExit(status), 7) as process:
        process.hear()
        assert news(acc) is None


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


def test_a_process_that_fails_again_is_news_again(acc: ConditionalAccumulator) -> None:
    def fail_twice(*, pipe: Pipe) -> None:
        for number in range(2):
            with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
                own.apply_grad(1.0, shmacc.NEVER_STALE)
                raise ValueError(number)
            pipe.say()
            pipe.hear()

    with Apart(fail_twice) as process:
        for number in range(2):
            process.hear()
            assert news(acc) == ((process.pid,), (f"ValueError: {number}",), ())
            assert news(acc) is None
            process.say()
        process.result()
    assert news(acc) is None


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


def fail_before_a_gradient() -> None:
    """Be a worker with an error in its first lines."""
    with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
        own.num_accumulated()
        raise ValueError("bad")


def test_a_timeout_names_those_that_the_round_may_lack(acc: ConditionalAccumulator) -> None:
    def message() -> str:
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(2**40, timeout=0.01)
        return str(caught.value)

    assert "gone" not in message()
    with Apart(fail_before_a_gradient) as failed:
        failed.result()
    with worker() as killed:
        killed.kill()
    gone = f"pid {failed.pid}, ValueError: bad; pid {killed.pid}, killed"
    assert f"gradients had arrived; gone: {gone}; " in message()
    assert news(acc) == ((killed.pid,), ("killed",), ()), "it was no news to that wait"
    for _ in range(3):
        with worker() as later:
            later.kill()
    assert f"pid {later.pid}, killed; and 2 earlier; " in message()
    acc.take(1)
    assert f"pid {later.pid}, killed" in message(), "they would have gone on to this round"
    acc.apply_grad(1.0, shmacc.NEVER_STALE)
    acc.take(1)
    assert "gone" not in message()


def test_a_failure_of_one_that_never_applied_is_no_news(acc: ConditionalAccumulator) -> None:
    with Apart(fail_before_a_gradient) as process:
        process.result()
        assert news(acc) is None
    with inspection_view() as view:
        [event] = [event for event in view.events() if event["kind"] == FAILED]
        assert (event["pid"], event["reason"]) == (process.pid, "ValueError: bad")


FAILED: Final = shmacc._core.EVENTS["failed"]


def inspection_view() -> Any:
    """What inspection reads."""
    import contextlib

    from shmacc._layout import names
    from shmacc._opening import removal

    return contextlib.closing(removal.view(names.segment_name(NAME)))


# What comes between


def test_a_death_is_not_forgotten_by_a_newcomer_and_a_take(acc: ConditionalAccumulator) -> None:
    with worker(7) as dead:
        dead.kill()
        ConditionalAccumulator.attach(NAME).close()
        assert acc.take(1, timeout=0).count == 1
        assert news(acc) == ((dead.pid,), ("killed",), ())
    assert news(acc) is None


def test_a_death_is_not_forgotten_by_an_empty_partial(acc: ConditionalAccumulator) -> None:
    with worker() as dead:
        dead.kill()
        with worker():  # finds the dead one's entry
            pass
        acc.take_partial(0)
        acc.take_partial(0)
        told = news(acc)
        assert told is not None
        assert dead.pid in told[0]


@pytest.mark.parametrize("what", ["attaches", "cancels"])
def test_a_death_is_not_forgotten_by_many_events(acc: ConditionalAccumulator, what: str) -> None:
    with worker(7) as dead:
        dead.kill()
        for _ in range(200):
            if what == "cancels":
                acc.cancel()
            else:
                ConditionalAccumulator.attach(NAME).close()
        assert news(acc) == ((dead.pid,), ("killed",), (7,))
    assert news(acc) is None


def test_eighty_at_once_are_told_in_one_error(acc: ConditionalAccumulator) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(Apart(work, number)) for number in range(80)]
        for process in workers:
            process.hear()
        for process in workers:
            process.kill()
        pids, reasons, contributors = news(acc) or ((), (), ())
        assert sorted(pids) == sorted(process.pid for process in workers)
        assert reasons == ("killed",) * 80
        assert contributors == tuple(range(80))
    assert news(acc) is None
    assert acc.take(80, timeout=0).count == 80


def test_deaths_and_failures_are_told_together(acc: ConditionalAccumulator) -> None:
    with worker(1) as dead, Apart(fail_in_a_block, ValueError("bad"), 2) as failed:
        failed.hear()
        dead.kill()
        pids, reasons, contributors = news(acc) or ((), (), ())
        assert dict(zip(pids, reasons, strict=True)) == {
            dead.pid: "killed",
            failed.pid: "ValueError: bad",
        }
        assert contributors == (1, 2)
    assert news(acc) is None


def test_all_that_it_has_in_the_round(acc: ConditionalAccumulator) -> None:
    def apply(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            for contributor in (9, 2, 30):
                own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
            pipe.say()
            pipe.hear()
            own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=4)
            pipe.say()
            pipe.hear()

    with worker(5), Apart(apply) as process:
        process.hear()
        acc.take(4, timeout=0)  # these are in no round any more
        acc.apply_grad(1.0, 1, contributor=8)
        process.say()
        process.hear()
        process.kill()
        assert news(acc) == ((process.pid,), ("killed",), (4,))


def test_contributors_that_another_one_restored_are_nobodys(acc: ConditionalAccumulator) -> None:
    with worker(5) as dead:
        acc.restore(acc.state())
        dead.kill()
        assert news(acc) == ((dead.pid,), ("killed",), ())
    assert acc.take(1, timeout=0).contributors.tolist() == [5]


APPLY_AND_DIE: Final = """
    shmacc.ConditionalAccumulator.attach(sys.argv[1]).close()  # all is imported
    for _ in range(int(sys.argv[2])):
        pid = os.fork()
        if pid == 0:
            own = shmacc.ConditionalAccumulator.attach(sys.argv[1])
            own.apply_grad(1.0, shmacc.NEVER_STALE)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(pid)
"""


def test_so_many_are_kept_as_news(acc: ConditionalAccumulator) -> None:
    """The table of deaths is full at 1,024: a new one replaces the least recently active."""
    most = 1024
    # An interpreter of its own: to fork the test runner costs several times as much.
    status, output, complaints = run(APPLY_AND_DIE, NAME, str(most + 20), warnings="ignore")
    assert (status, complaints) == (0, "")
    pids = [int(pid) for pid in output.split()]
    told, _, _ = news(acc) or ((), (), ())
    assert len(told) == most
    assert set(told) == set(pids[-len(told) :])
    assert news(acc) is None
    ConditionalAccumulator.attach(NAME).close()
    with inspection_view() as view:
        assert view.departures() == []


# Chiefs


def chief_died(acc: Any) -> tuple[Any, ...] | None:
    """What a wait for the step is told that asks for it."""
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


def lead(rounds: int, how: str = "take", *, pipe: Pipe) -> None:
    """Be a chief; stay until told how to go."""
    own = ConditionalAccumulator.attach(NAME)
    for _ in range(rounds):
        own.apply_grad(1.0, shmacc.NEVER_STALE)
        if how == "take":
            own.take(1)
        else:
            with own.round(1):
                if how == "in the block":
                    pipe.say()
                    pipe.hear()
    pipe.say()
    if pipe.hear() == "fail":
        with suppress(ValueError), own:
            raise ValueError("diverged")
    own.close()
    pipe.say()


@pytest.mark.parametrize("how", ["take", "round"])
def test_a_chief_that_was_killed(acc: ConditionalAccumulator, how: str) -> None:
    assert chief_died(acc) is None
    with Apart(lead, 2, how) as chief:
        chief.hear()
        assert chief_died(acc) is None
        chief.kill()
        for _ in range(2):  # it is so for all, and stays so
            assert chief_died(acc) == ((chief.pid,), ("killed",))
        ConditionalAccumulator.attach(NAME).close()
        assert news(acc) is not None  # it had applied, too
        assert chief_died(acc) == ((chief.pid,), ("killed",))
        # A step that has moved on comes first.
        assert acc.wait_step(acc.global_step - 1, on_death="raise") == acc.global_step


def test_a_chief_that_has_failed(acc: ConditionalAccumulator) -> None:
    with Apart(lead, 1) as chief:
        chief.hear()
        chief.say("fail")
        chief.hear()
        assert chief_died(acc) == ((chief.pid,), ("ValueError: diverged",))


def test_a_chief_that_has_left_in_order_does_not_count(acc: ConditionalAccumulator) -> None:
    with Apart(lead, 1) as chief:
        chief.hear()
        chief.say()
        chief.result()
    assert chief_died(acc) is None
    with Apart(lead, 1) as dead:
        dead.hear()
        dead.kill()
        with Apart(lead, 1) as chief:
            chief.hear()
            assert chief_died(acc) is None  # somebody alive has taken
            chief.say()
            chief.result()
        assert chief_died(acc) == ((dead.pid,), ("killed",))


def test_a_first_round_that_is_open_counts(acc: ConditionalAccumulator) -> None:
    with Apart(lead, 1, "in the block") as chief:
        chief.hear()
        assert chief_died(acc) is None
        chief.kill()
        assert chief_died(acc) == ((chief.pid,), ("killed",))


def test_somebody_who_waits_to_take_is_a_chief(acc: ConditionalAccumulator) -> None:
    def wait(*, pipe: Pipe) -> None:
        pipe.say()
        with ConditionalAccumulator.attach(NAME) as own:
            own.take(99)

    with Apart(lead, 1) as dead:
        dead.hear()
        dead.kill()
        with Apart(wait) as waiting:
            waiting.hear()
            until(lambda: acc.stats().waiting == 1)
            assert chief_died(acc) is None
            waiting.kill()
        assert chief_died(acc) == ((dead.pid,), ("killed",))


def test_a_wait_that_is_going_on_ends_soon(acc: ConditionalAccumulator) -> None:
    told: list[Any] = []

    def wait() -> None:
        try:
            acc.wait_step(99, timeout=LONG, on_death="raise")
        except errors.ChiefDiedError as error:
            told.append(error.pids)

    with Apart(lead, 1) as chief:
        chief.hear()
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: "waits for the step" in activities())
        chief.kill()
        thread.join(LONG)
        assert told == [(chief.pid,)]


def activities() -> list[str]:
    """What the processes do that have it attached."""
    return [process.activity for process in inspection.describe(NAME).processes]


def test_without_it_the_wait_goes_on(acc: ConditionalAccumulator) -> None:
    with Apart(lead, 1) as chief:
        chief.hear()
        chief.kill()
    for wait in (
        lambda: acc.wait_step(9, timeout=0.1),
        lambda: [None for _ in acc.steps(timeout=0.1)],
    ):
        with pytest.raises(errors.DeadlineExceededError):
            wait()


def test_the_end_comes_before_the_chiefs_death(acc: ConditionalAccumulator) -> None:
    with Apart(lead, 1) as chief:
        chief.hear()
        chief.kill()
    acc.finish()
    with pytest.raises(errors.FinishedError):
        acc.wait_step(9, on_death="raise")


def test_of_a_group() -> None:
    def fail(*, pipe: Pipe) -> None:
        with suppress(ValueError), AccumulatorGroup.attach(NAME) as own:
            own.apply({"a": 1.0}, 0, contributor=9)
            with own.round(1) as taken:
                assert taken.count == 1
            own.apply({"a": 1.0}, 1, contributor=9)
            raise ValueError("bad")
        pipe.say()
        pipe.hear()

    with (
        AccumulatorGroup({"a": TensorSpec(())}, NAME, unlink_on_close=True) as group,
        Apart(fail) as process,
    ):
        process.hear()
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
        assert news(group) == ((process.pid,), ("ValueError: bad",), (9,))
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
