"""Lets a test decide the result of another process's reservations (calls of fallocate).

By a seccomp filter with a listener, the kernel holds each call until the test has decided. So a
test can simulate a call that a signal interrupts, or a /dev/shm that is full at the third call,
without a hook in the library.
"""

import errno
import fcntl
import os
import platform
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe, call
from helpers.denied_calls import ALLOW, IS, LOAD, NUMBERS, RETURN, install
from helpers.support import LONG

_NEW_LISTENER: Final = 8
_ASK: Final = 0x7FC00000
_NOTIFICATION: Final = struct.Struct("=QII iIQ6Q")  # id, thread, flags; number, machine, ip, args
_ANSWER: Final = struct.Struct("=QqiI")  # id, value, error, flags
_RECEIVE: Final = 0xC0502100
_SEND: Final = 0xC0182101
_CONTINUE: Final = 1


@dataclass(frozen=True)
class Reservation:
    """A call of fallocate that has not been made yet.

    Attributes:
        thread: The thread that makes it.
        offset: The first byte to reserve in the file.
        size: The number of bytes.
    """

    thread: int
    offset: int
    size: int

    def blocks(self, number: signal.Signals) -> bool:
        """Whether the calling thread blocks this signal."""
        with open(f"/proc/{self.thread}/status", encoding="ascii") as status:  # noqa: PTH123
            (mask,) = (line for line in status if line.startswith("SigBlk:"))
        return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def let_it(_: Reservation) -> int:
    """Let every call happen."""
    return 0


@contextmanager
def watched(
    function: Callable[..., Any], *args: Any, decide: Callable[[Reservation], int] = let_it
) -> Iterator[Apart]:
    """Run a function in a process of its own; `decide` gets each of its reservations.

    Args:
        function: What to run, as in `Apart`.
        args: The function's arguments.
        decide: Returns the errno with which a call fails; 0: it is made. Calls that free memory
            are always made.
    """
    with Apart(_run, function, args) as process:
        listener = process.hear_descriptor()
        watching = threading.Thread(target=_watch, args=(listener, decide))
        watching.start()
        try:
            yield process
        finally:
            process.kill()  # its end makes `_watch` return
            watching.join(LONG)
            os.close(listener)
            assert not watching.is_alive()


def _watch(listener: int, decide: Callable[[Reservation], int]) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        events = poll.poll()[0][1]
        if not events & select.POLLIN:
            return
        # ENOENT: the call was given up meanwhile, or its process has ended.
        with suppress(FileNotFoundError):
            asked = bytearray(_NOTIFICATION.size)
            fcntl.ioctl(listener, _RECEIVE, asked)
            number, thread, _, _, _, _, _, mode, offset, size, *_ = _NOTIFICATION.unpack(asked)
            error = decide(Reservation(thread, offset, size)) if mode == 0 else 0
            answer = _ANSWER.pack(number, 0, -error, 0 if error else _CONTINUE)
            fcntl.ioctl(listener, _SEND, answer)


def _run(function: Callable[..., Any], args: tuple[Any, ...], pipe: Pipe) -> Any:
    listener = _install()
    pipe.say_descriptor(listener)
    os.close(listener)
    return call(function, args, pipe)


def _install() -> int:
    """Install the filter for this thread, and for threads that it starts from now on."""
    calls = (IS, 0, 1, NUMBERS["fallocate"]), (RETURN, 0, 0, _ASK), (RETURN, 0, 0, ALLOW)
    return install((LOAD, 0, 0, 0), *calls, flags=_NEW_LISTENER)


@cache
def _refusal() -> str | None:
    if not NUMBERS:
        return f"system calls of {platform.machine()} are not known here"
    pid = os.fork()
    if pid == 0:
        try:
            _install()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or errno.EINVAL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else f"a seccomp listener is refused here: {os.strerror(code)}"


needs_listener = pytest.mark.skipif(_refusal() is not None, reason=str(_refusal()))
