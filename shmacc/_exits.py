"""Closing at the end of a process.

A process that closes its handles or exits in order is not dead to a take that asks who died. Python
runs ``atexit`` functions, and so finalizers, at the end of an ordinary process. A child of
multiprocessing ends by ``os._exit``, which runs none: but it calls multiprocessing's own finalizers
first. There it leaves the segment at once, since it may have its parent's handles as well.
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

    def leave_at_exit(self) -> None:
        """Leave the segment when this child of multiprocessing ends."""
        _leave_at_exit(self._handle)


def close_with(owner: Owner, handle: _core.Handle) -> "weakref.finalize[..., Any]":
    """Close the handle when its owner is collected, or the process ends in order."""
    at_exit = None
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        at_exit = _leave_at_exit(handle)
        process = sys.modules["multiprocessing.process"].current_process()
        if getattr(process, "_inheriting", False):
            # A child of spawn or of a forkserver forgets all finalizers once it has unpickled what
            # it was sent, this object for instance, and then does what is registered so.
            util.register_after_fork(owner, Owner.leave_at_exit)
    return weakref.finalize(owner, _finish, handle, at_exit)


def close(handle: _core.Handle, finalizer: "weakref.finalize[..., Any]") -> None:
    """Close the handle now. Not by the finalizer: after an interruption it is still alive."""
    _finish(handle, None)
    known = finalizer.detach()
    if known is not None:
        _forget(known[2][1])


def attached_in_child(handle: _core.Handle) -> None:
    """Leave when this forked child ends; called by the extension at the child's first use."""
    if "multiprocessing.util" in sys.modules:
        _leave_at_exit(handle)


def _leave_at_exit(handle: _core.Handle) -> Any:
    # It does not keep the handle: an interruption after this may leave nothing else that knows it.
    known = (weakref.ref(handle),)
    return sys.modules["multiprocessing.util"].Finalize(None, _leave, known, exitpriority=0)


def _forget(at_exit: Any) -> None:
    if at_exit is not None:
        at_exit.cancel()


def _finish(handle: _core.Handle, at_exit: Any) -> None:
    if _daemons_outlive_the_interpreter():
        handle.unlink_own_names()
    else:
        handle.close()
    _forget(at_exit)


def _leave(known: "weakref.ref[_core.Handle]") -> None:
    handle = known()
    if handle is None:
        return
    if _daemons_outlive_the_interpreter():
        handle.unlink_own_names()
    else:
        handle.leave()


def _daemons_outlive_the_interpreter() -> bool:
    # At exit, with daemon threads still at work: closing would wake them with an error, and CPython
    # may crash on its traceback by then. The kernel is about to release everything anyway.
    main = threading.main_thread()
    return not main.is_alive() and any(thread is not main for thread in threading.enumerate())
