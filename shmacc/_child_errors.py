"""Finds the exception that ends a child of multiprocessing, or of a package derived from it.

The derived packages are multiprocess (for pathos) and billiard (for celery).

Up to Python 3.12 multiprocessing calls its finalizers while that exception is being handled. Since
3.13 it calls them as functions of ``atexit``, when Python has forgotten the exception. So since
3.13 this module wraps the child's function before it starts, and keeps the exception. For that
shmacc must be imported in time: before a fork, or while a child of the other start methods
unpickles its function. If only the child's function imports shmacc, the exception is not found.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_PACKAGES = ("multiprocessing", "multiprocess", "billiard")

_kept: BaseException | None = None
_parents: int | None = None
"""The id of the exception that the parent was handling at the fork; the child inherits it."""


def loaded(module: str) -> list[Any]:
    """Return this module of each package in `_PACKAGES`, if it is imported."""
    found = []
    for package in _PACKAGES:
        one = sys.modules.get(f"{package}.{module}")
        if one is not None:
            found.append(one)
    return found


def ending() -> BaseException | None:
    """Return the exception that ends this child; for use in multiprocessing's finalizers."""
    error = sys.exc_info()[1]
    # A forked child inherits the exception that its parent was handling: it is not the child's.
    return _kept if _kept or error is None or id(error) == _parents else error


def keep(error: BaseException) -> None:
    """Note the exception that ends this child; the first one counts."""
    global _kept  # noqa: PLW0603  one exception ends the process
    _kept = _kept or error


def kept() -> BaseException | None:
    """Return the exception that `keep` has noted; None: there is none."""
    return _kept


def _run(run: Callable[[], object]) -> None:
    try:
        run()
    except BaseException as error:
        keep(error)
        raise


def _wrap(_: object = None) -> None:
    for processes in loaded("process"):
        process = processes.current_process()
        if getattr(process.run, "func", None) is not _run:  # a grandchild calls `_wrap` twice
            process.run = partial(_run, process.run)


def _wrap_when_it_begins() -> None:
    for util in loaded("util"):
        # The registration ends when its first argument is collected. `_wrap` lives to the end.
        util.register_after_fork(_wrap, _wrap)


def is_unpickling() -> bool:
    """Return whether this child (of spawn or a forkserver) is unpickling its process object."""
    for processes in loaded("process"):
        if getattr(processes.current_process(), "_inheriting", False):
            return True
    return False


def _wrap_what_is_unpickled() -> None:
    if not is_unpickling():
        return
    _wrap_when_it_begins()  # not enough: a SpawnProcess calls only `_after_fork`
    for context in loaded("context"):
        context.SpawnProcess._after_fork = staticmethod(_wrap)  # noqa: SLF001


class _EndOfThread:
    """Calls functions when its thread ends: Python then drops `_of_thread`, which holds it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.calls: list[Callable[[], object]] = []

    # `pid` is a parameter, since a dying interpreter clears the module `os`.
    def __del__(self, pid: Callable[[], int] = os.getpid) -> None:
        if self._pid == pid():  # not when a forked child drops its copy
            for call in self.calls:
                call()


_of_thread = threading.local()
_end: "weakref.ref[_EndOfThread] | None" = None


def at_end_of_forking_thread(call: Callable[[], object]) -> None:
    """In a child that was forked by a side thread, call a function when this thread ends.

    A forked child begins with the thread that forked it. If that is not the parent's main thread,
    the child ends with it, and Python calls neither functions of ``atexit`` nor finalizers. In
    other processes this does nothing.
    """
    end = _end() if _end is not None else None
    if end is not None:
        end.calls.append(call)


def _watch_the_forking_thread() -> None:
    global _end  # noqa: PLW0603  a process is forked once
    _end, thread = None, threading.main_thread()
    # main_thread() is the thread that forked. Its class says if it was the parent's main thread.
    if type(thread).__name__ == "_MainThread":
        return
    # Only the thread's locals refer to this object, and Python drops them when the thread ends.
    _of_thread.end = _EndOfThread()
    _end = weakref.ref(_of_thread.end)
    # When the thread ends, Python has forgotten its exception. So this hook keeps it earlier.
    hook = threading.excepthook

    def keep(args: Any) -> None:
        global _kept  # noqa: PLW0603
        if args.thread is thread:
            _kept = args.exc_value
        hook(args)

    threading.excepthook = keep


def watch(note_parents_exception: Callable[[BaseException | None], object]) -> None:
    """Begin to note the exceptions that end children; called once, when shmacc is imported.

    Args:
        note_parents_exception: Called in each forked child with the exception that its parent
            handled at the fork.
    """

    def note() -> None:
        global _parents  # noqa: PLW0603  a process is forked once
        error = sys.exc_info()[1]
        _parents = id(error)
        note_parents_exception(error)

    os.register_at_fork(after_in_child=note)
    os.register_at_fork(after_in_child=_watch_the_forking_thread)
    if sys.version_info >= (3, 13):
        os.register_at_fork(after_in_child=_wrap_when_it_begins)
        _wrap_what_is_unpickled()
