"""Runs an action at the n-th point of a call, for every n.

Points are the lines, or the instructions, of shmacc's Python code that the call runs: every place
where a signal handler can run, and more. Within the extension, other code can run only if a new
Python object starts a garbage collection. So collections are points, too.

Python checks for signals where a function begins, after a call, and where a loop jumps back; and a
called function may raise because of a signal. So only the instructions before and after these
places are points. With SHMACC_EVERY_INSTANT=1, all instructions are.
"""

import dis
import enum
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from helpers.support import EVERY_INSTANT

import shmacc

FOLDER: Final = str(Path(shmacc.__file__).parent) + os.sep
# weakref's code is included because its finalizers close accumulators.
_OWN_FILES: Final = (FOLDER, weakref.__file__)


_CALLING: Final = ("RESUME", "PRECALL", "CALL", "BEFORE_WITH", "WITH_EXCEPT", "JUMP_BACK", "SEND")


class Points(enum.Enum):
    """The kinds of points at which the action may run."""

    LINES = "line"
    INSTRUCTIONS = "opcode"
    COLLECTIONS = "collection"


class Between:
    """Runs an action once, at the n-th point."""

    def __init__(self, act: Callable[[], object], number: int) -> None:
        """Call ``act`` at the point with this number, counted from 1."""
        self._act = act
        self._left = number

    @property
    def came(self) -> bool:
        return self._left <= 0

    def point(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


@contextmanager
def coming_between(
    act: Callable[[], object], points: Points, number: int, within: tuple[str, ...] = _OWN_FILES
) -> Iterator[Between]:
    """Call ``act`` at point ``number`` of the `with` block; ``act``'s exception is raised there.

    Only lines and instructions of files whose names begin with one of ``within`` are points.
    """
    between = Between(act, number)
    if points is Points.COLLECTIONS:
        with _at_collections(between):
            yield between
        return

    def tracing(frame: FrameType) -> Callable[..., Any]:
        frame.f_trace_opcodes = points is Points.INSTRUCTIONS
        code, calls = frame.f_code.co_code, True

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal calls
            called, calls = calls, event != "opcode" or _calls(code[frame.f_lasti])
            if event == points.value and (called or calls):
                between.point()
            return trace

        # Without this, Python 3.14 ignores f_trace_opcodes until the same code is called again.
        frame.f_trace = trace
        return trace

    def enter(frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        return tracing(frame) if frame.f_code.co_filename.startswith(within) else None

    # Set this first: Python 3.12 checks only in sys.settrace whether any frame has it set.
    sys._getframe().f_trace_opcodes = points is Points.INSTRUCTIONS
    sys.settrace(enter)
    try:
        yield between
    finally:
        sys.settrace(None)


def _calls(instruction: int) -> bool:
    return EVERY_INSTANT or dis.opname[instruction].startswith(_CALLING)


@contextmanager
def _at_collections(between: Between) -> Iterator[None]:
    def collects(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            between.point()

    gc.collect()
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.callbacks.append(collects)
    gc.set_threshold(1)
    gc.enable()
    try:
        yield
    finally:
        if not enabled:
            gc.disable()
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collects)
