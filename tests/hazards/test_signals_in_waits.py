"""A signal handler that raises ends any wait at once, and nothing has changed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Never

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, apart
from helpers.lock_holder import activity, held, sleeps, stopped_head
from helpers.support import AlarmError, run_to_end, soon, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection

# The test runner's own time limit is an alarm, too, so all waits are in other processes.
pytestmark = pytest.mark.threads

AT_ONCE: Final = 0.1  # seconds, as documented
# No wait here ends by itself.
LONG_TIMEOUT: Final = 3600.0


class AlarmExit(BaseException):
    """An exception that `except Exception` does not catch."""


RAISED: Final[dict[signal.Signals, type[BaseException]]] = {
    signal.SIGTERM: SystemExit,
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGALRM: AlarmError,
    signal.SIGUSR1: AlarmExit,
}


def raise_it(number: int, _: object) -> Never:
    raise RAISED[signal.Signals(number)]


@pytest.fixture
def acc(acc: ConditionalAccumulator) -> ConditionalAccumulator:
    acc.apply_grad(1.0)
    return acc


def _wait(call: Callable[[], Any], *, pipe: Pipe) -> tuple[type[BaseException], float]:
    """Wait; return how the wait ended, and when."""
    for number in RAISED:
        signal.signal(number, raise_it)
    try:
        pipe.say("about to wait")
        call()
    except BaseException as error:  # noqa: BLE001 - which, is the question
        return type(error), time.monotonic()
    raise AssertionError("the wait ended by itself")


def _break(call: Callable[[], Any], number: signal.Signals, doing: str | None = None) -> float:
    with Apart(_wait, call).ready() as waiting:
        until(lambda: not doing or activity("acc", waiting.pid) == doing)
        until(lambda: sleeps(waiting.pid))
        sent = time.monotonic()
        waiting.signal(number)
        raised, at = waiting.result()
    assert raised is RAISED[number]
    return float(at - sent)


def check_breaks(
    acc: ConditionalAccumulator, call: Callable[[], Any], number: signal.Signals, doing: str
) -> None:
    """Check that the wait ends at once, and that nothing has changed."""
    before = acc.num_accumulated(), acc.global_step, acc.stats().applied
    soon(lambda: _break(call, number, doing), AT_ONCE)
    assert acc.stats().waiting == 0
    assert (acc.num_accumulated(), acc.global_step, acc.stats().applied) == before


def each_with_a_signal(*ways: Any) -> pytest.MarkDecorator:
    """Parametrise with ways to wait, each ended by one of the signals; each signal is used."""
    count = max(len(ways), len(RAISED))
    pairs = [(ways[i % len(ways)], list(RAISED)[i % len(RAISED)]) for i in range(count)]
    return pytest.mark.parametrize(("how", "number"), pairs, ids=str)


@each_with_a_signal("take", "take_partial", "take with a timeout")
def test_a_signal_ends_a_take_in_the_queue(
    acc: ConditionalAccumulator, how: str, number: signal.Signals
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "take": lambda: acc.take(2),
        "take_partial": lambda: acc.take_partial(2, seal=True),
        "take with a timeout": lambda: acc.take(2, timeout=LONG_TIMEOUT),
    }
    check_breaks(acc, calls[how], number, "waits in the queue")
    # The interrupted take has left the queue: the next one is served.
    acc.apply_grad(2.0)
    assert acc.take_grad(2, timeout=0) == 3.0


@each_with_a_signal(
    "apply", "apply_partial", "take", "take with a timeout", "set_step", "advance_step", "unseal"
)
def test_a_signal_ends_a_wait_for_a_stopped_processs_lock(
    acc: ConditionalAccumulator, how: str, number: signal.Signals
) -> None:
    partial = acc.take_partial(1)
    acc.apply_partial(partial)
    calls: dict[str, Callable[[], Any]] = {
        "apply": lambda: acc.apply_grad(5.0),
        "apply_partial": lambda: acc.apply_partial(partial),
        "take": lambda: acc.take(1),
        "take with a timeout": lambda: acc.take(1, timeout=LONG_TIMEOUT),
        "set_step": lambda: acc.set_global_step(5),
        "advance_step": lambda: acc.advance_step(5),
        "unseal": acc.unseal,
    }
    with held("acc") as holder:
        check_breaks(acc, calls[how], number, "waits for the lock")
        holder.kill()
        assert acc.take_grad(1, timeout=LONG_TIMEOUT) == 1.0


def test_a_signal_ends_an_apply_that_waits_for_a_take(acc: ConditionalAccumulator) -> None:
    """The take has enough gradients, so the apply must let it take first."""
    number = signal.SIGTERM
    with stopped_head("acc", 2) as head:
        acc.apply_grad(2.0)
        _break(lambda: acc.apply_grad(5.0), number, "waits for the head of the queue")
        head.signal(signal.SIGCONT)
        assert head.result() == 2
    assert (acc.num_accumulated(), acc.global_step) == (0, 1)


@each_with_a_signal(None, LONG_TIMEOUT)
def test_a_signal_ends_a_wait_for_the_step(
    acc: ConditionalAccumulator, how: float | None, number: signal.Signals
) -> None:
    check_breaks(acc, lambda: acc.wait_step(0, timeout=how), number, "waits for the step")


@pytest.mark.beyond_tsan  # ThreadSanitizer delays signals
def test_a_signal_ends_a_wait_for_the_name(acc: ConditionalAccumulator) -> None:
    """A stopped process holds the name's lock, as if it was stopped in an open or a removal."""
    calls = {signal.SIGINT: lambda: shmacc.attach("acc"), signal.SIGUSR1: acc.unlink}
    with held("acc", layout.NAME_BYTE):
        for number, call in calls.items():
            # The wait would have lasted for two seconds.
            soon(lambda: _break(call, number))  # noqa: B023  it is called now
    assert not acc._handle.unlinked
    with shmacc.attach("acc") as again:
        assert again.num_accumulated() == 1


