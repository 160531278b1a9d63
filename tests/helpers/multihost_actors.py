"""The hosts, workers and chiefs of `multihost_world`, which drive the protocol's core."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from shmacc._multihost.forwarder import Do, ForwarderCore
from shmacc._multihost.messages import (
    BatchKey,
    Conflict,
    Ended,
    Fence,
    NotReady,
    Opened,
    Timing,
)
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.ledger import Gradient, Segment

if TYPE_CHECKING:
    from helpers.multihost_world import World

TIMING = Timing(heartbeat=0.1, announce=0.01, lease=1.0, grace=0.3, expiry=5.0, chief_lease=2.0)


class Host:
    """A host with its segment, its forwarder and its shards; it may be unreachable."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.segment = Segment()
        self.core: ForwarderCore | None = None
        self.reachable = True
        self.shipping: set[int] = set()
        self.shards: defaultdict[int, ShardCore[list[Gradient]]] = defaultdict(ShardCore)
        self.start()

    def start(self) -> None:
        """Start a forwarder once the host is reachable; its enrolment is never lost."""
        self.core = None
        self.shipping = set()
        if not self.reachable:
            self.world.after(0.1, self.start)
            return
        incarnation = self.world.owner.enrol(self.name, self.world.now)
        core = ForwarderCore(self.name, incarnation, TIMING)
        self.core = core
        self.incarnation = incarnation
        self.poll(core)

    def die(self) -> None:
        """Kill the forwarder, which ends its round; the host's shards lose their pieces."""
        self.core = None
        self.shards.clear()
        self.segment.held = False
        self.world.after(self.world.random.uniform(0.02, 0.3), self.start)

    def poll(self, core: ForwarderCore) -> None:
        """Run the forwarder and send its reports when they are due; repeat this every 5 ms."""
        if core is not self.core:
            return
        self.run(core)
        if core is self.core:
            if core.report_due(self.world.now) <= self.world.now:
                self.report(core)
            self.world.after(0.005, lambda: self.poll(core))

    def report(self, core: ForwarderCore) -> None:
        world, report = self.world, core.report(self.world.now)

        def arrive() -> None:
            world.owner.report(report, world.now)
            world.answer(self)

        world.send(arrive, self)

    def receive(self, core: ForwarderCore, order: object) -> None:
        if core is self.core:
            core.receive(order)  # type: ignore[arg-type]
            self.run(core)

    def run(self, core: ForwarderCore) -> None:
        segment = self.segment
        for _ in range(20):
            if core is not self.core:
                return
            match segment.next_action(core):
                case None:
                    return
                case Do.HOLD, _:
                    core.held(segment.hold(len(core.shard_hosts)), self.world.now)
                case Do.SHIP, grant:
                    if grant not in self.shipping:
                        self.ship(core, grant)
                    return
                case Do.STOP, _:
                    self.die()
                case action:
                    segment.follow(core, action)
        raise AssertionError("the forwarder finds no end")

    def ship(self, core: ForwarderCore, grant: int) -> None:
        """Send each shard its pieces, repeatedly until it has answered."""
        world = self.world
        self.shipping.add(grant)
        key = BatchKey(self.name, self.incarnation, grant)
        fence = core.fence
        assert fence is not None
        shard_hosts = [world.host(name) for name in core.shard_hosts]
        pieces: dict[int, list[Gradient]] = {}
        for gradient in self.segment.content:
            pieces.setdefault(gradient.identity % len(shard_hosts), []).append(gradient)
        world.ledger.shipped[key] = list(self.segment.content)
        wanted = set(pieces)

        def attempt(shard: int) -> None:
            if core is not self.core or shard not in wanted:
                return
            core.shipped(grant, frozenset(shard_hosts[each].name for each in wanted))
            if frozenset({self.name, shard_hosts[shard].name}) not in world.cuts:
                world.send(lambda: stage(shard), self)
            world.after(0.3, lambda: attempt(shard))

        def stage(shard: int) -> None:
            if shard_hosts[shard].reachable:
                shard_hosts[shard].shards[shard].stage(fence, key, pieces[shard])
                world.send(lambda: acknowledged(shard), self)

        def acknowledged(shard: int) -> None:
            wanted.discard(shard)
            if not wanted and core is self.core:
                core.shipped(grant)
                self.run(core)

        for shard in pieces:
            attempt(shard)


