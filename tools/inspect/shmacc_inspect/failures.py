"""The exit status of each kind of failure, which is never 0."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from shmacc_inspect import formatting, page

FINE: Final = 0
WRONG_OR_FAILED: Final = 1
USAGE: Final = 2
NO_SUCH_NAME: Final = 3
NOT_READ: Final = 4
TIMED_OUT: Final = 124  # as timeout(1)
_LONG_WORD: Final = r"\S{300,}"  # longer than any name in /dev/shm
_KEPT: Final = 100


class UsageError(Exception):
    """The command line makes no sense."""


def end(status: int) -> NoReturn:
    """End the command with this status."""
    raise SystemExit(status)


def status_of(error: Exception) -> int | None:
    """Return the exit status for an error of the library or system; None: the error is a bug."""
    if isinstance(error, UsageError):
        return USAGE
    from shmacc import errors  # only here: help must come at once

    if isinstance(error, errors.NotFoundError):
        return NO_SUCH_NAME
    if isinstance(error, errors.InvalidArgumentError):
        return USAGE
    if isinstance(error, errors.ShmaccError | OSError):
        return WRONG_OR_FAILED
    return None


def explain(error: Exception) -> None:
    """Print the error on stderr."""
    import re  # only here: help must come at once

    said = str(error) or type(error).__name__
    page.write_line(re.sub(_LONG_WORD, lambda word: formatting.shorten(word[0], _KEPT), said))
    sys.stderr.flush()
