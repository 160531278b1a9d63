"""Hosts: a segment, workers that follow its step, and the driver of the library's ForwarderCore."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmacc._multihost.forwarder import Do, ForwarderCore
from shmacc._multihost.messages import BatchKey, Order
from shmacc_simulate.ledger import Gradient, Segment
from shmacc_simulate.scenario import SMALL_BYTES
from shmacc_simulate.world import Processor

if TYPE_CHECKING:
    from shmacc._multihost.messages import Fence
    from shmacc_simulate.owner import Owner
    from shmacc_simulate.world import Steps, World


@dataclass(eq=False)
class _Pieces:
    """The pieces of a batch, on their way to the shards."""

    key: BatchKey
    fence: Fence
    size: float  # bytes of each
    shard_hosts: tuple[str, ...]
    wanted: set[int]  # shards that have not answered


class Host:
    """A host.

    Its forwarder works as that of `shmacc.ray`: one thread for the segment and the core, and calls
    to the owner that wait there for the next order.
    """

    def __init__(self, world: World, number: int, owner: Owner) -> None:
        self._world, self._owner = world, owner
        self.number = number
        self.name = f"host {number:04}"
        self.alive = False
        self.core: ForwarderCore | None = None
        self._wake_at = 0.0
        self._life = 0

    def start(self) -> None:
        """Boot: a new segment, a forwarder, workers."""
        world = self._world
        self.alive = True
        world.shards[self.number] = {}
        self._life += 1
        self._processor = Processor(world.clock)
        self.segment = Segment()
        self._holding = False
        self._shipping: _Pieces | None = None
        self._calls = 0  # calls to the owner without an answer yet
        self._serial = -1  # number of the last order
        self.incarnation = self._owner.enrol(self.name)
        self.core = ForwarderCore(self.name, self.incarnation, world.scenario.timing)
        workers = world.scenario.workers
        # Workers that wait for a step after _waiting_at:
        self._waiting = list(range(self.number * workers, (self.number + 1) * workers))
        self._waiting_at = -1
        self._follow()
        self._drive()

    def die(self) -> None:
        """End everything on the host."""
        self.alive = False
        for shard in self._world.shards.pop(self.number).values():
            shard.alive = False
        self.core = self._shipping = None
        self._life += 1

    # Workers

    def _follow(self) -> None:
        """Let waiting workers go on if the next step has come."""
        if self.segment.step > self._waiting_at:
            waiting, self._waiting = self._waiting, []
            self._waiting_at = self.segment.step
            for worker in waiting:
                self._world.clock.start(self._compute(worker))

    def _compute(self, worker: int) -> Steps[None]:
        """Have a worker compute its gradient of the segment's step, and apply it."""
        world, life = self._world, self._life
        gradient = Gradient(next(world.numbers), self.segment.step, worker)
        yield world.clock.now + world.compute_time()
        if life != self._life:
            return
        if self.segment.apply(gradient):
            world.ledger.accepted += 1
        else:
            world.ledger.refused += 1
        if gradient.local_step < self.segment.step:
            world.clock.start(self._compute(worker))
        else:
            self._waiting.append(worker)
        self._drive()

    # The forwarder

    def receive(self, incarnation: int, order: Order) -> Steps[None]:
        """Handle an answer of the owner, as soon as the thread is free."""
        core = self.core
        if core is None or self.incarnation != incarnation:
            return
        yield self._processor.done(self._world.scenario.machine.call)
        if core is self.core:
            self._calls -= 1
            core.receive(order)
            self._serial = order.serial
            if order.ready:
                for shard in self._world.shards[self.number].values():
                    shard.core.forget(order.fence)
            self._drive()

    def _drive(self) -> None:
        """Do what the core asks for, and report."""
        core, clock = self.core, self._world.clock
        if core is None or self._holding:
            return
        self._act(core)
        if self._holding or core is not self.core:
            return
        due = core.report_due(clock.now)
        if due <= clock.now or not (self._calls or core.has_answer_to_come):
            clock.start(self._report(core))
            due = core.report_due(clock.now)
        if not clock.now < self._wake_at <= due:
            self._wake_at = due
            clock.at(due, self._wake)

    def _report(self, core: ForwarderCore) -> Steps[None]:
        self._calls += 1
        report, serial = core.report(self._world.clock.now), self._serial
        who = len(report.batch.contributors) if report.batch is not None else 0
        yield self._world.network.small(self.number, self._owner.at, SMALL_BYTES + 8 * who)
        yield from self._owner.report(report, serial, self.number, self.receive)

    def _wake(self) -> None:
        if self.core is not None and self._world.clock.now >= self._wake_at:
            self._drive()

    def _act(self, core: ForwarderCore) -> None:
        segment = self.segment
        while (action := segment.next_action(core)) is not None:
            match action:
                case Do.HOLD, _:
                    self._world.clock.start(self._hold(core))
                    return
                case Do.SHIP, grant:
                    if self._shipping is None or self._shipping.key.grant != grant:
                        self._ship(core, grant)
                    return
                case Do.STOP, _:
                    raise RuntimeError("A forwarder that is alive was told to end")
            content = segment.content
            segment.follow(core, action)
            if segment.content is not content:
                self._world.ledger.emptied(content)
            self._follow()

    def _hold(self, core: ForwarderCore) -> Steps[None]:
        """Copy the segment's content, which keeps the thread busy. Any rows go to all shards."""
        batch = self.segment.hold()
        if batch.count:  # the core does not ship a batch without gradients
            batch = dataclasses.replace(batch, shards=frozenset(range(len(core.shard_hosts))))
        self._holding = True
        began = self._world.clock.now
        scenario = self._world.scenario
        yield self._processor.done(scenario.shipped(batch.count) / self._world.rates.hold)
        if core is self.core:
            self._holding = False
            core.held(batch, began)
            self._drive()

    def _ship(self, core: ForwarderCore, grant: int) -> None:
        """Send a piece to each shard. Hosts begin with different shards, to spread the load."""
        fence = core.fence
        if fence is None:
            raise RuntimeError("A segment of no fence was to be shipped")
        key = BatchKey(self.name, self.incarnation, grant)
        content, shards = tuple(self.segment.content), len(core.shard_hosts)
        self._world.ledger.shipped[key] = content
        size = self._world.scenario.shipped(len(content)) / shards
        self._shipping = _Pieces(key, fence, size, core.shard_hosts, set(range(shards)))
        for number in range(shards):
            steps = self._send(self._shipping, (self.number + number) % shards)
            self._world.clock.start(steps)

    def _send(self, pieces: _Pieces, number: int) -> Steps[None]:
        """Send a piece until its shard has answered. A call to a lost shard fails."""
        world, network = self._world, self._world.network
        while self._shipping is pieces:
            shard = world.shard(pieces.shard_hosts[number], number)
            if shard is not None:
                ready = self._processor.done(world.scenario.machine.call)
                yield from network.large(self.number, shard.at, pieces.size, ready)
                if shard.alive and (yield from shard.stage(pieces.fence, pieces.key, pieces.size)):
                    yield network.small(shard.at, self.number, SMALL_BYTES)
                    self._staged(pieces, number)
                    return
            yield world.clock.now + world.scenario.machine.retry

    def _staged(self, pieces: _Pieces, number: int) -> None:
        pieces.wanted.discard(number)
        if not pieces.wanted and self.core is not None and self._shipping is pieces:
            self._shipping = None
            self.core.shipped(pieces.key.grant)
            self._drive()
