"""The steps of a run, as a worker follows them."""

from shmacc import _core


class Steps(_core.FollowedSteps):
    """The steps of a run, for a worker's ``for`` loop; made by ``steps()``.

    Yields the current step at once, then the newest whenever it has changed, until the accumulator
    is finished. A slow worker skips steps. A step that is set back is yielded, and so is the step
    after every restore. After an error in a wait (a timeout, a signal handler's exception) the same
    object can go on waiting.
    """

    __slots__ = ()

    # `__next__` must not be written in Python: see shmacc/native/python/statements.hpp.
