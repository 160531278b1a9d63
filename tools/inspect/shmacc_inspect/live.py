"""The whole terminal as a picture that is drawn over and over."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, Self

from shmacc_inspect import page

if TYPE_CHECKING:
    from collections.abc import Sequence

# The other screen, cleared, without a cursor, and without wrapping long lines.
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
# Cleared, since some terminals keep what no longer fits after they were resized.
_LEAVE: Final = "\x1b[H\x1b[J\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR: Final = "\x1b[2J"
_CLEAR_LINE: Final = "\x1b[2K"
_REST_OF_SCREEN: Final = "\x1b[J"


class Picture:
    """The terminal's other screen, within a `with` block; afterwards the first one is as before."""

    _size = (0, 0)

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Switch to the other screen."""
        self._write(_ENTER)

    def leave(self) -> None:
        """Switch back."""
        self._write(_LEAVE)

    @staticmethod
    def terminal() -> tuple[page.Terminal, int]:
        """Return the terminal and its height."""
        height = os.get_terminal_size(sys.stdout.fileno()).lines
        return page.Terminal.of_stdout(), max(1, height)

    def draw(self, lines: Sequence[str]) -> None:
        """Draw these lines over the last ones, as far as there is room."""
        terminal, height = self.terminal()
        width = terminal.width or 0
        # A terminal that became narrower has wrapped its lines.
        start = _HOME if self._size == (width, height) else _CLEAR + _HOME
        self._size = (width, height)
        # Clear first: after a line as wide as the terminal, the cursor stands on its last letter.
        drawn = [f"{_CLEAR_LINE}{page.crop(line, width)}" for line in lines[:height]]
        rest = f"\r\n{_REST_OF_SCREEN}" if len(drawn) < height else ""
        self._write(start + "\r\n".join(drawn) + rest)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
