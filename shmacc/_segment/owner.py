"""The base of objects that own a handle. Like files, they warn if they are collected unclosed."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmacc import _core
from shmacc._segment import exit_hooks, exits

if TYPE_CHECKING:
    import weakref


class Owner:
    """An object whose handle is closed when it is collected, or when the process ends in order.

    An object that a user has opened, by a constructor or ``attach``, gives a ``ResourceWarning`` if
    it is collected unclosed. Four sorts of objects do not warn, since no user could have closed
    them: objects that live until the end of the process, which closes them; a forked child's copies
    of its parent's objects; unpickled objects, since a function that multiprocessing calls cannot
    know whether an object is the parent's (fork) or a new one; and objects whose constructor fails
    or is interrupted.
    """

    __slots__ = ("_opener",)

    _handle: _core.Handle
    _finalizer: "weakref.finalize[..., Any]"
    _shared_name: str
    _opener: int | None  # the process that must close it; absent or None: no process must

    def _opened_by_user(self) -> None:
        """From now on, warn if this object is collected unclosed. The last step of opening."""
        self._opener = os.getpid()

    def __del__(  # functions are parameters, since a dying interpreter clears modules
        self,
        pid: Callable[[], int] = os.getpid,
        finalizing: Callable[[], bool] = sys.is_finalizing,
        warn: Callable[..., None] = warnings.warn,
    ) -> None:
        if getattr(self, "_opener", None) == pid() and not finalizing():
            what = f"unclosed {type(self).__name__} {self._shared_name!r}"
            try:
                warn(what, ResourceWarning, stacklevel=2, source=self)
            finally:
                self._finalizer()  # now, since a traceback or log may keep this object alive

    def _close(self, error: BaseException | None = None) -> None:
        """Close. `error` is the exception that left the accumulator's ``with`` block, if any."""
        # Do not call the finalizer: if `end` is interrupted, the finalizer must still run later.
        self._opener = None
        exits.end(self._handle, exits.Hook.OBJECT, error)
        exit_hooks.cancel(self._finalizer)
