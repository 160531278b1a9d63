"""Hosts: a segment, workers that follow its step, and the driver of the library's ForwarderCore."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shmacc._multihost import forwarder as act
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.messages import Batch, BatchKey, Order
from shmacc_simulate.books import Gradient
from shmacc_simulate.events import Processor
from shmacc_simulate.scenario import SMALL_BYTES

if TYPE_CHECKING:
    from shmacc._multihost.messages import Fence
    from shmacc_simulate.center import Owner, Shard, Shards
    from shmacc_simulate.world import World


class Segment:
    """What a host's group does, with gradients instead of their sums."""

    def __init__(self) -> None:
        self.step = 0
        self.held = False
        self.content: list[Gradient] = []

    def apply(self, gradient: Gradient) -> bool:
        """Take a gradient, unless it is late: its step is over, or sealed for a round."""
        if self.held or gradient.step < self.step:
            return False
        self.content.append(gradient)
        return True

    def seal(self, shards: int) -> Batch:
        """Refuse gradients from here on; return what is there."""
        self.held = True
        count = len(self.content)
        who = frozenset(gradient.worker for gradient in self.content)
        members = {"table": (count, count)} if count else {}
        return Batch(count, count, who, members, frozenset(range(shards)))

    def reset(self, step: int) -> None:
        """Empty it, at a step."""
        self.step, self.held, self.content = step, False, []


class Host:
    """A host.

    Its forwarder is driven as `shmacc.ray` does it: one thread for the segment and the core, calls
    of the owner that wait there until there is another order.
    """

    def __init__(self, world: World, number: int, owner: Owner, shards: Shards) -> None:
        self._world, self._owner, self.shards = world, owner, shards
        self.number = number
        self.name = f"host {number:04}"
        self.alive = False
        self.segment = Segment()
        self.core: ForwarderCore | None = None
        self.incarnation = 0
        self.calls = 0  # of the owner, not answered
        self.sealing = False
        self._shipping: _Shipping | None = None
        self._processor = Processor(world.clock)
        self._wake_at = 0.0
        self._waiting: list[int] = []  # workers that wait for a step after that of _waiting_at
        self._waiting_at = -1
        self._life = 0
        self._serial = -1  # of the last order

    def start(self) -> None:
        """Boot: a new segment, a forwarder, workers."""
        world = self._world
        self.alive = True
        self.shards.start(self.name)
        self._life += 1
        self._processor = Processor(world.clock)
        self.segment = Segment()
        self.sealing = False
        self._shipping = None
        self.calls, self._serial = 0, -1
        self.incarnation = self._owner.enrol(self.name)
        self.core = ForwarderCore(self.name, self.incarnation, world.scenario.timing)
        workers = world.scenario.workers
        self._waiting = list(range(self.number * workers, (self.number + 1) * workers))
        self._waiting_at = -1
        self._follow()
        self._drive()

    def die(self) -> None:
        """Everything on the host is gone."""
        self.alive = False
        self.shards.die(self.name)
        self.core = None
        self._life += 1

    # Workers

    def _follow(self) -> None:
        """Have the workers that wait for another step go on, if it has come."""
        if self.segment.step > self._waiting_at:
            waiting, self._waiting = self._waiting, []
            self._waiting_at = self.segment.step
            for worker in waiting:
                self._compute(worker)

    def _compute(self, worker: int) -> None:
        """Have a worker compute its gradient of the segment's step."""
        world, life = self._world, self._life
        gradient = Gradient(world.new_number(), worker, self.segment.step)
        world.clock.after(world.compute_time(), lambda: self._apply(gradient, life))

    def _apply(self, gradient: Gradient, life: int) -> None:
        if life != self._life:
            return
        accepted = self.segment.apply(gradient)
        self._world.books.applied(accepted=accepted)
        if gradient.step < self.segment.step:
            self._compute(gradient.worker)
        else:
            self._waiting.append(gradient.worker)
        self._drive()

    # The forwarder

    def _receive(self, incarnation: int, order: Order) -> None:
        """Take an answer of the owner in; the thread sees to it when it is free."""
        if not self.alive or self.incarnation != incarnation:
            return
        core = self.core

        def handle() -> None:
            if core is not None and core is self.core:
                self.calls -= 1
                core.receive(order)
                self._serial = order.serial
                if order.ready:
                    self.shards.forget(self.name, order.fence)
                self._drive()

        self._processor.run(self._world.scenario.machine.call, handle)

    def _drive(self) -> None:
        """Do what the core asks for, and report."""
        core, world = self.core, self._world
        if core is None or self.sealing:
            return
        self._act(core)
        if self.sealing or core is not self.core:
            return
        due = core.report_due(world.clock.now)
        if due <= world.clock.now or not (self.calls or core.has_answer_to_come):
            self.calls += 1
            report = core.report(world.clock.now)
            who = len(report.batch.contributors) if report.batch is not None else 0
            serial, receive = self._serial, partial(self._receive, self.incarnation)
            world.network.small(
                self.number,
                self._owner.at,
                SMALL_BYTES + 8 * who,
                lambda: self._owner.report(self.number, report, serial, receive),
            )
            due = core.report_due(world.clock.now)
        if not world.clock.now < self._wake_at <= due:
            self._wake_at = due
            world.clock.at(due, self._wake)

    def _wake(self) -> None:
        if self.core is not None and self._world.clock.now >= self._wake_at:
            self._drive()

    def _act(self, core: ForwarderCore) -> None:  # noqa: C901  one case for each action
        segment = self.segment
        while True:
            core.observe(segment.step, len(segment.content))
            match core.next_action():
                case None:
                    return
                case act.Do.SEAL, _:
                    self._seal(core)
                    return
                case act.Do.SHIP, grant:
                    if self._shipping is None or self._shipping.grant != grant:
                        self._ship(core, grant)
                    return
                case act.Do.RELEASE, _:
                    segment.held = False
                    core.released()
                case act.Do.CONSUME, _:
                    self._world.books.emptied(segment.content)
                    segment.reset(segment.step + 1)
                    core.moved()
                    self._follow()
                case act.Do.RESET, step:
                    self._world.books.emptied(segment.content)
                    segment.reset(step)
                    core.moved()
                    self._follow()
                case act.Do.SET_STEP, step:
                    segment.step, segment.held = step, False
                    core.step_set()
                    self._follow()
                case act.Do.STOP, _:
                    raise RuntimeError("A forwarder that is alive was told to end")

    def _seal(self, core: ForwarderCore) -> None:
        """Copy the segment's content, which takes the thread its time."""
        content = self.segment.seal(len(core.places))
        self.sealing = True
        began = self._world.clock.now
        scenario = self._world.scenario

        def done() -> None:
            if core is self.core:
                self.sealing = False
                core.sealed(content, began)
                self._drive()

        self._processor.run(scenario.shipped(content.count) / self._world.rates.seal, done)

    def _ship(self, core: ForwarderCore, grant: int) -> None:
        """Send the pieces until each shard has answered."""
        world = self._world
        fence = core.fence
        if fence is None:
            raise RuntimeError("A segment of no fence was to be shipped")
        key = BatchKey(self.name, self.incarnation, grant)
        content = tuple(self.segment.content)
        world.books.shipped(key, content)
        total = world.scenario.shipped(len(content))
        self._shipping = _Shipping(world, self, key, fence, total, core.places)
        self._shipping.start()

    def ready_to_send(self) -> float:
        """Return when the forwarder has made one more call."""
        return self._processor.reserve(self._world.scenario.machine.call)

    def is_shipping(self, shipping: _Shipping) -> bool:
        """Whether these pieces are still wanted."""
        return self.alive and self._shipping is shipping

    def shipped(self, shipping: _Shipping) -> None:
        """See that the pieces are all there."""
        if self.core is not None and self.is_shipping(shipping):
            self._shipping = None
            self.core.shipped(shipping.grant)
            self._drive()


