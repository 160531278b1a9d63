"""Signals that arrive while a segment grows do not keep it from growing, or from failing in order.

Kernels before 6.11 end fallocate at any signal and undo all of it: a timer that fires more often
than the call takes would keep it from ever ending. The test plays such a kernel.
"""

from __future__ import annotations

import errno
import signal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.watched_reserving import Reservation, needs_listener, watched

import shmacc
from shmacc import SparseConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

pytestmark = [needs_listener, pytest.mark.threads]

MIB: Final = 1 << 20
ROWS: Final = 40_000
WIDTH: Final = 64  # 10 MB of rows
PATIENCE: Final = 100  # a call that was interrupted so often in a row will be for ever
TIMER: Final = signal.SIGALRM


class OldKernel:
    """Interrupts whatever lets the timer's signal through, and the first tries that do not."""

    def __init__(self, stubborn: int = 0) -> None:
        """Begin.

        Args:
            stubborn: How often a call is interrupted with signals off (a debugger can).
        """
        self.stubborn = stubborn
        self.interrupted = 0
        self.in_a_row = 0
        self.largest = 0

    def __call__(self, call: Reservation) -> int:
        """Decide on a call."""
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
    """A named accumulator, which this process does not grow."""
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
            # Signals are as they were, however it ended.
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == kept_off
    pipe.say()


@pytest.mark.parametrize("stubborn", [0, 3])
def test_every_signal_interrupts(acc: SparseConditionalAccumulator, stubborn: int) -> None:
    """Whatever is interrupted is a piece, and its next try gets through."""
    kernel = OldKernel(stubborn)
    with watched(_grow, decide=kernel) as process:
        process.hear()
        process.result()
    assert kernel.in_a_row < PATIENCE, "interrupted for ever"
    assert kernel.interrupted > stubborn
    # Signals are off for the time that a piece takes, not for that of 10 MB.
    assert kernel.largest <= 2 * MIB
    taken = acc.take(1, timeout=0)
    assert taken.indices.size == ROWS
    assert (taken.values == 1).all()


class FullAfter:
    """Interrupts each call once; then has room for so many bytes, and refuses one call too many."""

    def __init__(self, size: int) -> None:
        """Begin with that room."""
        self.room = size
        self.kernel = OldKernel()
        self.refused = 0

    def __call__(self, call: Reservation) -> int:
        """Decide on a call."""
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
        pipe.say()
        pipe.hear()
        with pytest.raises(errors.ResourceExhaustedError, match="more bytes were needed"):
            acc.apply_grad(range(ROWS), values)
        pipe.say()
        pipe.hear()
        assert acc.apply_grad(range(ROWS), values)


@pytest.mark.parametrize("room", [MIB, 5 * MIB, 9 * MIB])
def test_full_between_the_pieces(acc: SparseConditionalAccumulator, room: int) -> None:
    """Nothing is recorded, and what the first pieces got is given back."""
    decide = FullAfter(room)
    with watched(_grow_in_vain_and_again, decide=decide) as process:
        process.hear()
        before = shmacc.inspection.describe("growing").summary.bytes_reserved
        process.say()
        process.hear()
        assert decide.refused == 1
        assert shmacc.inspection.describe("growing").summary.bytes_reserved == before
        assert (acc.num_accumulated(), acc.stats().rows) == (1, 1)
        process.say()
        process.result()
    taken = acc.take(2, timeout=0)
    assert taken.indices.size == ROWS
    assert taken.values.sum() == (ROWS + 1) * WIDTH
