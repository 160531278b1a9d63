"""Lets go of a handle when an object, a program, a child or a thread ends.

| what ends | hook | the exception | what is called |
| --- | --- | --- | --- |
| an object is closed, or collected | OBJECT | the block's | close |
| a program: ``atexit`` | OBJECT | the last that Python printed | close; announce |
| a program: multiprocessing's ``atexit`` | CHILD | the same | leave; announce |
| a child of multiprocessing, before ``os._exit`` | CHILD | `_child_errors.ending` | leave; last |
| a forked child, with the thread that forked | THREAD | `_child_errors.kept` | leave; last |
| a worker of billiard's Pool (celery) | POOL | its exit status | leave |

Where the last column has two entries, the second is called if other threads are in the way. Closing
a handle wakes its waits with an error. But daemon threads of a program that ends must not be woken,
so this process only announces its end. A child leaves and closes nothing, since handles of its
parent may still keep it attached. If other threads of the child still work, it leaves last.

If a process closes its handles or ends in order, waits with ``on_death="raise"`` do not report it.
If an exception ends the process, it has failed, and these waits report the exception.

One failure goes unseen: a nonzero ``SystemExit`` that ends the program, but leaves no ``with``
block of an accumulator. Python forgets it before any function of this module runs.
"""

import enum
import sys
import threading

from shmacc import _child_errors, _core


class Hook(enum.Enum):
    """The hooks that call `end`, as in the table above."""

    OBJECT = enum.auto()
    CHILD = enum.auto()
    THREAD = enum.auto()
    POOL = enum.auto()


class Way(enum.Enum):
    """The ways to let go of the handle."""

    CLOSE = enum.auto()
    LEAVE = enum.auto()
    LEAVE_LAST = enum.auto()
    ANNOUNCE_END = enum.auto()


def way(hook: Hook, *, main_over: bool, others: bool, failed: bool) -> Way:
    """Return what to do with a handle.

    Args:
        hook: The hook that is called.
        main_over: Whether the main thread has ended, and so the program.
        others: Whether other threads keep this process from closing the handle (`_others`).
        failed: Whether an exception ends the object, program, child or thread.
    """
    if hook is Hook.OBJECT:
        return Way.ANNOUNCE_END if others else Way.CLOSE
    if not others:
        return Way.LEAVE
    # If the child has failed, or the program ends, the kernel soon ends the other threads.
    return Way.ANNOUNCE_END if failed or main_over else Way.LEAVE_LAST


def end(handle: _core.Handle, hook: Hook, error: BaseException | None = None) -> None:
    """Let go of a handle.

    Args:
        handle: The handle.
        hook: The hook that is called.
        error: The exception that ends the object or process, if the hook knows one.
    """
    # Not for THREAD and POOL: there the process ends whether or not its main thread is alive.
    main_over = hook in {Hook.OBJECT, Hook.CHILD} and not threading.main_thread().is_alive()
    if error is None and main_over:
        error = _uncaught()
    others = _others(hook, main_over=main_over)
    chosen = way(hook, main_over=main_over, others=others, failed=error is not None)
    if chosen is Way.CLOSE:
        handle.close(error)
    elif chosen is Way.LEAVE:
        handle.leave(error)
    elif chosen is Way.ANNOUNCE_END:
        handle.announce_end(error)
    else:
        _LeavesLast(handle).start()


def _others(hook: Hook, *, main_over: bool) -> bool:
    """Return whether other threads keep this process from closing the handle."""
    if main_over:
        # Closing would wake a daemon thread with an error, and CPython may crash while it makes the
        # traceback. The kernel is about to release everything anyway.
        main = threading.main_thread()
        return any(thread is not main for thread in threading.enumerate())
    # Skip this for OBJECT: a collection may run in a thread that has the lock of `enumerate`.
    return hook in {Hook.CHILD, Hook.THREAD} and bool(_working_threads())


def _working_threads() -> list[threading.Thread]:
    # Non-daemon threads may still work: multiprocessing joins a child's only after its finalizers.
    main = threading.main_thread()
    return [
        thread
        for thread in threading.enumerate()
        if not (thread is main or thread.daemon or isinstance(thread, _LeavesLast))
    ]


class _LeavesLast(threading.Thread):
    """Leaves in order after a child's other threads have ended; until then they apply and take."""

    def __init__(self, handle: _core.Handle) -> None:
        super().__init__(name="shmacc leaves last", daemon=False)
        self._handle = handle

    def run(self) -> None:
        """Wait for all threads that Python waits for, then leave."""
        # Repeat this: a thread that was waited for may have started another one.
        while working := _working_threads():
            for thread in working:
                thread.join()
        self._handle.leave(None)


def _uncaught() -> BaseException | None:
    """Return the exception that has ended the main thread; None if the thread returned."""
    ended_child = _child_errors.kept()
    if ended_child is not None:
        return ended_child
    error: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if error is None or error.__traceback__ is None or hasattr(sys, "ps1"):
        return None  # an interactive prompt prints each exception and goes on
    # A framework or a callback may have printed an exception, after which the program went on.
    return error if error.__traceback__.tb_frame.f_back is None else None
