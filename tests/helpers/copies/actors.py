"""A machine's actor drives a forwarder: it follows orders with the segment and the copy."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from helpers.copies.memory import ids
from helpers.multihost_actors import TIMING

from shmacc._base.lineage import Lineage
from shmacc._multihost.changes import same
from shmacc._multihost.forwarder import Do, ForwarderCore, Get
from shmacc._multihost.messages import BatchKey
from shmacc.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.copies.machines import Machine
    from helpers.copies.memory import Path
    from helpers.copies.owners import Owner

    from shmacc._multihost.messages import Fence, Order, Stage


class Actor:
    """A machine's actor: a forwarder, and what it does with the segment and the copy."""

    def __init__(self, machine: Machine, owner: Owner) -> None:
        self.machine, self.world, self.memory = machine, machine.world, machine.memory
        self.alive = True
        self.owner: Owner | None = owner
        self.ears: dict[Owner, bool] = {}  # whether other owners hear it, too
        self.incarnation = owner.enrol(machine.name, self.world.now)
        self.core = ForwarderCore(
            machine.name,
            self.incarnation,
            TIMING,
            self.memory.look(),
            self.memory.promise,
            self.memory.copies,
        )
        self.serial = -1  # of the last order
        self._shipping: int | None = None
        self._poll()

    def _poll(self) -> None:
        """Act, and report when it is due; again every 10 ms."""
        if not self.alive:
            return
        self.act()
        if self.alive:
            self._find_owner()
            if self.owner is not None and self.core.report_due(self.world.now) <= self.world.now:
                report = self.core.report(self.world.now)
                for owner in self.world.owners_heard_by(self):
                    self.world.send(
                        lambda owner=owner: owner.hear_actor(report, self),  # type: ignore[misc]
                        self.machine,
                        owner.machine,
                    )
            self.machine.after(0.01, self._poll)

    def _find_owner(self) -> None:
        """Look for another owner if this one is dead and Ray says so."""
        if self.machine.zombie:
            return
        if self.owner is None or (self.owner.known_dead and self.world.random.random() < 0.1):
            self.owner, self.serial = self.world.registered, -1

    def receive(self, order: Order) -> None:
        if not self.alive or not self.core.may_follow(order):
            return
        self.memory.promise = max(self.memory.promise, order.term)
        self.core.receive(order)
        self.memory.copies = self.core.copies
        self.serial = order.serial
        self.act()

    # The segment

    def act(self) -> None:
        segment, core = self.memory.segment, self.core
        for _ in range(20):
            match segment.next_action(core):
                case None:
                    break
                case Do.HOLD, _:
                    core.held(segment.hold(), self.world.now)
                case Do.SHIP, grant:
                    if grant != self._shipping:
                        self._ship(grant)
                    break
                case Do.STOP, _:
                    self.machine.kill_actor()
                    return
                case action:
                    if action[0] in {Do.CONSUME, Do.RESET, Do.SET_STEP}:
                        assert core._order is not None
                        assert core._order.lineage is not None
                        self.memory.needs = core._order.lineage[:2]
                    segment.follow(core, action)
                    self.world.check()
        else:
            raise AssertionError("the forwarder finds no end")
        self._change()

    def _ship(self, grant: int) -> None:
        """Ship the content to shards, which are not simulated here."""
        self._shipping = grant
        key = BatchKey(self.machine.name, self.incarnation, grant)
        self.world.shipped[key] = list(self.memory.segment.content)

        def shipped() -> None:
            if self.alive:
                self.core.shipped(grant)
                self.act()

        self.machine.after(self.world.random.uniform(0.001, 0.03), shipped)

    # The copy

    def _change(self) -> None:
        """Begin what the core wants done with the copy."""
        match self.core.next_change():
            case Get.STAGE, order:
                assert order.stage is not None
                self._stage(order.stage)
            case Get.MAKE, order:
                self._make(order)
            case Get.REPLACE, order:
                self._replace(order)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Go on with a change, unless this actor is dead by then."""

        def go_on() -> None:
            if self.alive:
                do()
                self.act()

        self.machine.after(seconds, go_on)

    def _soon(self, do: Callable[[], None]) -> None:
        """Go on with a change after a while; a slow one takes longer than a lease."""
        random = self.world.random
        is_slow = random.random() < self.world.faults.slow
        self._later(random.uniform(0.3, 2.5) if is_slow else random.uniform(0.002, 0.06), do)

    def _stage(self, stage: Stage) -> None:
        """Get a change from its chief, for as long as it is wanted."""
        random, faults = self.world.random, self.world.faults

        def got() -> None:
            if stage.source.is_within_reach(self.machine):
                if random.random() < faults.errors:
                    self.core.refused(stage.update, ResourceExhaustedError("no room"))
                else:
                    self.core.staged(stage)
            elif stage.source.is_gone or not self.core.wants(stage):
                self.core.refused(stage.update, None)
            else:
                self._later(0.2, got)

        self._soon(got)

    def _make(self, order: Order) -> None:
        """Make the change that is here, or fail."""
        memory, random, stage = self.memory, self.world.random, self.core.stage
        assert stage is not None
        if random.random() < self.world.faults.errors / 4:

            def fail() -> None:
                self.core.refused(stage.update, ResourceExhaustedError("no room any more"))
                self.core.changed(memory.look())

            self._later(0.2, fail)
            return
        whole = stage.parent is None
        assert whole or memory.lineage == stage.parent, "the copy's lock guards this"
        step = order.step if whole else stage.step
        memory.begin(step)

        def done() -> None:
            if whole:
                path = self.world.wholes[stage.update]
            else:
                differs = random.random() < self.world.faults.differs
                path = (*memory.path, self._named(stage.update, differs=differs))
                assert stage.update not in ids(memory.path), f"ONCE {path}"
            self.world.note(path)
            memory.change(path, step)
            self._changed()

        self._soon(done)

    def _named(self, update: Fence, *, differs: bool) -> Lineage:
        """Return the name of an update that the copy gets: the digest is of all its updates."""
        if differs:
            self.world.happened["differs"] += 1
        made = repr((self.memory.lineage.digest, *update, self.machine.number if differs else None))
        return Lineage(*update, zlib.crc32(made.encode()))

    def _replace(self, order: Order) -> None:
        """Get another machine's copy, if it still is the one that was ordered."""
        memory, name, wanted = self.memory, order.source, order.lineage
        assert name is not None
        assert wanted is not None

        def ask() -> None:
            source = self.world.machine(name)
            if source is None or not self.world.reach(source, self.machine) or source.frozen:
                self._later(TIMING.lease, self._changed)
            elif source.memory.torn or source.actor is None:
                self._later(0.05, ask)
            elif not same(source.memory.lineage, wanted):
                self._changed()
            else:
                path, step = source.memory.path, source.memory.step
                self._soon(lambda: come(path, step))

        def come(path: Path, step: int) -> None:
            memory.begin(order.step)
            self._soon(lambda: done(path, step))

        def done(path: Path, step: int) -> None:
            memory.change(path, step)
            self.world.happened["replaced"] += 1
            self._changed()

        self._soon(ask)

    def _changed(self) -> None:
        self.core.changed(self.memory.look())
        self.world.check()
