"""Calls `exits.end` when an object is collected, or when the process, a child or a thread ends.

At its end, an ordinary process runs ``atexit`` functions, and so weakref's finalizers. A child of
multiprocessing ends by ``os._exit``, but first calls multiprocessing's own finalizers. If a side
thread calls ``os.fork()``, the child may end with this thread, and Python calls nothing;
_child_errors.py notices this end. A worker of billiard's Pool (in celery) runs no finalizers, but
calls the pool's ``on_process_exit``.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from shmacc import _child_errors, _core
from shmacc._segment import exits
from shmacc._segment.exits import Hook


def close_with(owner: object, handle: _core.Handle) -> "weakref.finalize[..., Any]":
    """Close the handle when its owner is collected, or the process ends in order."""
    # The hooks must not refer to the owner, which would then never be collected.
    at_exit = _leave_at_exit(handle)
    if _child_errors.is_unpickling():
        # When the child has unpickled its process object, multiprocessing drops all finalizers, and
        # then calls the functions registered here. So they register this finalizer again.
        for util in _child_errors.loaded("util"):
            util.register_after_fork(handle, _leave_at_exit)
    return weakref.finalize(owner, _close, handle, at_exit)


def cancel(finalizer: "weakref.finalize[..., Any]") -> None:
    """Cancel the functions that `close_with` has registered. The handle is closed."""
    # detach() returns (owner, function, arguments, keywords). The second argument is `at_exit`.
    known = finalizer.detach()
    if known is not None:
        _forget(known[2][1])


def used_in_child(handle: _core.Handle) -> None:
    """Register a forked child's exit hooks. The extension calls this before the first use."""
    _leave_at_exit(handle)


def _leave_at_exit(handle: _core.Handle) -> list[Any]:
    # A weak reference, so that the handle is not kept open after an interruption. No comprehension
    # or lambda here uses a local variable: if CPython 3.11 has no memory for such a variable, it
    # leaks the function's arguments, and the segment stays open.
    known = (weakref.ref(handle),)
    _child_errors.at_end_of_forking_thread(partial(_leave_with_thread, *known))
    _BilliardsExit.of_this_worker(handle)
    makers, made = [], []
    for util in _child_errors.loaded("util"):
        if util.Finalize not in makers:  # billiard uses multiprocessing's class
            makers.append(util.Finalize)
            # A process that ends calls only finalizers with a priority.
            made.append(util.Finalize(None, _leave, known, exitpriority=0))
    return made


def _forget(at_exit: list[Any]) -> None:
    for one in at_exit:
        one.cancel()


def _close(handle: _core.Handle, at_exit: list[Any]) -> None:
    exits.end(handle, Hook.OBJECT)
    _forget(at_exit)


def _leave(known: "weakref.ref[_core.Handle]") -> None:
    handle = known()
    if handle is not None:
        exits.end(handle, Hook.CHILD, _child_errors.ending())


def _leave_with_thread(known: "weakref.ref[_core.Handle]") -> None:
    handle = known()
    if handle is not None:
        exits.end(handle, Hook.THREAD, _child_errors.kept())


class _BilliardsExit:
    """The function that a worker of billiard's Pool calls before it ends by ``os._exit``."""

    _RECYCLED = 155  # a worker's exit status after ``maxtasksperchild`` tasks

    def __init__(self, before: Callable[[int, int], object] | None) -> None:
        self._before = before
        self.handles: weakref.WeakSet[_core.Handle] = weakref.WeakSet()

    @classmethod
    def of_this_worker(cls, handle: _core.Handle) -> None:
        """If this process is a worker of billiard's Pool, leave the segment at the worker's end."""
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
                exits.end(handle, Hook.POOL, error)
