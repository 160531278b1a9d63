"""Handles Ctrl-C and SIGTERM where something must be cleaned up."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within a block, so that the block can clean up.

    Outside such blocks, Ctrl-C ends the process at once (`start`), since imports and parsers may
    turn KeyboardInterrupt into another exception. If Ctrl-C is ignored, it stays ignored here.
    """
    before = signal.getsignal(signal.SIGINT)
    if before in {signal.SIG_IGN, None}:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal: end the command by SystemExit."""
    raise SystemExit(128 + number)
