"""Growth that another process did costs a process what is new, not what is there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from helpers.apart import Apart
from helpers.watched_reserving import Reservation, let_it, needs_listener, watched

import shmacc
from shmacc import SparseConditionalAccumulator

if TYPE_CHECKING:
    from helpers.apart import Pipe

pytestmark = needs_listener

ROWS: Final = 500
WIDTH: Final = 64
PROCESSES: Final = 3
TURNS: Final = 60
LAST: Final = 15


def _add_in_turn(number: int, *, pipe: Pipe) -> None:
    acc: Any = shmacc.attach("growing")
    with acc:
        values = np.ones((ROWS, WIDTH), np.float32)
        pipe.say()
        for turn in range(TURNS):
            pipe.hear()
            first = (turn * PROCESSES + number) * ROWS
            assert acc.apply_grad(range(first, first + ROWS), values)
            pipe.say()


def test_each_byte_is_reserved_once_by_each_process() -> None:
    """In all applies together, and not in every one again; and not a little in every one."""
    reserved = [0] * PROCESSES
    calls = [0] * PROCESSES

    def counting(number: int) -> Any:
        def count(call: Reservation) -> int:
            reserved[number] += call.size
            calls[number] += 1
            return let_it(call)

        return count

    with SparseConditionalAccumulator("f4", (None, WIDTH), "growing") as acc, ExitStack() as stack:
        adders = [
            stack.enter_context(watched(_add_in_turn, number, decide=counting(number)))
            for number in range(PROCESSES)
        ]
        for adder in adders:
            adder.hear()
        for turn in range(TURNS):
            if turn == TURNS - LAST:
                calls[:] = [0] * PROCESSES
            for adder in adders:  # one after the other: each finds what the others have grown
                adder.say()
                adder.hear()
        for adder in adders:
            adder.result()
        held = PROCESSES * TURNS * ROWS * (4 * WIDTH + 16)
        assert acc.stats().rows == PROCESSES * TURNS * ROWS
        assert max(reserved) < 2 * held
        # The larger the table, the larger the steps it grows in, and the rarer.
        assert max(calls) < LAST
        acc.unlink()


def _add_known(*, pipe: Pipe) -> None:
    acc: Any = shmacc.attach("growing")
    with acc:
        for _ in range(2):
            assert acc.apply_grad(range(ROWS), np.ones((ROWS, WIDTH), np.float32))
        pipe.say()
        pipe.hear()
        for _ in range(5):
            assert acc.apply_grad(range(ROWS), np.ones((ROWS, WIDTH), np.float32))


def test_what_a_process_knows_is_not_reserved_again() -> None:
    """The first apply proves what others have recorded; those after it need the kernel no more."""
    calls: list[Reservation] = []

    def note(call: Reservation) -> int:
        calls.append(call)
        return let_it(call)

    with SparseConditionalAccumulator("f4", (None, WIDTH), "growing") as acc:
        with Apart(_add_known) as first:
            first.hear()
            first.say()
            first.result()
        with watched(_add_known, decide=note) as second:
            second.hear()
            before = len(calls)
            second.say()
            second.result()
        assert before > 0
        assert len(calls) == before
        acc.unlink()
