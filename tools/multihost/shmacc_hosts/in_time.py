"""The world in time: each step takes the time that processors and networks need; nothing fails.

Machine 0 has the owner and the chief. A forwarder has the threads that it has in `shmacc.ray`: one
for the segment and the core, one for the copy. Its calls wait at the owner for the next order.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, NamedTuple

from shmacc_hosts.costs import ROW_BYTES, SMALL_BYTES, Network, Processor, Stored, Work
from shmacc_hosts.walk import Clocked
from shmacc_hosts.world import World

if TYPE_CHECKING:
    from shmacc._multihost.messages import Opened
    from shmacc_hosts.costs import Scenario
    from shmacc_hosts.steps import Message, Step

_PARKED = 1.0  # seconds that a chief's call waits at the owner
HOME = 0


class Update(NamedTuple):
    """The seconds that the parts of an update take."""

    put: float = 0.0  # the chief puts it into Ray's store
    pull: float = 0.0  # the transfers to all hosts
    check: float = 0.0  # at a host
    make: float = 0.0  # at a host
    messages: float = 0.0  # the remaining time: messages, and waiting for the owner


class Round(NamedTuple):
    """The costs of a round."""

    seconds: float  # from the last gradient's apply until all hosts are at the next step
    update: Update
    out: float  # bytes in large messages from the chief's node
    calls: float  # how many calls the owner has answered
    most: float  # the most bytes of the update under way from the chief's node at the same time


class InTime(Clocked):
    """A simulated job, which measures the costs of its rounds."""

    def __init__(self, scenario: Scenario) -> None:
        hosts = scenario.hosts
        size = scenario.update * ROW_BYTES
        world = World(
            hosts=hosts, workers=scenario.workers, leaders=1, shards=hosts, size=int(size),
            required=hosts * scenario.workers, timing=scenario.timing, parks=_PARKED,
            kinds=frozenset() if scenario.updates else frozenset({"raise"}),
        )  # fmt: skip
        super().__init__(world)
        self.scenario, self._size, costs = scenario, size, scenario.costs
        self.random = random.Random(scenario.seed)
        self.network = Network(world, hosts, costs.bandwidth, costs.latency)
        self._owner, self._chief = Processor(world), Processor(world)
        self._threads, self._copies, self._shards = (
            [Processor(world) for _ in range(hosts)] for _ in range(3)
        )
        self._stored = Stored(self.network, world, HOME, size)
        self._block: Opened | None = None  # the chief's
        self._opened = 0.0, 0.0, 0.0  # when it was opened: the last apply, bytes sent, calls
        self._fetched = 0.0
        self._update = Update()
        self.rounds: list[Round] = []

    def finish(self) -> Round:
        """Let the job make its rounds; return the medians over all rounds but the first.

        Raises:
            RuntimeError: The rounds have not ended after `Scenario.longest` seconds.
        """
        wanted = self.scenario.rounds + 1
        self.run(self.scenario.longest, lambda: len(self.rounds) >= wanted)
        if len(self.rounds) < wanted:
            raise RuntimeError(f"Only {len(self.rounds)} rounds have ended: {self.scenario}")
        seconds, updates, *spent = zip(*self.rounds[1:], strict=True)
        update = Update(*map(statistics.median, zip(*updates, strict=True)))
        return Round(statistics.median(seconds), update, *map(statistics.median, spent))

    # Durations

    def seconds(self, step: Step) -> float | Work:
        """Return how long a step takes, or the work that must be done before it."""
        scenario, costs, now = self.scenario, self.scenario.costs, self.world.now
        match step.part, step.what, step.arg:
            case "machine", "apply", _:
                return scenario.compute * self.random.lognormvariate(0.0, scenario.spread)
            case "machine", "act", "HOLD":
                count = len(self.world.machines[step.number].memory.segment.content)
                hold = scenario.shipped(count) / costs.hold
                return self._threads[step.number].done(hold) - now
            case "machine", "act", "SHIP":
                return self._ship(step.number)
            case "machine", "stage", _:
                return self._pull(step.number)
            case "machine", "make", _:
                rows = 0.0 if self._first(step.number) else scenario.update
                return self._copies[step.number].done(rows * costs.make) - now
            case "machine", "replace" | "catch_up", _:  # cannot be: a round waits for all hosts
                raise RuntimeError("A copy is ordered at a host that has not got its update")
            case "owner", "send_order", _:
                return self._owner.done(costs.owner_call / 2) - now
            case "owner", "look_around", _:
                return 0.3
            case "chief", "decide", "update":
                return self._fetch(self._size / costs.put) if scenario.updates else float("inf")
            case "chief", "decide", "skip":
                return self._fetch(0.0)
            case "chief", "decide", "fail":
                return float("inf")
        return 0.0

    def _first(self, at: int) -> bool:
        """Whether a host gets its first parameters: this transfer's time does not count."""
        return self.world.machines[at].memory.lineage.term == 0

    def _pull(self, at: int) -> Work:
        """Transfer an update to a host; then check it there, but not if it is committed already."""
        if self._first(at):
            return
        yield from self._stored.pull(at, self.random, shared=self.scenario.shared)
        order = self.world.machines[at].doing[1]
        if order.lineage[:2] != order.stage.update:
            yield self._copies[at].done(self.scenario.update * self.scenario.costs.check)

    def _ship(self, at: int) -> Work:
        """Send a piece to each shard. Hosts begin with different shards, to spread the load."""
        scenario, count = self.scenario, len(self.world.machines[at].memory.segment.content)
        size = scenario.shipped(count) / scenario.hosts
        order = [(at + turn) % scenario.hosts for turn in range(scenario.hosts)]
        yield from self.all_of(self._send(at, to, size) for to in order)

    def _send(self, at: int, to: int, size: float) -> Work:
        call = self.scenario.costs.call
        yield from self.network.large(at, to, size, self._threads[at].done(call))
        yield self._shards[to].done(call)
        yield self.network.small(to, at)

    def _fetch(self, put: float) -> Work:
        """Get each shard's part of the mean, join them, and put the update into Ray's store."""
        scenario = self.scenario
        assert self._block is not None
        size = scenario.shipped(self._block.count)
        received = sum(scenario.shipped(each.batch.count) for each in self._block.members)
        parts = scenario.hosts
        yield from self.all_of(self._get(at, size / parts, received / parts) for at in range(parts))
        yield self._chief.done(size / scenario.costs.join)
        self._fetched = self.world.now
        yield self._fetched + put
        self._stored = Stored(self.network, self.world, HOME, self._size)

    def _get(self, at: int, size: float, received: float) -> Work:
        costs = self.scenario.costs
        yield self._chief.done(costs.call)
        yield self.network.small(HOME, at)
        yield self._shards[at].done(costs.call + received / costs.reduce)
        yield from self.network.large(at, HOME, size, self.world.now)

    # Work and messages

    def send(self, message: Message) -> None:
        """Plan when a message arrives. The owner needs time before it sends an answer."""
        contributors = 0
        if message.kind == "report" and message.data[2].batch is not None:
            contributors = len(message.data[2].batch.contributors)
        if message.kind == "answer":
            self.start(self._answer(message))
        else:
            size = SMALL_BYTES + 8 * contributors
            self.at(self.network.small(message.sender, message.receiver, size), message)

    def _answer(self, message: Message) -> Work:
        yield self._owner.done(self.scenario.costs.owner_call / 2)
        yield self.network.small(message.sender, message.receiver)
        self.world.deliver(message)
        self.plan(self.touched(message))

    def arrive(self, message: Message) -> None:
        self.start(self._take(message))

    def _take(self, message: Message) -> Work:
        costs = self.scenario.costs
        if message.kind == "order":
            yield self._threads[message.receiver].done(costs.call)
        else:
            yield self._owner.done(costs.owner_call / 2)
        self.world.deliver(message)
        self.plan(self.touched(message))

    def look(self) -> None:
        """When the chief gets a block, or learns that its update was made, measure the costs."""
        world, chief, costs = self.world, self.world.chiefs[0], self.scenario.costs
        if chief.does == "told" and self._update == Update():
            rows, put = self.scenario.update, self._size / costs.put
            parts = put, self._stored.last, rows * costs.check, rows * costs.make
            rest = world.now - self._fetched - sum(parts)
            self._update = Update(*parts, messages=rest)
        if chief.block is None or chief.block is self._block:
            return
        world.check()
        sent, calls = self.network.sent[HOME], world.owners[0].answered
        if self._block is not None:
            applied, before, answered = self._opened
            spent = sent - before, calls - answered, self._stored.most
            self.rounds.append(Round(world.moved_at - applied, self._update, *spent))
        self._block, self._update = chief.block, Update()
        self._opened = world.applied_at, sent, calls
