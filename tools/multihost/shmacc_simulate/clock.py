"""Simulated time: events, steps that wait for them, and processors."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")


class Clock:
    """The time, and events to come; events of the same time happen in the order of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call `do` at a time; a time that has passed means now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` after this many seconds."""
        self.at(self.now + seconds, do)

    def start(self, steps: Steps[None]) -> None:
        """Run steps until they end."""
        waits = next(steps, None)
        if isinstance(waits, Event):
            waits.then = lambda: self.start(steps)
        elif waits is not None:
            self.at(waits, lambda: self.start(steps))

    def run(self, end: float, until: Callable[[], bool]) -> None:
        """Let time pass to `end`, or until the condition holds; it is checked before each event."""
        while self._events and not until():
            if self._events[0][0] > end:
                return
            self.now, _, do = heapq.heappop(self._events)
            do()


class Event:
    """Something to come, which steps wait for."""

    def __init__(self) -> None:
        self.then: Callable[[], None] | None = None

    def happen(self) -> None:
        """Let it happen, unless it has."""
        then, self.then = self.then, None
        if then is not None:
            then()


Steps = Generator[float | Event, None, _T]
"""Work that takes time: it yields the time at which it goes on, or an event that it waits for."""


class Processor:
    """Does one thing at a time, in the order in which they come: a thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = 0.0

    def done(self, seconds: float) -> float:
        """Add work to the queue; return when it will be done."""
        self._free = max(self._free, self._clock.now) + seconds
        return self._free
