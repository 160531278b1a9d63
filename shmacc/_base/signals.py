"""Lets exceptions of signal handlers pass through a call unchanged.

Python runs a handler in whatever function is running, ours or a function that a conversion calls.
So the handler's exception looks like that function's, and would be reported as a bad argument. The
same is true of the error for a write to a read-only array (native/python/write_guard.hpp); it is
recognised by its attribute ``_interrupts``.
"""

from collections.abc import Iterator
from types import FrameType


def pass_on(error: BaseException) -> None:
    """Re-raise an exception of a signal handler; call this in an ``except`` clause.

    Python passes to a handler the frame that was interrupted. So an exception comes from a handler
    if it left a function that has its caller's frame as an argument.
    """
    if getattr(error, "_interrupts", False):
        raise error
    traceback, interrupted = error.__traceback__, None
    while traceback is not None:
        frame = traceback.tb_frame
        if interrupted is not None and any(each is interrupted for each in _arguments(frame)):
            raise error
        traceback, interrupted = traceback.tb_next, frame


def _arguments(frame: FrameType) -> Iterator[object]:
    for value in frame.f_locals.values():
        # A handler may have its arguments as `*args`.
        if isinstance(value, tuple):
            yield from value
        else:
            yield value
