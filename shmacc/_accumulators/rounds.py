"""Takes and rounds: check the request, let the extension wait, and make the result.

A take consumes its gradients at once. A round hands them out for the length of a block, and
consumes them at its end. So gradients of the next step are accepted only after the results computed
from this step's gradients are in place.
"""

from collections.abc import Callable
from typing import TypeVar

from shmacc import _core
from shmacc._core import RoundResult
from shmacc._values import arguments

_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


def take(
    handle: _core.Handle,
    finish: Callable[[RoundResult], _Result],
    num_required: object,
    timeout: object,
    at_least: object = None,
    on_death: object = "wait",
    *,
    partial: bool = False,
    seal: bool = False,
) -> _Result:
    """Take gradients, and return the result that `finish` makes of them.

    An exception (a signal handler's, or a MemoryError of a conversion) may keep the result from the
    caller. The gradients are not lost: the handle keeps them for its next take of the same sort.
    The interpreter runs signal handlers only at the end of a call, at the start of a function and
    at a backward jump. So a handler runs either within this ``try``, or when the caller has the
    result. Once an exception is caught here, the round always reaches `keep`.
    """
    required, least = arguments.required(num_required, at_least, 0 if partial else 1)
    seconds, raises = arguments.timeout(timeout), arguments.on_death(on_death)
    taken = RoundResult(not partial, seal)
    try:
        # No call with a star: CPython 3.11 crashes if memory runs out during such a call.
        handle.take(taken, required, least, seconds, raises)
        return finish(taken)
    except BaseException:
        handle.keep(taken)
        raise


def look(
    handle: _core.Handle,
    finish: Callable[[RoundResult], _Result],
    timeout: object = None,
    *,
    partial: bool,
) -> _Result:
    """Return what a take of all pending gradients would return; consume nothing."""
    taken = RoundResult(not partial, seal=False)
    handle.look(taken, arguments.timeout(timeout))
    return finish(taken)


class Round(_core.Round[_Result_co]):
    """A round of gradients that is consumed when a ``with`` block ends; made by ``round()``.

    Entering waits for the gradients as a take does, seals the step and returns the reduction.
    Leaving consumes the gradients and moves the step on, in one commit. An exception in the block,
    ``close()`` of the accumulator and the death of the process consume nothing: the step is open
    again as it was. So every gradient that counts was computed from parameters that were read
    before the block changed them, and the block may update parameters in place without a lock.

    In the block, an apply of this thread that would wait for the block's end raises
    FailedPreconditionError.
    """

    __slots__ = ()

    # `__enter__` and `__exit__` must not be written in Python: see round_block.hpp.
