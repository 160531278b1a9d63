"""A busy process pauses between two operations, so that a waiting process gets the lock.

Without the pause, a process that applies in a loop would get the lock again and again: it spins,
while others must first wake up (lock.hpp). Who is faster depends on the machine, so the tests look
at the two words in shared memory by which the processes agree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart, run_apart
from helpers.lock_holder import held
from helpers.segment_file import SegmentFile
from helpers.support import until

from shmacc import ConditionalAccumulator, inspection
from shmacc._base import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

NAME: Final = "busy"
KEPT_OFF: Final = 100_000  # nanoseconds: kComing in lock.hpp


@pytest.fixture
def file() -> Iterator[SegmentFile]:
    """Yield a segment's file, to which the test's own process is not attached."""
    run_apart(lambda: ConditionalAccumulator("f4", [2], NAME).close())
    with SegmentFile(names.segment_name(NAME).path) as file:
        yield file
    inspection.remove(NAME)


def _apply(*, pipe: Pipe) -> None:
    with ConditionalAccumulator.attach(NAME) as acc:
        pipe.turn("attached")
        acc.apply_grad([1, 1])


def test_a_process_that_waits_asks_for_the_lock_and_is_answered(file: SegmentFile) -> None:
    with Apart(_apply).ready() as waiting:
        with held(NAME):
            waiting.say()
            until(lambda: file.record("fairness").asked == 1)
        waiting.result()
    answered = file.record("fairness")
    assert answered.asked == 0
    assert 0 < answered.keep_off_ns <= time.monotonic_ns() + KEPT_OFF


def _apply_twice_when_told(times: int, *, pipe: Pipe) -> list[int]:
    """Return how long two applies took each time, in nanoseconds."""
    took = []
    with ConditionalAccumulator.attach(NAME) as acc:
        for _ in range(times):
            pipe.turn("ready")
            begun = time.monotonic_ns()
            acc.apply_grad([1, 1])
            acc.apply_grad([1, 1])
            took.append(time.monotonic_ns() - begun)
    return took


def test_a_busy_process_pauses_for_a_process_that_asked(file: SegmentFile) -> None:
    with Apart(_apply_twice_when_told, 20) as busy:
        for _ in range(20):
            busy.hear()
            fairness: Any = file.record("fairness")
            fairness.asked = 1
            file.put("fairness", fairness)
            busy.say()
        assert min(busy.result()) >= KEPT_OFF
