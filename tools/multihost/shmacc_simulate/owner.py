"""The owner: the driver of the library's OwnerCore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmacc._multihost.messages import Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc_simulate.scenario import SMALL_BYTES
from shmacc_simulate.world import Processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Answer, Order, Report
    from shmacc_simulate.world import Steps, World

_PARKED = 1.0  # seconds that a chief's call waits at the owner


@dataclass(frozen=True)
class _Call:
    """A forwarder's call that waits until there is a newer order than number `serial`."""

    host: str
    at: int
    incarnation: int
    serial: int
    receive: Callable[[int, Order], Steps[None]]


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

    def report(
        self, report: Report, serial: int, at: int, receive: Callable[[int, Order], Steps[None]]
    ) -> Steps[None]:
        """Receive a forwarder's call; answer it when there is news or it has waited enough."""
        yield self._processor.done(self._half)
        clock = self._world.clock
        self.core.report(report, clock.now)
        call = _Call(report.host, at, report.incarnation, serial, receive)
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
            for call in [c for c in self._calls if core.has_news(c.host, c.serial)]:
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
        order = self.core.order(call.host, call.incarnation)
        yield self._processor.done(self._half)
        yield self._world.network.small(self.at, call.at, SMALL_BYTES)
        yield from call.receive(call.incarnation, order)

    def _answer_chief(self, ask: _Ask) -> Steps[None]:
        if ask in self._asks:
            self._asks.remove(ask)
            yield self._processor.done(self._half)
            ask.answer(self.core.answer(ask.ticket))
