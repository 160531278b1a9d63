"""Closes handles: when the user closes an object, when it is collected, or when the process ends.

An object that its user opened and never closed warns when it is collected, as files do.

If a process closes its handles or ends in order, waits with ``on_death="raise"`` do not report it.
If an exception ends the process, it has failed, and these waits report the exception. An ordinary
process runs ``atexit`` functions at its end, and so weakref's finalizers: there the exception is
the last one that Python printed, if it left the program's outermost frame. A child of
multiprocessing ends by ``os._exit``, but first calls multiprocessing's own finalizers, which get
the exception from _child_errors.py. They leave the segment, since handles of the parent may still
keep the child attached; if other threads of the child still work, only when these have ended. A
worker of billiard's Pool (celery uses these) runs no finalizers, but calls the pool's
``on_process_exit``.
A child of ``os.fork()`` in another thread than the main one may end with that thread, when Python
calls nothing; _child_errors.py notices.

One failure goes unseen: a ``SystemExit`` with a nonzero status that leaves the program, but no
``with`` block of an accumulator. Python forgets it before any function of this module runs.
"""

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from shmacc import _child_errors, _core


class Owner:
    """An object whose handle is closed when it is collected, or when the process ends in order.

    An object that a user has opened, by a constructor or ``attach``, gives a ``ResourceWarning`` if
    it is collected unclosed. Four sorts of objects do not warn, since no user could have closed
    them: an object that lives until the end of the process, where all are closed; a forked child's
    copy of its parent's object; an unpickled object, since a function to which multiprocessing
    passes an object cannot know whether that is the parent's (fork) or a new one; and an object
    whose constructor fails or is interrupted.
    """

    __slots__ = ("_opener",)

    _handle: _core.Handle
    _finalizer: "weakref.finalize[..., Any]"
    _shared_name: str
    _opener: int | None  # the pid that must close it; absent or None: nobody must

    def _opened_by_user(self) -> None:
        """Warn from now on if this is collected unclosed. Call it as the last step of opening."""
        self._opener = os.getpid()

    def __del__(  # the functions are parameters since a dying interpreter clears modules
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
                self._finalizer()  # now: a traceback or a log of the warning may keep this object

    def _close(self, error: BaseException | None = None) -> None:
        """Close; `error` is the exception that left the accumulator's ``with`` block, if any."""
        # Does not call the finalizer: it must still be alive if this is interrupted.
        self._opener = None
        _finish(self._handle, [], error)
        known = self._finalizer.detach()
        if known is not None:
            _forget(known[2][1])


def close_with(owner: Owner, handle: _core.Handle) -> "weakref.finalize[..., Any]":
    """Close the handle when its owner is collected, or the process ends in order."""
    at_exit = _leave_at_exit(handle)
    if _child_errors.is_unpickling():
        # Once the child has unpickled its process object, multiprocessing forgets its finalizers.
        # Then it calls the functions that are registered here, which register a finalizer again.
        for util in _child_errors.loaded("util"):
            util.register_after_fork(handle, _leave_at_exit)
    return weakref.finalize(owner, _finish, handle, at_exit)


def used_in_child(handle: _core.Handle) -> None:
    """Leave when this forked child ends; called by the extension before the child's first use."""
    _leave_at_exit(handle)


def _leave_at_exit(handle: _core.Handle) -> list[Any]:
    # A weak reference does not keep the handle open after an interruption. No comprehension or
    # lambda here uses a local variable: if CPython 3.11 has no memory for such a variable, it leaks
    # the function's arguments, and the segment stays open.
    known = (weakref.ref(handle),)
    _child_errors.at_end_of_forking_thread(partial(_leave_with_thread, *known))
    _BilliardsExit.of_this_worker(handle)
    makers, made = [], []
    for util in _child_errors.loaded("util"):
        if util.Finalize not in makers:  # billiard uses multiprocessing's class
            makers.append(util.Finalize)
            made.append(util.Finalize(None, _leave, known, exitpriority=0))
    return made


class _BilliardsExit:
    """The function that a worker of billiard's Pool calls before it ends by ``os._exit``."""

    _RECYCLED = 155  # its exit status after ``maxtasksperchild`` tasks

    def __init__(self, before: Callable[[int, int], object] | None) -> None:
        self._before = before
        self.handles: weakref.WeakSet[_core.Handle] = weakref.WeakSet()

    @classmethod
    def of_this_worker(cls, handle: _core.Handle) -> None:
        """Leave this handle's segment when the worker ends, if this process is such a worker."""
        pools = sys.modules.get("billiard.pool")
        if pools is None:
            return
        worker = getattr(sys.modules["billiard.process"].current_process(), "_target", None)
        if not isinstance(worker, pools.Worker):
            return
        if not isinstance(worker.on_exit, cls):
            worker.on_exit = cls(worker.on_exit)
        worker.on_exit.handles.add(handle)

    def __call__(self, pid: int, status: int) -> None:
        """Call the function that the pool was given, then leave all segments."""
        try:
            if self._before is not None:
                self._before(pid, status)
        finally:
            error = None if status in {0, self._RECYCLED} else SystemExit(status)
            for handle in list(self.handles):
                handle.leave(error)


def _forget(at_exit: list[Any]) -> None:
    for one in at_exit:
        one.cancel()


def _finish(handle: _core.Handle, at_exit: list[Any], error: BaseException | None = None) -> None:
    at_end = not threading.main_thread().is_alive()
    error = _uncaught() if error is None and at_end else error
    if at_end and _daemons_are_left():
        handle.end(error)
    else:
        handle.close(error)
    _forget(at_exit)


def _leave(known: "weakref.ref[_core.Handle]") -> None:
    handle = known()
    if handle is None:
        return
    error = _child_errors.ending()
    is_child = threading.main_thread().is_alive()
    if error is None and not is_child:
        error = _uncaught()  # a program ends, and multiprocessing's atexit function runs first
    if not (_working_threads() if is_child else _daemons_are_left()):
        handle.leave(error)
    elif is_child and error is None:
        _LeavesLast(handle).start()
    else:
        handle.end(error)


def _leave_with_thread(known: "weakref.ref[_core.Handle]") -> None:
    handle, error = known(), _child_errors.kept()
    if handle is None:
        return
    if not _working_threads():
        handle.leave(error)
    elif error is None:
        _LeavesLast(handle).start()
    else:
        handle.end(error)


class _LeavesLast(threading.Thread):
    """Leaves in order when a child's other threads have ended: until then they apply and take."""

    def __init__(self, handle: _core.Handle) -> None:
        super().__init__(name="shmacc leaves last", daemon=False)
        self._handle = handle

    def run(self) -> None:
        """Wait for all threads that Python waits for, then leave."""
        while working := _working_threads():
            for thread in working:
                thread.join()
        self._handle.leave(None)


def _daemons_are_left() -> bool:
    # If daemon threads still run at exit, closing would wake them with an error, and CPython may
    # crash while it makes the traceback. The kernel is about to release everything anyway.
    main = threading.main_thread()
    return any(thread is not main for thread in threading.enumerate())


def _working_threads() -> list[threading.Thread]:
    # A child of multiprocessing waits for threads that are no daemons only after its finalizers.
    main = threading.main_thread()
    return [
        thread
        for thread in threading.enumerate()
        if not (thread is main or thread.daemon or isinstance(thread, _LeavesLast))
    ]


def _uncaught() -> BaseException | None:
    """Return the exception that ended the main thread, after its end; None: it returned."""
    ended_child = _child_errors.kept()
    if ended_child is not None:
        return ended_child
    error: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if error is None or error.__traceback__ is None or hasattr(sys, "ps1"):
        return None  # an interactive prompt prints each exception and goes on
    # A framework that goes on, or a callback, may also have printed an exception.
    return error if error.__traceback__.tb_frame.f_back is None else None
