"""Hosts, shards, an owner and chiefs around the protocol's core, in one thread and no real time.

Messages are dropped, doubled, delayed and so reordered; everything may be killed. Segments, books
and the clock are the simulation's; here nothing costs time, and everything goes wrong. Each round
that is consumed is held against the books.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmacc._multihost.forwarder import Do, ForwarderCore
from shmacc._multihost.messages import (
    BatchKey,
    Conflict,
    Died,
    Fence,
    NotReady,
    Opened,
    Timing,
)
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.books import Books, Gradient, Segment
from shmacc_simulate.world import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

TIMING = Timing(heartbeat=0.1, announce=0.01, lease=1.0, grace=0.3, expiry=5.0, chief_lease=2.0)


@dataclass
class Faults:
    """How much goes wrong: probabilities of messages, and deaths a second."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    forwarders: float = 0.0
    hosts: float = 0.0
    reboots: float = 0.0
    shards: float = 0.0
    owners: float = 0.0
    chiefs: float = 0.0
    raises: float = 0.0
    moves: float = 0.0
    zombies: float = 0.0
    steps: float = 0.0
    advances: float = 0.0


class Host:
    """A host: its segment, its forwarder, the shards that are there, and whether it is reached."""

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
        """Start a forwarder; the call that enrols it is a reliable one."""
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
        """Its process dies: its round of the segment is nobody's any more, its pieces are gone."""
        self.core = None
        self.shards.clear()
        self.segment.held = False
        self.world.after(self.world.random.uniform(0.02, 0.3), self.start)

    def poll(self, core: ForwarderCore) -> None:
        """Do what the driver of a forwarder does all the time."""
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
                case Do.SEAL, _:
                    core.sealed(segment.sealed(len(core.places)), self.world.now)
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
        """Send pieces until each shard has answered."""
        world = self.world
        self.shipping.add(grant)
        key = BatchKey(self.name, self.incarnation, grant)
        fence = core.fence
        assert fence is not None
        places = [world.host(name) for name in core.places]
        pieces: dict[int, list[Gradient]] = {}
        for gradient in self.segment.content:
            pieces.setdefault(gradient.identity % len(places), []).append(gradient)
        world.books.shipped[key] = list(self.segment.content)
        wanted = set(pieces)

        def attempt(shard: int) -> None:
            if core is not self.core or shard not in wanted:
                return
            world.send(lambda: stage(shard), self)
            world.after(0.3, lambda: attempt(shard))

        def stage(shard: int) -> None:
            if places[shard].reachable:
                places[shard].shards[shard].stage(fence, key, pieces[shard])
                world.send(lambda: acknowledged(shard), self)

        def acknowledged(shard: int) -> None:
            wanted.discard(shard)
            if not wanted and core is self.core:
                core.shipped(grant)
                self.run(core)

        for shard in pieces:
            attempt(shard)


class Worker:
    """Computes gradients, each at the step that its host's segment has."""

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
                # A new segment is adopted as what the owner begins with, or not at all.
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
        self.next_round()

    @property
    def in_block(self) -> bool:
        """Whether it has a round, or has left one and not heard what came of it."""
        return "answered" in self.__dict__

    def next_round(self) -> None:
        if not self.alive:
            return
        self.ticket = f"ticket {next(self.world.identities)}"
        self.leaving = None
        self.ask(self.ticket)

    def ask(self, ticket: str) -> None:
        """Ask again and again, also in the block: it is the heartbeat."""
        world = self.world
        if not self.alive or ticket != self.ticket:
            return

        def arrive() -> None:
            answer = world.owner.ask(ticket, world.books.required, world.now)
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
        if not self.alive or ticket != self.ticket or self.leaving is not None:
            return
        if isinstance(answer, NotReady):
            if isinstance(self.world.owner.answer(ticket), NotReady):  # not set meanwhile
                self.set_step(self.world.chief_step)
        elif isinstance(answer, Opened):
            self.fetch(ticket, answer)
        elif isinstance(answer, Conflict):
            self.world.end_others(answer.contributor)
            self.next_round()
        elif not isinstance(answer, Died) and answer.__class__.__name__ == "Ended":
            self.next_round()

    def fetch(self, ticket: str, opened: Opened) -> None:
        """Have the shards add up; all of them, or the members that are missing.

        A shard's host that does not answer is asked again with the chief's next heartbeat, until
        the owner says that it is lost.
        """
        world = self.world
        got: list[Gradient] = []
        lost = False
        for number, place in enumerate(opened.places):
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
        assert sorted(got, key=repr) == sorted(world.books.content(opened), key=repr)
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
        # It stays in the block, and sends heartbeats, until then.
        self.answered = lambda *_: None  # type: ignore[method-assign]

    def end(self, ticket: str, *, consume: bool) -> None:
        if self.alive and ticket == self.ticket:
            self.leaving = consume
            self.left(ticket, consume=consume)

    def left(self, ticket: str, *, consume: bool) -> None:
        """The chief's last message of the round arrives."""
        world = self.world
        consumed = world.owner.leave(ticket, world.now, consume=consume)
        world.orders()

        def heard() -> None:
            if ticket == self.ticket and self.alive:
                if consumed:
                    world.chief_step = max(world.chief_step, world.owner_steps.get(ticket, 0) + 1)
                self.__dict__.pop("answered", None)
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


