"""The terminal of `watch`: reads keys, one at a time, and redraws a picture."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from typing import TYPE_CHECKING, Any, Final, Self

from shmacc_inspect import page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
FIRST: Final = "first"
LAST: Final = "last"
RESIZED: Final = "resized"
SUSPEND: Final = "suspend"
CLOSED: Final = "closed"  # there will be no more keys
_SEQUENCES: Final = {
    b"\x1b[A": UP, b"\x1bOA": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"\x1b[5~": PAGE_UP,
    b"\x1b[6~": PAGE_DOWN, b"\x1b[H": FIRST, b"\x1bOH": FIRST, b"\x1b[1~": FIRST, b"\x1b[F": LAST,
    b"\x1bOF": LAST, b"\x1b[4~": LAST,
}  # fmt: skip
_MOST: Final = 64  # bytes at a time
_NOTICED: Final = {signal.SIGWINCH: RESIZED, signal.SIGTSTP: SUSPEND}
# Switch to the terminal's second screen, clear it, hide the cursor, and do not wrap long lines.
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
# Clear the screen first: some terminals keep text that no longer fits after a resize.
_LEAVE: Final = "\x1b[H\x1b[J\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR: Final = "\x1b[2J"
_CLEAR_LINE: Final = "\x1b[2K"
_REST_OF_SCREEN: Final = "\x1b[J"


class Keys:
    """The keyboard, within a `with` block. If stdin is no terminal, there are no keys.

    A resized window and Ctrl-Z also arrive as keys, since the screen must be redrawn or restored.
    """

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._pending: list[str] = []
        self._old_handlers: dict[int, Any] = {}
        # Python resumes the `select` in `wait` after a signal. To end it, the signal's handler
        # writes to this pipe.
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        for number in _NOTICED:
            self._old_handlers[number] = signal.signal(number, self._note)
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._waker)

    def listen(self) -> None:
        """Make the terminal deliver each key at once, without an echo."""
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)

    def rest(self) -> None:
        """Restore the terminal."""
        if self._fd is not None:
            with contextlib.suppress(termios.error):  # it may be gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, until: float) -> str | None:
        """Return the next key; None if none was pressed until this time (monotonic)."""
        if not self._pending:
            watched = [self._woken] if self._fd is None else [self._woken, self._fd]
            ready, _, _ = select.select(watched, [], [], max(0.0, until - time.monotonic()))
            if self._woken in ready:
                os.read(self._woken, _MOST)
            if self._fd in ready and self._fd is not None:
                self._pending += self._read(self._fd)
        return self._pending.pop(0) if self._pending else None

    @staticmethod
    def _read(fd: int) -> list[str]:
        try:
            typed = os.read(fd, _MOST)
        except OSError:
            typed = b""
        if not typed:
            return [CLOSED]
        found = []
        while typed:
            sequence = next(filter(typed.startswith, _SEQUENCES), None)
            found.append(_SEQUENCES[sequence] if sequence else chr(typed[0]))
            typed = typed[len(sequence or b"?") :]
        return found

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(_NOTICED[signal.Signals(number)])
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"!")


class Picture:
    """The terminal's second screen, within a `with` block; the first screen stays as it is."""

    _size = (0, 0)

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Switch to the second screen."""
        self._write(_ENTER)

    def leave(self) -> None:
        """Switch back to the first screen."""
        self._write(_LEAVE)

    @staticmethod
    def terminal() -> tuple[page.Terminal, int]:
        """Return the terminal and its height."""
        height = os.get_terminal_size(sys.stdout.fileno()).lines
        return page.Terminal.of_stdout(), max(1, height)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the picture by these lines, as far as they fit."""
        terminal, height = self.terminal()
        width = terminal.width or 0
        # After a resize, clear the screen: a terminal that became narrower has wrapped its lines.
        start = _HOME if self._size == (width, height) else _CLEAR + _HOME
        self._size = (width, height)
        # Clear a line before it is drawn: after a full one, the cursor is on its last letter.
        drawn = [f"{_CLEAR_LINE}{page.crop(line, width)}" for line in lines[:height]]
        rest = f"\r\n{_REST_OF_SCREEN}" if len(drawn) < height else ""
        self._write(start + "\r\n".join(drawn) + rest)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