def _wait_in_two_threads(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    signal.signal(signal.SIGTERM, raise_it)
    thread = threading.Thread(target=lambda: acc.apply_grad(2.0))
    thread.start()
    pipe.turn("one waits")
    with pytest.raises(SystemExit):
        acc.apply_grad(4.0)
    pipe.say("broken")
    thread.join()


def test_other_threads_wait_on_when_a_signal_ends_one_wait(acc: ConditionalAccumulator) -> None:
    with held("acc") as holder, Apart(_wait_in_two_threads, acc).ready() as waiting:
        until(lambda: activity("acc", waiting.pid) == "waits for the lock")
        waiting.say("the main thread, too")
        until(lambda: sleeps(waiting.pid))
        waiting.signal(signal.SIGTERM)
        assert waiting.hear() == "broken"
        holder.kill()
        waiting.result()
    assert acc.take_grad(2, timeout=0) == 3.0


def _interrupted_again_and_again(acc: Any) -> int:
    seen, count = [], 0
    signal.signal(signal.SIGALRM, lambda *_: seen.append(acc.num_accumulated()))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    while count < 400 or len(seen) <= 10:
        rows = range(count, count + 50)
        assert acc.apply_grad(rows, [[1.0]] * 50, local_step=shmacc.NEVER_STALE)
        count += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return count


def test_handlers_that_return_change_nothing() -> None:
    """Signals arrive all the time in two processes that compete: each gradient counts once."""
    with SparseConditionalAccumulator("f8", None, "acc", reduction_type="SUM") as acc:
        with (
            Apart(_interrupted_again_and_again, acc) as one,
            Apart(_interrupted_again_and_again, acc) as other,
        ):
            count = one.result() + other.result()
        taken = acc.take(count, timeout=0)
        assert taken.count == count
        assert taken.values.sum() == count * 50
        assert taken.row_counts.sum() == count * 50
        acc.unlink()


def _wait_through_signals(acc: ConditionalAccumulator, *, pipe: Pipe) -> float:
    signal.signal(signal.SIGUSR1, lambda *_: pipe.say("handled"))
    signal.signal(signal.SIGUSR2, lambda *_: acc.apply_grad(2.0))
    pipe.say("about to wait")
    return float(acc.take_grad(2))


def test_a_wait_goes_on_after_a_handler_that_returns(acc: ConditionalAccumulator) -> None:
    """The handler may even make the call that ends the wait."""
    with Apart(_wait_through_signals, acc).ready() as waiting:
        until(lambda: acc.stats().waiting == 1)
        for _ in range(20):
            waiting.signal(signal.SIGUSR1)
            assert waiting.hear() == "handled"
        assert acc.stats().waiting == 1
        waiting.signal(signal.SIGUSR2)
        assert waiting.result() == 3.0


def _use_it_while_waiting_for_the_lock(acc: ConditionalAccumulator, *, pipe: Pipe) -> list[str]:
    ends: list[str] = []

    def handler(*_: object) -> None:
        ends.append(f"sees {acc.num_accumulated()} of {acc.stats().applied}")
        try:
            acc.take_partial(0, timeout=0)
        except errors.DeadlineExceededError:
            ends.append("no take")
        pipe.say("handling")
        ends.append(f"handler applied: {acc.apply_grad(2.0)}")

    signal.signal(signal.SIGUSR1, handler)
    pipe.say("about to wait")
    ends.append(f"applied: {acc.apply_grad(4.0)}")
    return ends


def test_a_handler_may_use_the_handle_of_its_threads_wait(acc: ConditionalAccumulator) -> None:
    """Another process has the lock; neither the wait nor the handler may block the other."""
    with held("acc") as holder, Apart(_use_it_while_waiting_for_the_lock, acc) as waiting:
        waiting.hear()
        until(lambda: activity("acc", waiting.pid) == "waits for the lock")
        waiting.signal(signal.SIGUSR1)
        assert waiting.hear() == "handling"
        holder.kill()
        assert waiting.result() == [
            "sees 1 of 1",
            "no take",
            "handler applied: True",
            "applied: True",
        ]
    assert acc.take_grad(3, timeout=0) == 7.0


def _close_in_the_handler(acc: ConditionalAccumulator, *, pipe: Pipe) -> str:
    signal.signal(signal.SIGUSR1, lambda *_: acc.close())
    pipe.say("about to wait")
    with pytest.raises(errors.CancelledError, match="cancelled"):
        acc.take_grad(2)
    with pytest.raises(errors.FailedPreconditionError):
        acc.num_accumulated()
    return "closed"


def test_a_handler_may_close_the_handle_of_its_threads_wait(acc: ConditionalAccumulator) -> None:
    with Apart(_close_in_the_handler, acc).ready() as waiting:
        until(lambda: acc.stats().waiting == 1)
        waiting.signal(signal.SIGUSR1)
        assert waiting.result() == "closed"
    assert acc.stats().attached == 1
    assert inspection.check("acc") == ()


@apart()
def test_a_function_that_replaced_current_frames_is_dropped_after_the_wait() -> None:
    """A wait asks it whether there are other threads, and each wait asks the one of its time."""
    real = sys._current_frames

    class Frames:
        called = False

        def __call__(self) -> Any:
            self.called = True
            return real()

    with ConditionalAccumulator("f4", (), "empty", unlink_on_close=True) as acc:
        for _ in range(3):
            frames = Frames()
            gone = weakref.ref(frames)
            sys._current_frames = frames
            with pytest.raises(errors.DeadlineExceededError):
                acc.take(1, timeout=0.01)
            sys._current_frames = real
            assert frames.called
            del frames
            assert gone() is None


# Preloaded, it runs a program in a thread that is not the process's first.
IN_ANOTHER_THREAD: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
typedef int Main(int, char **, char **);
static Main *program;
static int count;
static char **words, **environment;
static void *run(void *unused) { exit(program(count, words, environment)); }
static int start(int argc, char **argv, char **given) {
    pthread_t thread;
    count = argc, words = argv, environment = given;
    return pthread_create(&thread, NULL, run, NULL) || pthread_join(thread, NULL);
}
int __libc_start_main(Main *main, int argc, char **argv, void *a, void *b, void *c, void *d) {
    program = main;
    int (*next)(Main *, int, char **, void *, void *, void *, void *);
    next = dlsym(RTLD_NEXT, "__libc_start_main");
    return next(start, argc, argv, a, b, c, d);
}
"""
EMBEDDED: Final = """
import os, signal, sys, threading, time
import shmacc

assert threading.current_thread() is threading.main_thread()
assert threading.get_native_id() != os.getpid()

class Alarm(Exception):
    pass

def handler(*_):
    raise Alarm

signal.signal(signal.SIGALRM, handler)
with shmacc.attach("acc") as acc:
    for wait in (acc.take, acc.wait_step):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        begun = time.monotonic()
        try:
            wait(2, timeout=5)
        except Alarm:
            print(wait.__name__, time.monotonic() - begun < 5)
"""


@pytest.mark.beyond_asan  # AddressSanitizer's library must be loaded first
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.usefixtures("acc")
def test_a_signal_ends_waits_of_pythons_main_thread_in_another_than_the_first(
    tmp_path: Path,
) -> None:
    """A program that embeds Python may start it in any thread."""
    (tmp_path / "start.c").write_text(IN_ANOTHER_THREAD, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-o", "start.so", "start.c", "-pthread"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ran = run_to_end(
        [sys.executable, "-P", "-c", EMBEDDED],
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "start.so")},
    )
    assert ran.stdout.split() == ["take", "True", "wait_step", "True"]
