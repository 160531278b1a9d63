"""Hosts, an owner and chiefs that drive the protocol's core, in one thread and simulated time.

Messages are lost, doubled, delayed and thereby reordered; every part may be killed. Segments,
the ledger and the clock come from `shmacc_simulate`. The ledger checks each consumed round.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.multihost_actors import TIMING, Chief, Host, Worker

from shmacc._multihost.messages import Fence, NotReady, Opened
from shmacc._multihost.owner import OwnerCore
from shmacc_simulate.clock import Clock
from shmacc_simulate.ledger import Gradient, Ledger, Segment

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Faults:
    """How much goes wrong: probabilities for messages and blocks, events a second for the rest."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    forwarders: float = 0.0
    hosts: float = 0.0
    links: float = 0.0
    reboots: float = 0.0
    shards: float = 0.0
    owners: float = 0.0
    chiefs: float = 0.0
    raises: float = 0.0
    moves: float = 0.0
    zombies: float = 0.0
    steps: float = 0.0
    advances: float = 0.0


class World:
    """The owner, hosts, workers and a chief, their faults, and the ledger that checks rounds."""

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
        self.ledger = Ledger(required or hosts * workers)
        self.identities = itertools.count(1)
        self.faults = faults or Faults()
        self.accepted: dict[int, Gradient] = {}
        self.accepted_at: dict[int, Fence] = {}  # the accepting segment's fence
        self.dropped: set[Fence] = set()  # fences at which `advance_step` dropped gradients
        self.rounds: list[tuple[int, list[Gradient]]] = []
        self.owner_steps: dict[str, int] = {}
        self.chief_step = 0
        self.happened: Counter[str] = Counter()
        self.cuts: set[frozenset[str]] = set()  # pairs of hosts with no link between them
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
        """Send a message, from or to `host`; faults may lose, double or delay it."""
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
        """Answer waiting polls, if there is something new."""
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
        every("links", self._cut)
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

    def _cut(self) -> None:
        self.cuts.add(pair := frozenset({self._any_host().name, self._any_host().name}))
        self.after(self.random.uniform(0.2, 9.0), lambda: self.cuts.discard(pair))

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
        if self.chief.leaving:  # the chief's parameters already have the next step
            self.chief_step = max(self.chief_step, self.owner_steps[self.chief.ticket] + 1)
        self.owner = self._owner(None)
        if self.chief.alive and self.chief.in_block and self.chief.leaving is None:
            # The chief stays in its block, and another chief sets the step: the round is void.
            self.after(0.02, lambda: self.chief.set_step(self.chief_step))
            return
        self.chief.in_block = False
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
        """End all workers of a contributor but the latest, as the error of a conflict advises."""
        self.happened["conflicts"] += 1
        for worker in [w for w in self.workers if w.alive and w.contributor == contributor][:-1]:
            worker.alive = False

    def new_chief(self) -> None:
        self.chief = Chief(self)

    # Ledger

    def _owner(self, step: int | None) -> OwnerCore:
        world = self

        class Owner(OwnerCore):
            """Has the ledger check each round when it is consumed."""

            def _end_block(self, *, consume: bool) -> bool:
                block, ticket = self.block, self._block_ticket
                if consume and block is not None:
                    world.owner_steps[ticket] = block.step
                    world.audit(block)
                return super()._end_block(consume=consume)

        return Owner(self.term, step, TIMING, self.shards, home="host0")

    def audit(self, block: Opened) -> None:
        """Compare a consumed round with the ledger."""
        got = self.ledger.consume(block, self.owner.step)
        assert all(gradient.identity in self.accepted for gradient in got), "from nowhere"
        self.rounds.append((block.step, got))

    def lost(self) -> list[Gradient]:
        """Return gradients of past steps that were accepted and are in no round.

        Gradients that `advance_step` dropped are left out: segments accepted them at a fence that
        is in `dropped`.
        """
        return [
            gradient
            for gradient in self.accepted.values()
            if gradient.local_step < self.owner.step
            and gradient.identity not in self.ledger.consumed
            and self.accepted_at.get(gradient.identity) not in self.dropped
        ]
