"""Hosts: a segment, workers that follow its step, and the driver of the library's ForwarderCore."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shmacc._base.lineage import NO_COPY
from shmacc._multihost.forwarder import Do, ForwarderCore
from shmacc._multihost.messages import BatchKey
from shmacc_simulate.clock import Processor
from shmacc_simulate.copy import HostCopy
from shmacc_simulate.ledger import Gradient, Segment
from shmacc_simulate.network import SMALL_BYTES
from shmacc_simulate.world import HOME

if TYPE_CHECKING:
    from shmacc_simulate.clock import Steps
    from shmacc_simulate.owner import Owner
    from shmacc_simulate.world import World


class Host:
    """A host.

    Its forwarder works as that of `shmacc.ray`: one thread for the segment and the core, one for
    the copy, and calls to the owner that wait there for the next order.
    """

    def __init__(self, world: World, at: int, owner: Owner) -> None:
        self._world, self._at, self._owner = world, at, owner
        self._processor = Processor(world.clock)
        self.segment = Segment(step=-1)
        self._incarnation = owner.core.enrol(str(at), world.clock.now)
        self.core = ForwarderCore(str(at), self._incarnation, world.scenario.timing, NO_COPY)
        self._copy = HostCopy(world, at, self.core)
        self._holding = False
        self._shipping: int | None = None  # the grant that it ships for
        self._calls = 0  # calls to the owner without an answer yet
        self._serial = -1  # number of the last order
        self._wake_at = 0.0
        self._drive()

    def _compute(self, worker: int) -> Steps[None]:
        """Have a worker compute its gradient of the segment's step, and apply it."""
        world, scenario = self._world, self._world.scenario
        gradient = Gradient(next(world.numbers), self.segment.step, worker)
        seconds = scenario.compute * world.random.lognormvariate(0.0, scenario.spread)
        yield world.clock.now + seconds
        if not self.segment.apply(gradient):
            raise RuntimeError("A round has begun without a worker, though all are needed")
        world.applied_at = world.clock.now
        self._drive()

    def _drive(self) -> None:
        """Do what the core asks for, and report."""
        core, clock = self.core, self._world.clock
        if not self._holding:
            self._copy.work(self._drive)
            self._act()
        if self._holding:
            return
        due = core.report_due(clock.now)
        if due <= clock.now or not (self._calls or core.has_answer_to_come):
            clock.start(self._report())
            due = core.report_due(clock.now)
        if not clock.now < self._wake_at <= due:
            self._wake_at = due
            clock.at(due, self._drive)

    def _report(self) -> Steps[None]:
        self._calls += 1
        report, serial = self.core.report(self._world.clock.now), self._serial
        who = len(report.batch.contributors) if report.batch is not None else 0
        yield self._world.network.small(self._at, HOME, SMALL_BYTES + 8 * who)
        order = yield from self._owner.report(report, serial)
        yield self._processor.done(self._world.costs.call)
        self._calls -= 1
        self.core.receive(order)
        self._serial = order.serial
        self._drive()

    def _act(self) -> None:
        """Do what the core asks for. If the step moves, all workers, which wait, go on."""
        world, segment, workers = self._world, self.segment, self._world.scenario.workers
        while (action := segment.next_action(self.core)) is not None:
            match action:
                case Do.HOLD, _:
                    world.clock.start(self._hold())
                    return
                case Do.SHIP, grant:
                    if self._shipping != grant:
                        self._ship(grant)
                    return
            before = segment.step
            segment.follow(self.core, action)
            if segment.step > before:
                world.moved_at = world.clock.now
                for worker in range(self._at * workers, (self._at + 1) * workers):
                    world.clock.start(self._compute(worker))

    def _hold(self) -> Steps[None]:
        """Copy the segment's content, which keeps the thread busy. Any rows go to all shards."""
        batch = self.segment.hold()
        batch = dataclasses.replace(batch, shards=frozenset(range(self._world.scenario.hosts)))
        self._holding = True
        began = self._world.clock.now
        yield self._processor.done(
            self._world.scenario.shipped(batch.count) / self._world.costs.hold
        )
        self._holding = False
        self.core.held(batch, began)
        self._drive()

    def _ship(self, grant: int) -> None:
        """Send a piece to each shard. Hosts begin with different shards, to spread the load."""
        self._shipping = grant
        content, shards = tuple(self.segment.content), self.core.shard_hosts
        self._world.ledger.shipped[BatchKey(str(self._at), self._incarnation, grant)] = content
        size = self._world.scenario.shipped(len(content)) / len(shards)
        left = set(map(int, shards))
        for at in sorted(left, key=lambda at: (at - self._at) % len(shards)):
            self._world.clock.start(self._send(grant, at, size, left))

    def _send(self, grant: int, at: int, size: float, left: set[int]) -> Steps[None]:
        """Send a piece to the shard at a host; the last one that is there ends the shipping."""
        network, call = self._world.network, self._world.costs.call
        yield from network.large(self._at, at, size, self._processor.done(call))
        yield self._world.shards[at].done(call)
        yield network.small(at, self._at)
        left.discard(at)
        if not left:
            self.core.shipped(grant)
            self._drive()
