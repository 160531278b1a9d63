"""The owner: the driver of the library's OwnerCore, as that of `shmacc.ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shmacc._multihost.messages import Staging, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc_simulate.clock import Event, Processor
from shmacc_simulate.world import HOME

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Order, Report
    from shmacc_simulate.clock import Steps
    from shmacc_simulate.world import World

_Answer = TypeVar("_Answer")

_PARKED = 1.0  # seconds that a chief's call waits at the owner


class Owner:
    """The owner, a process with one thread."""

    def __init__(self, world: World) -> None:
        self._world, hosts = world, world.scenario.hosts
        self.core = OwnerCore(1, None, world.scenario.timing, hosts, copies=True, home=str(HOME))
        self.core.list_hosts(frozenset(map(str, range(hosts))), 0.0)
        self.calls = 0  # that it has answered
        self._processor = Processor(world.clock)
        self._parked: dict[Event, Callable[[], bool]] = {}
        self._serial = -1
        self._tick_at = 0.0

    def report(self, report: Report, serial: int) -> Steps[Order]:
        """Take a host's report; answer when there is an order newer than number `serial`."""
        core, world = self.core, self._world
        yield self._busy()
        core.report(report, world.clock.now)
        self._look()
        seconds = 2 * world.scenario.timing.quiet(core.pace)
        yield from self._park(seconds, lambda: not core.has_news(report.host, serial))
        yield self._busy()
        self.calls += 1
        order = core.order(report.host, report.incarnation)
        yield world.network.small(HOME, int(report.host))
        return order

    def serve(self, ask: Callable[[float], _Answer]) -> Steps[_Answer]:
        """Call the core for the chief. Answer once there is a result, or a second has passed."""
        clock = self._world.clock
        yield self._busy()

        def waits() -> bool:
            return isinstance(ask(clock.now), Waiting | Staging)

        waits()
        self._look()
        yield from self._park(_PARKED, waits)
        yield self._busy()
        self.calls += 1
        answer = ask(clock.now)
        self._look()
        return answer

    def _busy(self) -> float:
        """Receive a call, or answer one; return when that is done."""
        return self._processor.done(self._world.costs.owner_call / 2)

    def _park(self, seconds: float, unchanged: Callable[[], bool]) -> Steps[None]:
        """Wait for a change that matters to a call, but no longer than this."""
        if unchanged():
            self._parked[woken := Event()] = unchanged
            self._world.clock.after(seconds, woken.happen)
            yield woken
            del self._parked[woken]

    def _look(self) -> None:
        """Wake calls for which something has changed, and plan the next tick."""
        core, clock = self.core, self._world.clock
        while core.serial != self._serial:
            self._serial = core.serial
            for woken, unchanged in list(self._parked.items()):
                if not unchanged():
                    woken.happen()
        due = core.next_time(clock.now)
        if not clock.now < self._tick_at <= due:
            self._tick_at = due
            clock.at(due, self._tick)

    def _tick(self) -> None:
        self.core.tick(self._world.clock.now)
        self._look()
