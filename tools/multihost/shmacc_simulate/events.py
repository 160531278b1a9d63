"""Simulated time: what happens when, and processors that do one thing after the other."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """The time, and what is to happen; events of the same time happen in the order of calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Have something done at a time; one that has passed means now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something done after so many seconds."""
        self.at(self.now + seconds, do)

    def run(self, end: float, until: Callable[[], bool]) -> None:
        """Let time pass to `end`, or until the condition holds."""
        while self._events and not until():
            time, _, do = self._events[0]
            if time > end:
                return
            heapq.heappop(self._events)
            self.now = time
            do()


class Processor:
    """Does one thing at a time, in the order in which they come: a process with one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = 0.0

    def reserve(self, seconds: float) -> float:
        """Put work in the line; return when it will be done."""
        self._free = max(self._free, self._clock.now) + seconds
        return self._free

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Put work in the line, and have something done at its end."""
        self._clock.at(self.reserve(seconds), then)
