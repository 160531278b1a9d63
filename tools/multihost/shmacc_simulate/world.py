"""What all parts of a job share: the time, the network, the shards, the ledger, random numbers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from shmacc._multihost.shard import ShardCore
from shmacc_simulate.ledger import Ledger

if TYPE_CHECKING:
    from shmacc._multihost.messages import BatchKey, Fence, Opened
    from shmacc_simulate.scenario import Scenario

_T = TypeVar("_T")
Steps = Generator[float, None, _T]
"""Work that takes time: it yields the time at which it goes on."""


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
        """Run steps until they end, each at its time."""
        time = next(steps, None)
        if time is not None:
            self.at(time, lambda: self.start(steps))

    def run(self, end: float, until: Callable[[], bool]) -> None:
        """Let time pass to `end`, or until the condition holds; it is checked before each event."""
        while self._events and not until():
            if self._events[0][0] > end:
                return
            self.now, _, do = heapq.heappop(self._events)
            do()


class Processor:
    """Does one thing at a time, in the order in which they come: a process with one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = 0.0

    def done(self, seconds: float) -> float:
        """Add work to the queue; return when it will be done."""
        self._free = max(self._free, self._clock.now) + seconds
        return self._free


class Network:
    """Carries messages between hosts, each with a NIC that sends and receives at the same time.

    Large messages queue at both NICs: first come, first served. Switches are never the limit. Small
    messages (reports, orders, answers) do not wait behind large ones, since they would not in a
    network that divides its bandwidth among streams.
    A message from a host to itself takes no time and is not counted.
    """

    def __init__(self, clock: Clock, hosts: int, bandwidth: float, latency: float) -> None:
        self._clock = clock
        self._out_free, self._in_free = [0.0] * hosts, [0.0] * hosts  # when each NIC is free
        self._bandwidth, self._latency = bandwidth, latency
        self.messages = 0
        self.large_bytes = 0.0

    def small(self, sender: int, receiver: int, size: float) -> float:
        """Send a small message; return when it arrives."""
        if sender == receiver:
            return self._clock.now
        self.messages += 1
        return self._clock.now + self._latency + size / self._bandwidth

    def large(self, sender: int, receiver: int, size: float, ready: float) -> Steps[None]:
        """Carry a large message, which can be sent from the time `ready` on."""
        if sender == receiver:
            yield ready
            return
        self.messages += 1
        self.large_bytes += size
        seconds = size / self._bandwidth
        began = max(ready, self._out_free[sender])
        self._out_free[sender] = began + seconds
        yield began + self._latency  # the first byte has come
        free = max(self._in_free[receiver], self._clock.now) + seconds
        self._in_free[receiver] = free
        yield max(free, began + seconds + self._latency)


class World:
    """What all parts of a job share."""

    def __init__(self, scenario: Scenario) -> None:
        machine = scenario.machine
        self.scenario = scenario
        self.rates = machine.dense if scenario.table.dense else machine.sparse
        self.clock = Clock()
        self.network = Network(self.clock, scenario.hosts, machine.bandwidth, machine.latency)
        self.ledger = Ledger(scenario.required)
        self.random = random.Random(scenario.seed)
        self.numbers = itertools.count(1)
        self.shards: dict[int, dict[int, Shard]] = {}  # of each living host, by number

    def compute_time(self) -> float:
        """Return how long a gradient takes."""
        return self.scenario.compute * self.random.lognormvariate(0.0, self.scenario.spread)

    def shard(self, place: str, number: int) -> Shard | None:
        """Return a shard at a host of that name; None: the host is dead."""
        at = int(place.rpartition(" ")[2])
        if at not in self.shards:
            return None
        return self.shards[at].setdefault(number, Shard(self, at))


class Shard:
    """A shard at one host: the driver of the library's ShardCore.

    It handles one call at a time; a piece is its size in bytes.
    """

    def __init__(self, world: World, at: int) -> None:
        self._world = world
        self.at = at
        self.alive = True
        self.core: ShardCore[float] = ShardCore()
        self._processor = Processor(world.clock)

    def stage(self, fence: Fence, key: BatchKey, size: float) -> Steps[bool]:
        """See `ShardCore.stage`; return whether the shard is still alive."""
        yield self._processor.done(self._world.scenario.machine.call)
        self.core.stage(fence, key, size)
        return self.alive

    def reduced(self, opened: Opened, number: int) -> Steps[bool]:
        """Add up the pieces of a round; return whether all are here."""
        pieces = self.core.pieces(opened.fence, opened.of_shard(number))
        seconds = sum(pieces or ()) / self._world.rates.reduce
        yield self._processor.done(self._world.scenario.machine.call + seconds)
        return pieces is not None and self.alive
