"""Writes the output of several processes, each line with the name of its process in front."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from shmacc._run.child import Call

_LONGEST = 2**16  # bytes of an unfinished line that are held back
_LAST = 1.0  # seconds to wait for a reader


class Prefixes:
    """Pipes for the output of processes, and a thread that writes what comes through the pipes.

    `close` does not wait until the pipes end: processes that inherited a pipe may live on.
    """

    def __init__(
        self,
        calls: list[Call],
        write: Callable[[int, bytes], int] = os.write,
        named: Callable[[Call], str] = str,
    ) -> None:
        """Make the pipes and start the thread.

        Args:
            calls: The processes' calls.
            write: Writes to standard output or error; returns how many bytes it has written.
            named: Returns a process's name.
        """
        self._to, self._named = write, named
        self._ends: dict[int, tuple[int, str]] = {}  # by pipe: the output and the prefix
        self._written: dict[int, list[int]] = {call.rank: [] for call in calls}
        for call in calls:
            for number in (1, 2):
                read, written = os.pipe()
                self._ends[read] = (number, f"{named(call)}: ")
                self._written[call.rank].append(written)
        self._kept = dict.fromkeys(self._ends, b"")
        self._cut: set[str] = set()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="shmacc prefixes", daemon=True)
        self._thread.start()

    def outputs(self, call: Call) -> tuple[int, int]:
        """Return the descriptors of a forked child's standard output and error."""
        out, error = self._written[call.rank]
        return out, error

    def paths(self, call: Call) -> tuple[str, str]:
        """Return the paths of standard output and error, for a child that is not forked."""
        out, error = (f"/proc/{os.getpid()}/fd/{end}" for end in self._written[call.rank])
        return out, error

    def cut(self, call: Call) -> None:
        """End the last line of a process that has ended, if it is unfinished."""
        self._cut.add(f"{self._named(call)}: ")
        os.write(self._woken, b"cut")

    def close(self) -> None:
        """Write the remaining output."""
        os.write(self._woken, b"over")
        self._thread.join(_LAST)

    def _copy(self) -> None:
        poll, told = select.poll(), b""
        for end in (*self._ends, self._wake):
            os.set_blocking(end, False)
            poll.register(end, select.POLLIN)
        while b"over" not in told:
            poll.poll()
            with suppress(BlockingIOError):
                told = os.read(self._wake, _LONGEST)
            cut, self._cut = self._cut, set()
            for end, (_, prefix) in tuple(self._ends.items()):
                try:
                    with suppress(BlockingIOError):
                        while read := os.read(end, _LONGEST):
                            self._write(end, read)
                            if prefix not in cut and b"over" not in told:
                                break  # the others' turn: this process may write without end
                    if prefix in cut or b"over" in told:
                        self._write(end, b"\n" if self._kept[end] else b"")
                except BrokenPipeError:  # nobody reads our output: give the processes this error
                    poll.unregister(end)
                    os.close(end)
                    del self._ends[end]

    def _write(self, end: int, read: bytes) -> None:
        *lines, rest = (self._kept[end] + read).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._kept[end] = rest
        number, prefix = self._ends[end]
        text = b"".join(prefix.encode() + line + b"\n" for line in lines)
        try:
            while text:
                try:
                    text = text[self._to(number, text) :]
                except BlockingIOError:  # another process made the output non-blocking
                    select.select((), (number,), (), _LAST)
        except BrokenPipeError:
            raise
        except OSError:  # the terminal is gone
            pass
