"""The owner and the shards: drivers of the library's OwnerCore and ShardCore."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shmacc._multihost.messages import Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.events import Processor
from shmacc_simulate.scenario import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Answer, BatchKey, Fence, Opened, Order, Report
    from shmacc_simulate.world import World

_PARKED = 1.0  # seconds that a chief's call waits at the owner


@dataclass(frozen=True)
class _Call:
    """A forwarder's call that waits for another order than that of `serial`."""

    host: str
    at: int
    incarnation: int
    serial: int
    receive: Callable[[Order], None] = field(compare=False)


@dataclass
class _Ask:
    """A chief's call that waits for a round."""

    ticket: str
    answer: Callable[[Answer], None]


class Owner:
    """The owner, at the first host: a process with one thread, which no death meets here."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.at = 0
        self.core = OwnerCore(1, 0, world.scenario.timing, world.scenario.shards)
        self._processor = Processor(world.clock)
        self._half = world.scenario.machine.owner_call / 2  # a call comes; it is answered
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
        self, at: int, report: Report, serial: int, receive: Callable[[Order], None]
    ) -> None:
        """Take a forwarder's call in."""

        def handle() -> None:
            self.core.report(report, self._world.clock.now)
            call = _Call(report.host, at, report.incarnation, serial, receive)
            self._calls.append(call)
            self._look()
            if self.core.has_news(report.host, serial):
                self._answer(call)
            else:
                timeout = self._world.scenario.timing.heartbeat * self.core.pace * 2
                self._world.clock.after(timeout, lambda: self._answer(call))

        self._processor.run(self._half, handle)

    def ask(self, ticket: str, required: int, answer: Callable[[Answer], None]) -> None:
        """Take a chief's call in."""

        def handle() -> None:
            found = self.core.ask(ticket, required, self._world.clock.now)
            ask = _Ask(ticket, answer)
            self._asks.append(ask)
            self._look()
            if isinstance(found, Waiting):
                self._world.clock.after(_PARKED, lambda: self._answer_chief(ask))
            else:
                self._answer_chief(ask)

        self._processor.run(self._half, handle)

    def hear(self, ticket: str) -> None:
        """See `OwnerCore.hear`."""
        self._processor.run(2 * self._half, lambda: self.core.hear(ticket, self._world.clock.now))

    def missing(self, ticket: str, then: Callable[[], None]) -> None:
        """See `OwnerCore.missing`."""

        def handle() -> None:
            self.core.missing(ticket, self._world.clock.now)
            self._look()
            then()

        self._processor.run(2 * self._half, handle)

    def leave(self, ticket: str, then: Callable[[], None]) -> None:
        """End the chief's block, in order."""

        def handle() -> None:
            opened, step = self.core.block, self.core.step
            if self.core.leave(ticket, self._world.clock.now, consume=True) and opened is not None:
                self._world.books.consumed(opened, step)
            self._look()
            then()

        self._processor.run(2 * self._half, handle)

    def _look(self) -> None:
        """Answer calls that wait, if there is something new; see to time."""
        core, world = self.core, self._world
        if core.serial != self._serial:
            self._serial = core.serial
            for call in [c for c in self._calls if core.has_news(c.host, c.serial)]:
                self._answer(call)
        for ask in list(self._asks):
            if not isinstance(core.answer(ask.ticket), Waiting):
                self._answer_chief(ask)
        due = core.next_time(world.clock.now)
        if not world.clock.now < self._tick_at <= due:
            self._tick_at = due
            world.clock.at(due, self._tick)

    def _tick(self) -> None:
        if self._world.clock.now >= self._tick_at:
            self.core.tick(self._world.clock.now)
            self._look()

    def _answer(self, call: _Call) -> None:
        if call not in self._calls:
            return
        self._calls.remove(call)
        receive = partial(call.receive, self.core.order(call.host, call.incarnation))

        def send() -> None:
            self._world.network.small(self.at, call.at, SMALL_BYTES, receive)

        self._processor.run(self._half, send)

    def _answer_chief(self, ask: _Ask) -> None:
        if ask not in self._asks:
            return
        self._asks.remove(ask)
        self._processor.run(self._half, lambda: ask.answer(self.core.answer(ask.ticket)))


class Shard:
    """A shard at one host: one call at a time, pieces are their sizes."""

    def __init__(self, world: World, at: int) -> None:
        self._world = world
        self.at = at
        self.alive = True
        self._core: ShardCore[float] = ShardCore()
        self._processor = Processor(world.clock)

    def stage(self, fence: Fence, key: BatchKey, size: float, then: Callable[[bool], None]) -> None:
        """See `ShardCore.stage`; says whether the call came to its end."""
        core = self._core

        def handle() -> None:
            core.stage(fence, key, size)
            then(self.alive)

        self._processor.run(self._world.scenario.machine.call, handle)

    def forget(self, before: Fence) -> None:
        """See `ShardCore.forget`."""
        self._core.forget(before)

    def reduced(self, opened: Opened, number: int, then: Callable[[bool], None]) -> None:
        """Add the pieces of a round up; say whether all are here."""
        machine = self._world.scenario.machine
        pieces = self._core.pieces(opened.fence, opened.of_shard(number))

        def done() -> None:
            then(pieces is not None and self.alive)

        size = sum(pieces or ())
        self._processor.run(machine.call + size / self._world.rates.reduce, done)


class Shards:
    """The shards of all hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hosts: dict[str, dict[int, Shard]] = {}

    def start(self, host: str) -> None:
        """Have a host, which has nothing yet."""
        self._hosts[host] = {}

    def die(self, host: str) -> None:
        """Lose all that is at a host."""
        for shard in self._hosts.pop(host).values():
            shard.alive = False

    def at(self, host: str, number: int) -> Shard | None:
        """Return a shard at a host; None: the host is dead."""
        shards = self._hosts.get(host)
        if shards is None:
            return None
        if number not in shards:
            shards[number] = Shard(self._world, int(host.rpartition(" ")[2]))
        return shards[number]

    def forget(self, host: str, before: Fence) -> None:
        """Have a host drop the pieces of rounds that are over."""
        for shard in self._hosts[host].values():
            shard.forget(before)
