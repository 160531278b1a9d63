"""Takes and rounds: the request is checked, the extension waits, and results are made.

A take consumes its gradients at once. A round hands them out for the length of a block, and
consumes them at its end: gradients of the next step are accepted when what was computed from this
one's is in place.
"""

from collections.abc import Callable
from typing import TypeVar

from shmacc import _core
from shmacc._core import TakenRound
from shmacc._gradients import arguments

_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


def take(
    handle: _core.Handle,
    finish: Callable[[TakenRound], _Result],
    num_required: object,
    timeout: object,
    at_least: object = None,
    on_death: object = "wait",
    *,
    partial: bool = False,
    seal: bool = False,
) -> _Result:
    """Take, and make the result of what was taken.

    The gradients taken are not lost if an exception (a signal handler's, or a MemoryError of a
    conversion) keeps the result from the caller. The handle keeps them for its next take of the
    same sort. The interpreter runs signal handlers at the end of a call, at the start of a
    function and at a backward jump, and nowhere else. So a handler runs within this ``try``, or
    when the caller has the result; and once caught here, the round reaches `keep` whatever
    comes next.
    """
    required, least = arguments.required(num_required, at_least, 0 if partial else 1)
    seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
    taken = TakenRound(not partial, seal)
    try:
        # No call with a star: CPython 3.11 crashes if memory runs out while it makes one.
        handle.take(taken, required, least, seconds, raises)
        return finish(taken)
    except BaseException:
        handle.keep(taken)
        raise


def look(
    handle: _core.Handle,
    finish: Callable[[TakenRound], _Result],
    timeout: object = None,
    *,
    partial: bool,
) -> _Result:
    """Return what a take of all that is there would give; consumes nothing."""
    taken = TakenRound(not partial, seal=False)
    handle.look(taken, arguments.timeout(timeout))
    return finish(taken)


class Round(_core.Round[_Result_co]):
    """A round of gradients that is consumed when a ``with`` block ends; made by ``round()``.

    Entering waits for the gradients as a take does, seals the step and returns the reduction.
    Leaving consumes the gradients and moves the step on, in one commit. An exception in the block,
    ``close()`` of the accumulator and the death of the process consume nothing: the step is open
    again as it was. So a gradient that counts was computed from parameters that were read before
    the block changed them, and parameters may be updated in place without a lock.

    In the block, an apply of this thread that would wait for the block's end is a
    FailedPreconditionError.
    """

    __slots__ = ()

    # Neither end may be a function of Python's: see shmacc/native/python/round_block.hpp.
