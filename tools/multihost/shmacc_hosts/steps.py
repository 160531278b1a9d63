"""Steps and messages: all that can happen in a world, as data."""

from __future__ import annotations

from typing import Any, NamedTuple

_SAY_ENOUGH = {
    "read",
    "apply",
    "stage",
    "unstage",
    "make",
    "made",
    "replace",
    "catch_up",
    "cannot_replace",
}


class Step(NamedTuple):
    """A step of a part of the world: `what` is the name of the part's method."""

    part: str
    number: int
    what: str
    arg: Any = None

    def __str__(self) -> str:
        """Return a short name for paths of searches: m0 is machine 0, o0 an owner, c0 a chief."""
        where = "" if self.part == "faults" else f"{self.part[0]}{self.number} "
        if self.what == "end_wait":
            return where + " ".join(map(str, self.arg))
        says_more = self.arg is not None and self.what not in _SAY_ENOUGH
        return f"{where}{self.what}{f' {self.arg}' if says_more else ''}"


class Message(NamedTuple):
    """A message from one machine to another, by their numbers."""

    kind: str
    sender: int
    receiver: int
    name: str  # the receiver's name, which changes when it is restarted
    data: tuple[Any, ...]
