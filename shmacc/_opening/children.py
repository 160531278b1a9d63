"""By which exception a child of multiprocessing ends.

Up to Python 3.12 multiprocessing calls its finalizers while that exception is being handled. Since
3.13 it calls them as functions of ``atexit``, when the exception is forgotten: so what the child
runs is wrapped there before it begins, to keep the exception. For that shmacc must have been
imported by then, before a fork or by what a child of the other start methods unpickles; a child
whose own function imports it ends without a reason.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

_kept: BaseException | None = None


def ending() -> BaseException | None:
    """Return the exception that ends this child, if multiprocessing's finalizers ask."""
    return sys.exc_info()[1] or _kept


def kept() -> BaseException | None:
    """Return the exception that has ended what this child ran, if it was wrapped."""
    return _kept


def _run(run: Callable[[], object]) -> None:
    global _kept  # noqa: PLW0603  it is the process's, which ends by one
    try:
        run()
    except BaseException as error:
        _kept = error
        raise


def _wrap(_: object = None) -> None:
    process = sys.modules["multiprocessing.process"].current_process()
    if getattr(process.run, "func", None) is not _run:  # a child of a child registers again
        process.run = partial(_run, process.run)


def _wrap_when_it_begins() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(_wrap, _wrap)


def _wrap_what_is_unpickled() -> None:
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or not getattr(processes.current_process(), "_inheriting", False):
        return
    _wrap_when_it_begins()  # but for processes of SpawnProcess, which call no such functions:
    sys.modules["multiprocessing.context"].SpawnProcess._after_fork = staticmethod(_wrap)  # noqa: SLF001


if sys.version_info >= (3, 13):
    os.register_at_fork(after_in_child=_wrap_when_it_begins)
    _wrap_what_is_unpickled()
