"""The costs of a simulated job in bytes and seconds, and the network between its hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmacc._multihost.messages import Timing

if TYPE_CHECKING:
    import random

    from shmacc_hosts.world import World

SMALL_BYTES: Final = 300  # a report, an order, a call without rows; each contributor adds 8
WIDTH: Final = 64  # float32 values in a row of the table
ROW_BYTES: Final = WIDTH * 4 + 8  # a row of an update: values and index
SUM_BYTES: Final = ROW_BYTES + 8  # a row of sums or of the mean, which also has a count


@dataclass(frozen=True)
class Costs:
    """Times and speeds of hosts and network. docs/simulation.md says how they were measured."""

    bandwidth: float = 25e9 / 8  # of a NIC, in each direction
    latency: float = 50e-6  # from one host to another
    call: float = 0.13e-3  # processor time to send or receive one call or answer
    owner_call: float = 1 / 870  # the owner's time for a call, with its answer
    hold: float = 7.1e9  # bytes a second: a forwarder copies its segment's rows, by shard
    reduce: float = 6.3e9  # bytes a second: a shard adds up pieces
    join: float = 8.0e9  # bytes a second: the chief joins the mean's parts
    put: float = 2.5e9  # bytes a second: the chief puts an update into Ray's store
    check: float = 13e-9  # seconds a row: a host checks an update, and reserves room for it
    make: float = 115e-9  # seconds a row: a host makes an update, by Adagrad


@dataclass(frozen=True)
class Scenario:
    """A job. Each round needs one gradient of each worker; each host has a shard."""

    hosts: int
    workers: int = 8  # on each host
    touched: int = 500  # how many different rows a gradient has, all equally likely
    table: int = 1_000_000  # rows
    updates: bool = True  # whether the chief updates the parameters in each round
    shared: bool = False  # how hosts get an update; see `Stored`
    rounds: int = 3  # how many rounds count; one more comes before them
    compute: float = 0.3  # median seconds that a gradient takes
    spread: float = 0.3  # the standard deviation of the logarithm of these times
    costs: Costs = field(default_factory=Costs)
    timing: Timing = field(default_factory=Timing)
    seed: int = 1
    longest: float = 3600.0  # simulated seconds after which the job is stopped

    def rows(self, gradients: int) -> float:
        """Return the expected number of different rows that this number of gradients touches."""
        return self.table * (1 - (1 - self.touched / self.table) ** gradients)

    def shipped(self, gradients: int) -> float:
        """Return the bytes of the sums of this number of gradients."""
        return self.rows(gradients) * SUM_BYTES

    @property
    def update(self) -> float:
        """The number of rows in an update."""
        return self.rows(self.hosts * self.workers)


class Gate:
    """Counts pieces of work; calls `then` when all are done."""

    def __init__(self, works: int) -> None:
        self.closed = works
        self.then: Callable[[], None] = lambda: None

    def done(self) -> None:
        """Note that one more piece of work is done."""
        self.closed -= 1
        if not self.closed:
            self.then()


Work = Generator[float | Gate, None, None]
"""Work that takes time: it yields the time until which it waits, or a `Gate` that it waits for."""


class Processor:
    """A thread, which does one piece of work at a time, first come, first served."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free = 0.0

    def done(self, seconds: float) -> float:
        """Add work to the queue; return when it will be done."""
        self._free = max(self._free, self._world.now) + seconds
        return self._free


class Network:
    """Carries messages between hosts, each with a NIC that sends and receives at the same time.

    Large messages queue at both NICs: first come, first served. Switches are never the limit. Small
    messages (reports, orders, answers) do not wait behind large ones, since they would not in a
    network that divides its bandwidth among streams. A message from a host to itself takes no time.
    """

    def __init__(self, world: World, hosts: int, bandwidth: float, latency: float) -> None:
        self._world = world
        self._out_free, self._in_free = [0.0] * hosts, [0.0] * hosts  # when each NIC is free
        self._bandwidth, self._latency = bandwidth, latency
        self.sent = [0.0] * hosts  # bytes of large messages, by sender

    def small(self, sender: int, receiver: int, size: float = SMALL_BYTES) -> float:
        """Send a small message; return when it arrives."""
        seconds = 0.0 if sender == receiver else self._latency + size / self._bandwidth
        return self._world.now + seconds

    def large(self, sender: int, receiver: int, size: float, ready: float) -> Work:
        """Carry a large message, which can be sent from the time `ready` on."""
        if sender == receiver:
            yield ready
            return
        self.sent[sender] += size
        seconds = size / self._bandwidth
        began = max(ready, self._out_free[sender])
        self._out_free[sender] = began + seconds
        yield began + self._latency  # the first byte has come
        free = max(self._in_free[receiver], self._world.now) + seconds
        self._in_free[receiver] = free
        yield max(free, began + seconds + self._latency)

    def arrival(self, sender: int, size: float, ready: float) -> float:
        """Return when a large message would arrive, if the receiver gets no other."""
        return max(ready, self._out_free[sender]) + size / self._bandwidth + self._latency


class Stored:
    """An object in Ray's store, which hosts get from hosts that have it.

    As in Ray, a host gets the object from a random host that has all of it by then. At best
    (`shared`), it waits for the host that can send first, which may still be getting the object.
    """

    def __init__(self, network: Network, world: World, home: int, size: float) -> None:
        self._network, self._world, self._home, self._size = network, world, home, size
        self._whole_at = {home: world.now}  # by host: the time, maybe future, when it has it whole
        self._since = world.now
        self._asked: Counter[int] = Counter()  # by sender: how many hosts get it there now
        self.most = 0.0  # the most bytes that were under way from `home` at the same time
        self.last = 0.0  # seconds until the last transfer so far has ended

    def pull(self, at: int, random: random.Random, *, shared: bool) -> Work:
        """Transfer the object to the host `at`."""
        network, whole_at, now = self._network, self._whole_at, self._world.now
        if at in whole_at:
            return
        if shared:
            sender = min(whole_at, key=lambda s: network.arrival(s, self._size, whole_at[s]))
        else:
            sender = random.choice([host for host, time in whole_at.items() if time <= now])
        self._asked[sender] += 1
        self.most = max(self.most, self._asked[self._home] * self._size)
        ready = max(network.small(at, sender), whole_at[sender])
        whole_at[at] = network.arrival(sender, self._size, ready)
        yield from network.large(sender, at, self._size, ready)
        self._asked[sender] -= 1
        self.last = self._world.now - self._since
