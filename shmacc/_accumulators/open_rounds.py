"""Which rounds this process has open, by what their blocks were given."""

from typing import NamedTuple

from shmacc import _core
from shmacc._core import TakenRound


class OpenRound(NamedTuple):
    """An open round.

    Attributes:
        given: What its block was given.
        handle: That of its accumulator.
        taken: The extension's record of it.
    """

    given: object
    handle: _core.Handle
    taken: TakenRound


_open: dict[int, OpenRound] = {}


def add(given: object, handle: _core.Handle, taken: TakenRound) -> None:
    """Note a round whose block begins."""
    _open[id(taken)] = OpenRound(given, handle, taken)


def remove(taken: TakenRound) -> None:
    """Forget a round whose block ends. Idempotent."""
    _open.pop(id(taken), None)


def find(given: object) -> OpenRound | None:
    """Return the open round whose block was given this very object."""
    for found in tuple(_open.values()):
        if found.given is given:
            return found
    return None
