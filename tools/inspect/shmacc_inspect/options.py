"""Arguments and options that several verbs have."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Final

from shmacc_inspect import NAMESPACE_VARIABLE, formatting

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES: Final = (
    "a shared_name, a segment's whole name in /dev/shm (shmacc....), or a glob in quotes"
)
_MOST: Final = 10**9  # the largest number that an option accepts
_LONGEST: Final = 10 * 365 * 86400.0  # seconds


def add_names(parser: argparse.ArgumentParser, *, without: str | None = None) -> None:
    """Declare NAME ...; `without` says what leaving it out means (None: it is required)."""
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+" if without is None else "*",
        help=_NAMES if without is None else f"{_NAMES}; without: {without}",
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare what every verb has: -n, -A and --json."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help=f"in this namespace, instead of that of {NAMESPACE_VARIABLE}",
    )
    group.add_argument(
        "-A",
        "--all-namespaces",
        dest="everywhere",
        action="store_true",
        help=f"in all namespaces, although {NAMESPACE_VARIABLE} is set",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON (docs/inspect-json.md)")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Declare --yes."""
    parser.add_argument(
        "--yes", action="store_true", help="do it; without this, only say what would be done"
    )


def seconds(least: float = 0.0) -> Callable[[str], float]:
    """Return the argument type of a length of time of at least `least` seconds."""

    def length_of_time(text: str) -> float:
        try:
            value = formatting.parse_duration(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if not least <= value <= _LONGEST or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not at least {least:g} s, or too long")
        return value

    return length_of_time


def count(least: int) -> Callable[[str], int]:
    """Return the argument type of a number that is at least `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {_MOST}")
        return int(text)

    return number
