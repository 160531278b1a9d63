"""Warns of mistakes in a program because of which all its gradients are dropped."""

import contextlib
import logging
import threading

from shmacc import _core
from shmacc._values import arguments
from shmacc.errors import ShmaccError

_logger = logging.getLogger("shmacc")
_IS_STALE = (
    "A gradient was dropped as stale: it came without a local_step, so it counts as one of step 0, "
    "but %r is at step %d. Give each gradient the step that it was computed at, as "
    "`for step in acc.steps()` yields it; or local_step=shmacc.NEVER_STALE, if it counts at any "
    "step, as in counting and summing"
)
_IS_BEHIND = (
    "Gradients for %r are dropped: it was restored after this thread (or task) last read its step, "
    "so they may be computed from what was given up. Read the step again before each gradient is "
    "computed: by global_step, or `for step in acc.steps()`"
)
_IS_REPEATED = (
    "A gradient for %r was not added: it came with NEVER_STALE from contributor %d, who is in the "
    "round already, and counts once in it. If it is another gradient, leave contributor= out; or, "
    "so that each counts exactly once, give each gradient an id of its own, such as "
    "rank + workers * number. stats().repeated counts such gradients"
)


def warn_of_repeated(shared_name: str, contributor: int) -> None:
    """Warn that a gradient with NEVER_STALE was not added, as the round has its contributor."""
    _logger.warning(_IS_REPEATED, shared_name, contributor)


class Drops:
    """Notes the dropped gradients of one accumulator object, and warns of mistakes."""

    def __init__(self, handle: _core.Handle, shared_name: str) -> None:
        self._handle, self._shared_name = handle, shared_name
        self._told: set[str] = set()
        self._behind: object = None

    def note(self, local_step: int) -> None:
        """Note that a gradient was dropped. If a mistake is the cause, warn of it once."""
        with contextlib.suppress(ShmaccError):  # another thread may close the handle
            if local_step is arguments.NO_STEP and self._handle.step > 0:
                self._tell(_IS_STALE, self._shared_name, self._handle.step)
            elif self._handle.behind(arguments.int64(local_step, "local_step")):
                # One gradient from before a restore is normal. If a second one follows the same
                # read of the step, the worker does not read the step again after the restore.
                now = threading.get_ident(), self._handle.last_read()
                if now == self._behind:
                    self._tell(_IS_BEHIND, self._shared_name)
                self._behind = now

    def _tell(self, warning: str, *values: object) -> None:
        if warning not in self._told:
            self._told.add(warning)
            _logger.warning(warning, *values)
