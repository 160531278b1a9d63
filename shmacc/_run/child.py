"""A child's side of `shmacc.run`: it makes one call, and hands the outcome to its parent.

The result or the exception stands in an anonymous file in memory (memfd), which the parent reads
when the child has ended. A pipe would block both if the result is large, and would stay open in
processes that the child started. A child that is killed while it writes leaves a pickle that is
cut, which counts as none.

If the parent dies, the kernel kills the child (PR_SET_PDEATHSIG). A parent that dies before the
child has asked for that is not its parent any more, which it checks afterwards. A forkserver's
child has the server as its parent, so one of its threads waits for the end of the run's process.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, reduction
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1  # prctl(2)

handlers: dict[int, Any] = {}
"""This process's own handlers, while a run notes signals in their place."""


def restore_handlers() -> None:
    numbers = tuple(handlers)
    while handlers:
        signal.signal(*handlers.popitem())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class Call(NamedTuple):
    """What one child does; a chief's rank is -1."""

    role: str
    rank: int
    function: Callable[..., object]
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.role if self.rank < 0 else f"{self.role} {self.rank}"


class Answer:
    """A file in memory for what a child returns or raises."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], "Answer"], tuple[Any]]:
        return _from_parent, (reduction.DupFd(self._descriptor),)

    def write(self, answer: bytes) -> None:
        with os.fdopen(self._descriptor, "wb") as file:
            file.write(answer)

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self) -> tuple[Any, BaseException | None] | None:
        """Return the value and the exception; None: the child wrote no answer, or a part of it."""
        with os.fdopen(self._descriptor, "rb") as file:
            file.seek(0)  # the child's position is this one
            answer = file.read()
        if not answer.endswith(pickle.STOP):
            return None
        try:
            value, error, told = pickle.loads(answer)  # noqa: S301  this process's own child wrote it
        except (EOFError, pickle.UnpicklingError):
            return None
        if error is not None:
            error.add_note(told)
        return value, error


def _from_parent(duplicate: Any) -> Answer:
    descriptor = duplicate.detach()
    os.set_inheritable(descriptor, False)  # noqa: FBT003  not for a program that takes the child's place
    return Answer(descriptor)


def main(call: Call, environment: dict[str, str], parent: int | None, answer: Answer) -> None:
    os.setpgid(0, 0)
    # A terminal stops a process outside of its foreground group that reads from it. multiprocessing
    # has replaced sys.stdin only.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _end_with(parent)
    restore_handlers()  # fork: its parent's are no use here
    os.environ.update(environment, SHMACC_ROLE=call.role, SHMACC_RANK=str(call.rank))
    try:
        answer.write(pickle.dumps((call.function(*call.args), None, "")))
    except SystemExit:
        raise  # its status says all
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # one traceback, the parent's, is enough
    except BaseException as error:
        answer.write(_pickled(error, f"In {call} (pid {os.getpid()}):\n{traceback.format_exc()}"))
        raise


def _end_with(parent: int | None) -> None:
    """Let this process be killed when its parent ends; None: its parent is a forkserver."""
    libc = ctypes.CDLL(None, use_errno=True)
    if parent is None or libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        threading.Thread(target=_end_after_parent, name="shmacc run", daemon=True).start()
    elif os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _pickled(error: BaseException, told: str) -> bytes:
    try:
        answer = pickle.dumps((None, error, told))
        _, found, _ = pickle.loads(answer)  # noqa: S301  an __init__ with other arguments fails only here
        found.add_note(told)  # a __reduce__ may lead to something else
    except Exception:  # noqa: BLE001  whatever its class does
        in_words = RuntimeError(f"{type(error).__qualname__}: {error}")
        return pickle.dumps((None, in_words, told))
    return answer
