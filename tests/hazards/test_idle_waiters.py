"""A waiting process uses almost no processor time, and still wakes at once."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.segment_file import SegmentFile
from helpers.support import LONG, AlarmError, alarm, soon, until

import shmacc
from shmacc import ConditionalAccumulator, errors
from shmacc._base import names

# Takes near the queue's head look for dead takes in front more often than takes further back.
NEAR: Final = 8
# After this time a waiter's sleeps have their full length, and one sleep is over.
LONG_AGO: Final = 1.3
AT_ONCE: Final = 0.1  # seconds, as documented


def _take(num_required: int) -> tuple[int, float]:
    with shmacc.attach("acc") as acc:
        return acc.take(num_required, timeout=LONG).count, time.monotonic()


def _follow() -> int:
    with shmacc.attach("acc") as acc:
        return int(acc.wait_step(0, timeout=LONG))


@contextmanager
def queued(acc: Any, *numbers: int) -> Iterator[list[Apart]]:
    """Start processes that wait in the queue, in this order."""
    with ExitStack() as stack:
        waiting = []
        for place, number in enumerate(numbers, start=1):
            waiting.append(stack.enter_context(Apart(_take, number)))
            until(lambda place=place: acc.stats().waiting == place)  # type: ignore[misc]
        yield waiting


def wakes(process: Apart) -> int:
    """Return how often a process has slept."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_takes_behind_the_head_and_waits_for_a_step_sleep(acc: ConditionalAccumulator) -> None:
    with Apart(_follow) as follower, queued(acc, *[2] * (NEAR + 2)) as waiting:
        until(lambda: acc.stats().attached == NEAR + 4)
        time.sleep(LONG_AGO)
        before, start = [wakes(follower), wakes(waiting[-1])], time.monotonic()
        time.sleep(1.0)
        lasted = time.monotonic() - start
        assert wakes(follower) - before[0] <= 4 * lasted
        assert wakes(waiting[-1]) - before[1] <= 4 * lasted
        acc.set_global_step(1)
        assert follower.result() == 1
        acc.cancel()


def test_a_take_is_served_when_all_in_front_of_it_die(acc: ConditionalAccumulator) -> None:
    def served_after() -> float:
        with queued(acc, *[3] * (NEAR + 2), 1) as waiting:
            acc.apply_grad(1.0, acc.global_step)
            time.sleep(LONG_AGO)
            *front, last = waiting
            for process in front:
                process.signal(signal.SIGKILL)
            died = time.monotonic()
            count, served = last.result()
        assert count == 1
        return float(served - died)

    soon(served_after)


def _interrupted(call: Callable[[Any], Any]) -> float:
    """Return the seconds from a signal in a thread to the end of a long wait."""
    sent = 0.0

    def send() -> None:
        nonlocal sent
        time.sleep(LONG_AGO)
        sent = time.monotonic()
        signal.raise_signal(signal.SIGUSR1)  # reaches this thread; the main thread runs the handler

    signal.signal(signal.SIGUSR1, alarm)
    with shmacc.attach("acc") as acc:
        threading.Thread(target=send).start()
        with pytest.raises(AlarmError):
            call(acc)
        return time.monotonic() - sent


@pytest.mark.parametrize(
    "call", [lambda acc: acc.take(2, timeout=LONG), lambda acc: acc.wait_step(0, timeout=LONG)]
)
def test_a_signal_ends_long_sleeps(acc: ConditionalAccumulator, call: Callable[[Any], Any]) -> None:
    """A take far back in the queue sleeps long, and so does a wait for the step."""
    with queued(acc, *[2] * NEAR):
        soon(lambda: float(run_apart(_interrupted, call)), AT_ONCE)
        acc.cancel()


def _top(path: str) -> int:
    with SegmentFile(path) as file:
        return int(file.record("queue").top)


def test_the_queue_holds_any_number_of_takes(acc: ConditionalAccumulator) -> None:
    path = names.segment_name("acc").path
    with ThreadPoolExecutor(70) as pool:
        takes = [pool.submit(acc.take, 2, timeout=LONG) for _ in range(70)]
        until(lambda: acc.stats().waiting == 70)
        assert run_apart(_top, path) == 70
        acc.cancel()
        for take in takes:
            with pytest.raises(errors.CancelledError):
                take.result()
    acc.apply_grad(1.0)
    # The next take that joins the queue scans all of it again.
    assert acc.take(1, timeout=0).count == 1
    assert run_apart(_top, path) == 0
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(acc.take, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        acc.apply_grad(2.0, local_step=1)
        assert one.result().value == 2.0
    assert run_apart(_top, path) <= 1


def _attach(*, pipe: Pipe) -> None:
    with shmacc.attach("acc"):
        pipe.turn("attached")


def test_a_timeout_names_some_of_many_processes(acc: ConditionalAccumulator) -> None:
    """The take does not ask the kernel about each process; its message is true all the same."""
    with ExitStack() as stack:
        others = [stack.enter_context(Apart(_attach)) for _ in range(20)]
        for other in others:
            other.hear()
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(1, timeout=0)
        named = {int(pid) for pid in re.findall(r"pid (\d+)", str(caught.value))}
        assert named <= {other.pid for other in others} | {os.getpid()}
        assert os.getpid() in named
        more = re.search(r" and up to (\d+) more$", str(caught.value))
        assert more
        assert len(named) + int(more[1]) == acc.stats().attached == 21
        for other in others[:15]:
            other.kill()
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(1, timeout=0)
        # Behind the processes that are gone, the end of the message names the attached ones.
        attached = str(caught.value).partition("because of a seal; ")[2]
        named = {int(pid) for pid in re.findall(r"pid (\d+)", attached)}
        assert named <= {other.pid for other in others[15:]} | {os.getpid()}
        assert acc.stats().attached == 6
