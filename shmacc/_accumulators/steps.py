"""The steps of a run, as a worker follows them."""

from typing import TYPE_CHECKING, Self

from shmacc._gradients import arguments

if TYPE_CHECKING:
    from shmacc import _core


class Steps:
    """The steps of a run, for a worker's ``for`` loop; made by ``steps()``.

    Yields the current step at once, then the newest whenever it has changed, until the accumulator
    is finished. A slow worker skips steps. A step that is set back is yielded, and so is the step
    after every restore. After an error in a wait (a timeout, a signal handler's exception) the same
    object can go on waiting.
    """

    __slots__ = ("_ended", "_handle", "_last", "_raises", "_timeout")

    def __init__(self, handle: "_core.Handle", timeout: object, on_death: object) -> None:
        self._handle = handle
        self._timeout = arguments.timeout(timeout)
        self._raises = arguments.on_death(on_death)
        self._ended = False
        self._last: tuple[int, int] | None = None  # the last step, and the number of restores

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        """Wait until the step has changed, and return it.

        Raises:
            StopIteration: The accumulator is finished.
            DeadlineExceededError: The timeout passed in this wait.
            ChiefDiedError: As for ``wait_step``.
            CancelledError: The handle was closed.
        """
        if self._ended:
            raise StopIteration
        # A signal handler may raise before the call, in it, or after `_last` was set. In the last
        # case the step counts as returned.
        self._last = new = self._handle.next_step(self._last, self._timeout, self._raises, None)
        if new is None:
            self._ended = True
            raise StopIteration
        return new[0]
