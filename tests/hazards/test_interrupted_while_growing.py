"""A segment grows while signals arrive, or after another process has grown it.

After growth by another process, a process maps only what is new. Signals neither stop growth nor
change its errors. Kernels before 6.11 let any signal end fallocate and undo it all: if a timer
fires at least once in each call, no call succeeds. The test simulates this.
"""

import errno
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Pipe
from helpers.watched_reserving import Reservation, let_it, needs_listener, watched

import shmacc
from shmacc import SparseConditionalAccumulator, errors

pytestmark = [needs_listener, pytest.mark.threads]

MIB: Final = 1 << 20
ROWS: Final = 40_000
WIDTH: Final = 64  # 10 MB of rows
PATIENCE: Final = 100  # this many interrupts in a row would never end
TIMER: Final = signal.SIGALRM


class OldKernel:
    """Interrupts each reservation that does not block the timer's signal, and some that do.

    A call that blocks it passes after more than `stubborn` interrupts in a row, as in a debugger.
    """

    def __init__(self, stubborn: int = 0) -> None:
        self.stubborn = stubborn
        self.interrupted = self.in_a_row = self.largest = 0

    def __call__(self, call: Reservation) -> int:
        self.largest = max(self.largest, call.size)
        patient = self.in_a_row < PATIENCE
        if patient and (not call.blocks(TIMER) or self.in_a_row <= self.stubborn):
            self.interrupted += 1
            self.in_a_row += 1
            return errno.EINTR
        if patient:
            self.in_a_row = 0
        return 0


@pytest.fixture
def acc() -> Iterator[SparseConditionalAccumulator]:
    """A named accumulator that other processes grow."""
    with SparseConditionalAccumulator("f4", (None, WIDTH), "growing", reduction_type="SUM") as made:
        yield made
        made.unlink()


def _grow(*, pipe: Pipe) -> Any:
    kept_off = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    acc: Any = shmacc.attach("growing")
    with acc:
        try:
            assert acc.apply_grad(range(ROWS), np.ones((ROWS, WIDTH), np.float32))
        finally:
            # The signal mask is as before, however the apply ended.
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == kept_off
    pipe.say()


@pytest.mark.parametrize("stubborn", [0, 3])
def test_growth_ends_under_many_signals(acc: SparseConditionalAccumulator, stubborn: int) -> None:
    """Each interrupt undoes only one piece, which is then tried again."""
    kernel = OldKernel(stubborn)
    with watched(_grow, decide=kernel) as process:
        process.hear()
        process.result()
    assert kernel.in_a_row < PATIENCE, "interrupted for ever"
    assert kernel.interrupted > stubborn
    # Signals are blocked while one piece is reserved, not for all 10 MB.
    assert kernel.largest <= 2 * MIB
    taken = acc.take(1, timeout=0)
    assert taken.indices.size == ROWS
    assert (taken.values == 1).all()


class FullAfter:
    """Interrupts each call once, has room for `size` bytes, and refuses the first call beyond."""

    def __init__(self, size: int) -> None:
        self.room, self.kernel, self.refused = size, OldKernel(), 0

    def __call__(self, call: Reservation) -> int:
        if self.kernel(call):
            return errno.EINTR
        if call.size > self.room and not self.refused:
            self.refused += 1
            return errno.ENOSPC
        self.room -= call.size
        return 0


def _grow_in_vain_and_again(*, pipe: Pipe) -> None:
    acc: Any = shmacc.attach("growing")
    values = np.ones((ROWS, WIDTH), np.float32)
    with acc:
        assert acc.apply_grad([1], values[:1])
        pipe.turn()
        with pytest.raises(errors.ResourceExhaustedError, match="more bytes were needed"):
            acc.apply_grad(range(ROWS), values)
        pipe.turn()
        assert acc.apply_grad(range(ROWS), values)


@pytest.mark.parametrize("room", [MIB, 9 * MIB])
def test_a_growth_that_runs_out_of_memory_halfway_frees_its_first_pieces(
    acc: SparseConditionalAccumulator, room: int
) -> None:
    """Nothing is recorded, and the first pieces' memory is freed."""
    decide = FullAfter(room)
    with watched(_grow_in_vain_and_again, decide=decide) as process:
        process.hear()
        before = shmacc.inspection.describe("growing").summary.bytes_reserved
        process.turn()
        assert decide.refused == 1
        assert shmacc.inspection.describe("growing").summary.bytes_reserved == before
        assert (acc.num_accumulated(), acc.stats().rows) == (1, 1)
        process.finish()
    taken = acc.take(2, timeout=0)
    assert taken.indices.size == ROWS
    assert taken.values.sum() == (ROWS + 1) * WIDTH


# --- grown by others ------------------------------------------------------------------------------


FEW: Final = 500  # rows
PROCESSES: Final = 3
TURNS: Final = 60
LAST: Final = 15


def _add_in_turn(number: int, *, pipe: Pipe) -> None:
    acc: Any = shmacc.attach("growing")
    with acc:
        values = np.ones((FEW, WIDTH), np.float32)
        pipe.say()
        for turn in range(TURNS):
            pipe.hear()
            first = (turn * PROCESSES + number) * FEW
            assert acc.apply_grad(range(first, first + FEW), values)
            pipe.say()


def test_each_byte_is_reserved_once_by_each_process() -> None:
    """Later applies of the process do not reserve the byte again."""
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
                adder.turn()
        for adder in adders:
            adder.result()
        held = PROCESSES * TURNS * FEW * (4 * WIDTH + 16)
        assert acc.stats().rows == PROCESSES * TURNS * FEW
        assert max(reserved) < 2 * held
        # A larger table grows in larger and rarer steps.
        assert max(calls) < LAST
        acc.unlink()