class World:
    """Everything, and the books."""

    def __init__(
        self,
        seed: int,
        *,
        hosts: int = 3,
        workers: int = 3,
        shards: int = 2,
        required: int | None = None,
        contributors: bool = True,
        follows: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.after = self.clock.after
        self.books = Books(required or hosts * workers)
        self.identities = itertools.count(1)
        self.faults = faults or Faults()
        self.accepted: dict[int, Gradient] = {}
        self.accepted_at: dict[int, Fence] = {}  # what the segment's content belonged to
        self.dropped: set[Fence] = set()  # by advance_step
        self.rounds: list[tuple[int, list[Gradient]]] = []
        self.owner_steps: dict[str, int] = {}
        self.chief_step = 0
        self.happened: Counter[str] = Counter()
        self.term = 1
        self.shards = shards
        self.owner = self._owner(0)
        self.hosts = [Host(self, f"host{i}") for i in range(hosts)]
        self.workers = [
            Worker(self, host, i * workers + j if contributors else None, follows=follows)
            for i, host in enumerate(self.hosts)
            for j in range(workers)
        ]
        self.chief = Chief(self)
        self._schedule_faults()

    # Time and messages

    @property
    def now(self) -> float:
        return self.clock.now

    def send(self, arrive: Callable[[], None], host: Host | None = None) -> None:
        """Send a message, from or to a host."""
        for _ in range(2 if self.random.random() < self.faults.double else 1):
            if self.random.random() < self.faults.drop:
                continue
            late = self.random.random() < self.faults.late
            delay = self.random.uniform(0.3, 3.0) if late else self.random.uniform(0.0005, 0.01)

            def deliver() -> None:
                if host is None or host.reachable:
                    arrive()

            if host is None or host.reachable:
                self.after(delay, deliver)

    def answer(self, host: Host) -> None:
        core = host.core
        if core is not None:
            order = self.owner.order(host.name, host.incarnation)
            self.send(lambda: host.receive(core, order), host)

    def orders(self) -> None:
        """Answer the polls that are parked."""
        pending = sum(host.pending(self.owner.fence) for host in self.owner._hosts)
        assert self.owner.accumulated == pending, "what is counted once is true all the time"
        if self._seen != (self.term, self.owner.serial):
            self._seen = (self.term, self.owner.serial)
            for host in self.hosts:
                order = host.core._order if host.core is not None else None
                serial = -1 if order is None else order.serial
                if self.owner.has_news(host.name, serial):
                    self.answer(host)

    _seen = (0, 0)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        def is_over() -> bool:
            self.owner.tick(self.now)
            self.orders()
            return until()

        self.clock.run(self.now + seconds, is_over)

    # Faults

    def _schedule_faults(self) -> None:
        def every(name: str, do: Callable[[], None]) -> None:
            def again() -> None:
                rate = getattr(self.faults, name)
                if rate > 0:
                    self.happened[name] += 1
                    do()
                schedule()

            def schedule() -> None:
                rate = getattr(self.faults, name)
                if rate > 0:
                    self.after(self.random.expovariate(rate), again)

            schedule()

        every("forwarders", lambda: self._any_host().die())
        every("hosts", self._partition)
        every("reboots", self._reboot)
        every("shards", self._lose_shard)
        every("owners", self._restart_owner)
        every("moves", lambda: self._move(zombie=False))
        every("zombies", lambda: self._move(zombie=True))
        every("steps", self._set_same_step)
        every("advances", self._advance)

    def heal(self) -> None:
        """Let nothing go wrong from here on."""
        self.faults = Faults()

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def _any_host(self) -> Host:
        return self.random.choice(self.hosts)

    def _partition(self) -> None:
        host = self._any_host()
        host.reachable = False
        self.after(self.random.uniform(0.2, 3.0), lambda: setattr(host, "reachable", True))

    def _reboot(self) -> None:
        host = self._any_host()
        if not host.reachable:
            return
        host.reachable = False
        host.core = None
        host.shards.clear()
        mine = [worker for worker in self.workers if worker.host is host and worker.alive]
        for worker in mine:
            worker.alive = False

        def back() -> None:
            host.reachable = True
            host.segment = Segment()
            host.start()
            self.workers += [Worker(self, host, w.contributor, follows=w.follows) for w in mine]

        self.after(self.random.uniform(0.2, 3.0), back)

    def _set_same_step(self) -> None:
        if not isinstance(self.owner.answer(""), NotReady):
            self.chief.set_step(self.owner.step)

    def _advance(self) -> None:
        self.dropped.add(self.owner.fence)
        self.owner.advance_step(self.owner.step + 1, self.now)
        self.orders()

    def _lose_shard(self) -> None:
        self._any_host().shards.clear()

    def _restart_owner(self) -> None:
        self.term += 1
        self.chief_step = max(self.chief_step, self.owner.step)
        if self.chief.leaving:  # its parameters are those of the next step
            self.chief_step = max(self.chief_step, self.owner_steps[self.chief.ticket] + 1)
        self.owner = self._owner(None)
        if self.chief.alive and self.chief.in_block and self.chief.leaving is None:
            # It stays there, and another chief says which step it is: the round is no more.
            self.after(0.02, lambda: self.chief.set_step(self.chief_step))
            return
        self.chief.__dict__.pop("answered", None)
        self.chief.next_round()

    def _move(self, *, zombie: bool) -> None:
        living = [worker for worker in self.workers if worker.alive]
        if not living:
            return
        worker = self.random.choice(living)
        if not zombie:
            worker.alive = False
        self.workers.append(
            Worker(self, self._any_host(), worker.contributor, follows=worker.follows)
        )

    def end_others(self, contributor: int) -> None:
        """Do what the error says: of processes with one contributor the latest goes on."""
        self.happened["conflicts"] += 1
        for worker in [w for w in self.workers if w.alive and w.contributor == contributor][:-1]:
            worker.alive = False

    def new_chief(self) -> None:
        self.chief = Chief(self)

    # Books

    def _owner(self, step: int | None) -> OwnerCore:
        world = self

        class Owner(OwnerCore):
            """Shows its rounds to the books as they are consumed."""

            def _end_block(self, *, consume: bool) -> None:
                block, ticket = self.block, self._block_ticket
                if consume and block is not None:
                    world.owner_steps[ticket] = block.step
                    world.audit(block)
                super()._end_block(consume=consume)

        return Owner(self.term, step, TIMING, self.shards)

    def audit(self, block: Opened) -> None:
        """Hold a round that is consumed against the books."""
        got = self.books.consume(block, self.owner.step)
        assert all(gradient.identity in self.accepted for gradient in got), "from nowhere"
        self.rounds.append((block.step, got))

    def lost(self) -> list[Gradient]:
        """Gradients of steps that are over, which were accepted and are in no round.

        Without those that `advance_step` has dropped: the owner had left, or has left, what the
        segment's content belonged to when it accepted them.
        """
        return [
            gradient
            for gradient in self.accepted.values()
            if gradient.local_step < self.owner.step
            and gradient.identity not in self.books.consumed
            and self.accepted_at.get(gradient.identity) not in self.dropped
        ]