class Worker:
    """Applies gradients to its host's segment, each computed at the segment's current step."""

    def __init__(self, world: World, host: Host, contributor: int | None, *, follows: bool) -> None:
        self.world, self.host, self.contributor, self.follows = world, host, contributor, follows
        self.alive = True
        self.work()

    def work(self) -> None:
        if not self.alive:
            return
        step = self.host.segment.step
        gradient = Gradient(
            next(self.world.identities), step, self.contributor, self.world.random.randint(1, 3)
        )
        self.world.after(self.world.random.uniform(0.005, 0.06), lambda: self.apply(gradient))

    def apply(self, gradient: Gradient) -> None:
        if not self.alive:
            return
        segment = self.host.segment
        before = len(segment.content)
        result = segment.apply(gradient)
        if result is None:
            self.world.after(0.01, lambda: self.apply(gradient))
            return
        if result and len(segment.content) > before:
            self.world.accepted[gradient.identity] = gradient
            if self.host.core is not None:
                # No fence: the segment is new. An owner adopts it at the first fence, or never.
                fence = self.host.core.fence or Fence(1, 0)
                self.world.accepted_at[gradient.identity] = fence
        if self.follows:
            self.follow(gradient.local_step)
        else:
            self.work()

    def follow(self, step: int) -> None:
        if self.host.segment.step != step:
            self.work()
        elif self.alive:
            self.world.after(0.01, lambda: self.follow(step))


class Chief:
    """Asks for rounds one after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.ticket = ""
        self.leaving: bool | None = None
        self.in_block = False  # it has a round, or has left one and not heard the answer
        self.next_round()

    def next_round(self) -> None:
        if not self.alive:
            return
        self.ticket = f"ticket {next(self.world.identities)}"
        self.leaving = None
        self.ask(self.ticket)

    def ask(self, ticket: str) -> None:
        """Call the owner every 0.1 s, to ask for a round, stay in its block, or leave the block."""
        world = self.world
        if not self.alive or ticket != self.ticket:
            return

        def arrive() -> None:
            answer = world.owner.ask(ticket, world.ledger.required, world.now)
            world.orders()
            world.send(lambda: self.answered(ticket, answer))

        if self.in_block and self.leaving is None:
            world.send(lambda: world.owner.hear(ticket, world.now))
        elif self.leaving is None:
            world.send(arrive)
        else:
            consume = self.leaving
            world.send(lambda: self.left(ticket, consume=consume))
        world.after(0.1, lambda: self.ask(ticket))

    def answered(self, ticket: str, answer: object) -> None:
        if not self.alive or ticket != self.ticket or self.in_block or self.leaving is not None:
            return
        if isinstance(answer, NotReady):
            if isinstance(self.world.owner.answer(ticket), NotReady):  # still not set
                self.set_step(self.world.chief_step)
        elif isinstance(answer, Opened):
            self.fetch(ticket, answer)
        elif isinstance(answer, Conflict):
            self.world.end_others(answer.contributor)
            self.next_round()
        elif isinstance(answer, Ended):
            self.next_round()

    def fetch(self, ticket: str, opened: Opened) -> None:
        """Get and check the shards' pieces, or tell the owner that pieces are lost.

        If a shard's host is unreachable, the chief's next call to the owner leads here again,
        until the owner counts the host as lost.
        """
        world = self.world
        got: list[Gradient] = []
        lost = False
        for number, place in enumerate(opened.shard_hosts):
            keys = opened.of_shard(number)
            if not (keys and world.host(place).reachable):
                if keys and place not in world.owner.lost:
                    return
                lost = lost or bool(keys)
                continue
            pieces = world.host(place).shards[number].pieces(opened.fence, keys)
            lost = lost or pieces is None
            got.extend(itertools.chain.from_iterable(pieces or []))
        if lost:
            world.owner.missing(ticket, world.now)
            world.orders()
            return
        assert sorted(got, key=repr) == sorted(world.ledger.content(opened), key=repr)
        assert opened.count == len(got)
        assert opened.weight == sum(g.weight for g in got)
        random_ = world.random
        seconds = random_.uniform(0.0, 0.1)
        self.leaving = None
        if random_.random() < world.faults.raises:
            world.after(seconds, lambda: self.end(ticket, consume=False))
        elif random_.random() < world.faults.chiefs:
            world.after(seconds, self.die)
        else:
            world.after(seconds, lambda: self.end(ticket, consume=True))
        self.in_block = True  # `ask` now sends heartbeats

    def end(self, ticket: str, *, consume: bool) -> None:
        if self.alive and ticket == self.ticket:
            self.leaving = consume
            self.left(ticket, consume=consume)

    def left(self, ticket: str, *, consume: bool) -> None:
        """Let the chief's last message of the round arrive, and the answer be sent."""
        world = self.world
        consumed = world.owner.leave(ticket, world.now, consume=consume)
        world.orders()

        def heard() -> None:
            if ticket == self.ticket and self.alive:
                if consumed:
                    world.chief_step = max(world.chief_step, world.owner_steps.get(ticket, 0) + 1)
                self.in_block = False
                self.next_round()

        world.send(heard)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self.world.after(0.2, self.world.new_chief)

    def set_step(self, step: int) -> None:
        world = self.world
        world.owner.set_global_step(step, f"set {next(world.identities)}", world.now)
        world.orders()
