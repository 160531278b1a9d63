"""The owner and the shards: drivers of the library's OwnerCore and ShardCore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmacc._multihost.messages import Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.scenario import SMALL_BYTES
from shmacc_simulate.world import Processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Answer, BatchKey, Fence, Opened, Report
    from shmacc_simulate.hosts import Host
    from shmacc_simulate.world import Steps, World

_PARKED = 1.0  # seconds that a chief's call waits at the owner


@dataclass(frozen=True)
class _Call:
    """A forwarder's call that waits until there is a newer order than number `serial`."""

    host: Host
    incarnation: int
    serial: int


@dataclass
class _Ask:
    """A chief's call that waits for a round."""

    ticket: str
    answer: Callable[[Answer], None]


class Owner:
    """The owner, at the first host: a process with one thread. It does not die here."""

    at = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self.core = OwnerCore(1, 0, world.scenario.timing, world.scenario.shards)
        self._processor = Processor(world.clock)
        self._half = world.scenario.machine.owner_call / 2  # to receive a call, or to answer it
        self._calls: list[_Call] = []
        self._asks: list[_Ask] = []
        self._serial = -1
        self._tick_at = 0.0

    def enrol(self, host: str) -> int:
        """See `OwnerCore.enrol`."""
        incarnation = self.core.enrol(host, self._world.clock.now)
        self._look()
        return incarnation

    def report(self, host: Host, report: Report, serial: int) -> Steps[None]:
        """Receive a forwarder's call; answer it when there is news or it has waited enough."""
        yield self._processor.done(self._half)
        clock = self._world.clock
        self.core.report(report, clock.now)
        call = _Call(host, report.incarnation, serial)
        self._calls.append(call)
        self._look()
        if not self.core.has_news(report.host, serial):
            yield clock.now + self._world.scenario.timing.heartbeat * self.core.pace * 2
        yield from self._answer(call)

    def ask(self, ticket: str, required: int, answer: Callable[[Answer], None]) -> Steps[None]:
        """Receive a chief's call; answer it when there is a round or it has waited enough."""
        yield self._processor.done(self._half)
        found = self.core.ask(ticket, required, self._world.clock.now)
        ask = _Ask(ticket, answer)
        self._asks.append(ask)
        self._look()
        if isinstance(found, Waiting):
            yield self._world.clock.now + _PARKED
        yield from self._answer_chief(ask)

    def hear(self, ticket: str) -> Steps[None]:
        """See `OwnerCore.hear`."""
        yield self._processor.done(2 * self._half)
        self.core.hear(ticket, self._world.clock.now)

    def missing(self, ticket: str) -> Steps[None]:
        """See `OwnerCore.missing`."""
        yield self._processor.done(2 * self._half)
        self.core.missing(ticket, self._world.clock.now)
        self._look()

    def leave(self, ticket: str) -> Steps[None]:
        """End the chief's block without an error."""
        yield self._processor.done(2 * self._half)
        opened, step = self.core.block, self.core.step
        if self.core.leave(ticket, self._world.clock.now, consume=True) and opened is not None:
            self._world.ledger.consume(opened, step)
            self._world.ledger.shipped.clear()  # no batch of this fence can be named again
        self._look()

    def _look(self) -> None:
        """Answer waiting calls if there is something new, and schedule the next tick."""
        core, clock = self.core, self._world.clock
        if core.serial != self._serial:
            self._serial = core.serial
            for call in [c for c in self._calls if core.has_news(c.host.name, c.serial)]:
                clock.start(self._answer(call))
        for ask in list(self._asks):
            if not isinstance(core.answer(ask.ticket), Waiting):
                clock.start(self._answer_chief(ask))
        due = core.next_time(clock.now)
        if not clock.now < self._tick_at <= due:
            self._tick_at = due
            clock.at(due, self._tick)

    def _tick(self) -> None:
        if self._world.clock.now >= self._tick_at:
            self.core.tick(self._world.clock.now)
            self._look()

    def _answer(self, call: _Call) -> Steps[None]:
        if call not in self._calls:
            return
        self._calls.remove(call)
        order = self.core.order(call.host.name, call.incarnation)
        yield self._processor.done(self._half)
        yield self._world.network.small(self.at, call.host.number, SMALL_BYTES)
        yield from call.host.receive(call.incarnation, order)

    def _answer_chief(self, ask: _Ask) -> Steps[None]:
        if ask in self._asks:
            self._asks.remove(ask)
            yield self._processor.done(self._half)
            ask.answer(self.core.answer(ask.ticket))


class Shard:
    """A shard at one host. It handles one call at a time; a piece is its size in bytes."""

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