class _Shipping:
    """Pieces on their way to the shards."""

    def __init__(
        self,
        world: World,
        host: Host,
        key: BatchKey,
        fence: Fence,
        size: float,
        places: tuple[str, ...],
    ) -> None:
        self.grant, self.places = key.grant, places
        self._world, self._host, self._key, self._fence = world, host, key, fence
        self._size = size / len(places)
        self._wanted = set(range(len(places)))

    def start(self) -> None:
        """Send: each host to another shard first, as streams that share a NIC would come out."""
        shards = len(self.places)
        for number in range(shards):
            self._send((self._host.number + number) % shards)

    def _send(self, number: int) -> None:
        host = self._host
        if not host.is_shipping(self):
            return
        shard = host.shards.at(self.places[number], number)
        if shard is None:
            self._staged(number, shard, staged=False)
            return
        self._world.network.large(
            host.number,
            shard.at,
            self._size,
            host.ready_to_send(),
            lambda: self._arrive(number, shard),
        )

    def _arrive(self, number: int, shard: Shard) -> None:
        if not shard.alive:
            self._staged(number, shard, staged=False)
        else:
            shard.stage(
                self._fence,
                self._key,
                self._size,
                lambda staged: self._staged(number, shard, staged=staged),
            )

    def _staged(self, number: int, shard: Shard | None, *, staged: bool) -> None:
        world = self._world
        if staged and shard is not None:
            answered = partial(self._answered, number)
            world.network.small(shard.at, self._host.number, SMALL_BYTES, answered)
        else:  # the shard is gone: the call fails
            world.clock.after(world.scenario.machine.retry, lambda: self._send(number))

    def _answered(self, number: int) -> None:
        self._wanted.discard(number)
        if not self._wanted:
            self._host.shipped(self)
