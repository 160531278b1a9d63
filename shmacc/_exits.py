"""Closing at the end of a process.

Whoever closes its handles or exits in order is not dead to a take that asks who died. Python runs
``atexit`` functions, and so finalizers, at the end of an ordinary process. A child of
multiprocessing ends by ``os._exit``, which runs none: but it calls multiprocessing's own
finalizers first.
"""

import sys
import threading
import weakref
from typing import Any

from shmacc import _core


class Owner:
    """Has a handle that is closed with it, or when the process ends in order."""

    __slots__ = ()

    _handle: _core.Handle

    def close_at_exit(self) -> None:
        """Close the handle when this child of multiprocessing ends."""
        _close_with(self, self._handle)


def close_with(owner: Owner, handle: _core.Handle) -> "weakref.finalize[[_core.Handle], Any]":
    """Close the handle when its owner is collected, or the process ends in order."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        _close_with(owner, handle)
        process = sys.modules["multiprocessing.process"].current_process()
        if getattr(process, "_inheriting", False):
            # A child of spawn or of a forkserver forgets all finalizers once it has unpickled what
            # it was sent, this object for instance, and then does what is registered so.
            util.register_after_fork(owner, Owner.close_at_exit)
    return weakref.finalize(owner, finish, handle)


def _close_with(owner: Owner | None, handle: _core.Handle) -> None:
    sys.modules["multiprocessing.util"].Finalize(owner, finish, args=(handle,), exitpriority=0)


def attached_in_child(handle: _core.Handle) -> None:
    """Close the handle when this forked child ends; called by the extension at its first use."""
    if "multiprocessing.util" in sys.modules:
        _close_with(None, handle)


def finish(handle: _core.Handle) -> None:
    """Close the handle, as far as that is possible at this time."""
    if _daemons_outlive_the_interpreter():
        handle.unlink_own_names()
    else:
        handle.close()


def _daemons_outlive_the_interpreter() -> bool:
    # At exit, with daemon threads still at work: closing would wake them with an error, and CPython
    # may crash on its traceback by then. The kernel is about to release everything anyway.
    main = threading.main_thread()
    return not main.is_alive() and any(thread is not main for thread in threading.enumerate())
