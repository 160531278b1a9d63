"""Machines with a copy of parameters, their workers and actors, for `multihost_copies`.

A machine's memory outlives its processes: the copy, the segment, the promise. The copy is the path
of the updates that it has. All else is its actor's, and is lost with it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from helpers.multihost_actors import TIMING

from shmacc._base.lineage import Copy, Lineage
from shmacc._multihost.copies import same
from shmacc._multihost.forwarder import Do, ForwarderCore, Get
from shmacc._multihost.messages import BatchKey
from shmacc.errors import ResourceExhaustedError
from shmacc_simulate.ledger import Gradient, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.multihost_copies import Owner, World

    from shmacc._multihost.messages import Fence, Order, Stage

Path = tuple[Lineage, ...]
NOTHING = Lineage(0, 0)
TORN: Path = (Lineage(-1, 0),)
"""What a worker has read if the copy was just being changed."""


def ids(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the updates of a path, whatever their digests."""
    return tuple(each[:2] for each in path)


@dataclass
class Memory:
    """What a machine keeps, whichever process dies.

    Attributes:
        path: The updates that its copy has.
        begun: The step that the segment must reach before its gradients count.
        step: The parameters' step.
        torn: Whether the copy is being changed, or who changed it has died.
        segment: The segment; its step is -1 until it is made.
        needs: The update that the segment's step was moved for: workers must see it.
        promise: The highest term that the machine's actors have answered.
        copies: How many machines had the line when this one was in it last.
    """

    path: Path = ()
    begun: int = 0
    step: int = 0
    torn: bool = False
    segment: Segment = field(default_factory=lambda: Segment(step=-1))
    needs: tuple[int, int] | None = None
    promise: int = 0
    copies: int = 0

    @property
    def lineage(self) -> Lineage:
        return self.path[-1] if self.path else NOTHING

    def look(self) -> Copy:
        """Return what is known of the copy; half of a change is undone."""
        self.torn = False
        return Copy(self.lineage, self.begun, self.step)

    def begin(self, step: int) -> None:
        """Begin to change the copy. Also if this comes to nothing, the step has been noted."""
        self.begun, self.torn = max(self.begun, step), True

    def change(self, path: Path, step: int) -> None:
        """Commit the change that was begun."""
        self.path, self.step, self.torn = path, step, False


class Machine:
    """A machine. If Ray is started on it again, it has another name.

    Attributes:
        name: Its name as a host.
        up: Whether Ray's processes run.
        frozen: Whether nothing on it runs for a while.
        cut_off: Whether no message reaches it or leaves it.
        zombie: Whether Ray has declared it dead, though its processes run.
        returned: Whether it was dead, and is not back in line yet.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.boots = 0
        self.memory = Memory()
        self.actor: Actor | None = None
        self.workers: list[Worker] = []
        self.up = self.frozen = self.cut_off = self.zombie = self.returned = False
        self._asleep: list[Callable[[], None]] = []
        self.boot()

    @property
    def name(self) -> str:
        return f"host{self.number}.{self.boots}"

    def __repr__(self) -> str:
        memory, actor = self.memory, self.actor
        flags = [f for f in ("up", "frozen", "cut_off", "zombie", "returned") if getattr(self, f)]
        at = None if actor is None else (actor.core.fence, actor.core._getting)
        return (
            f"<{self.name} {flags} {memory.lineage} of {len(memory.path)} begun={memory.begun} "
            f"torn={memory.torn} segment={memory.segment.step} "
            f"({len(memory.segment.content)}, held={memory.segment.held}) actor={at}>"
        )

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` after some time, but not while the machine is frozen."""

        def wake() -> None:
            if self.frozen:
                self._asleep.append(wake)
            else:
                do()

        self.world.after(seconds, wake)

    def thaw(self) -> None:
        self.frozen = False
        asleep, self._asleep = self._asleep, []
        for wake in asleep:
            self.world.after(0, wake)

    def boot(self) -> None:
        """Start Ray's processes; and the workers, unless they have outlived the last ones."""
        self.boots += 1
        self.up, self.zombie = True, False
        self.world.listed.add(self.name)
        self.start_actor()
        if not self.workers:
            self.workers = [Worker(self.world, self) for _ in range(self.world.workers)]

    def lose(self, *, memory: bool) -> None:
        """End Ray's processes, and with the memory also the workers."""
        self.up = self.cut_off = False
        self.returned = True
        self.thaw()
        self.end_actor()
        if memory:
            self.memory = Memory()
            for worker in self.workers:
                worker.alive = False
            self.workers = []

    def end_actor(self) -> None:
        if self.actor is not None:
            self.actor.alive = False
            self.actor = None
        self.memory.segment.held = False  # its round ends with its process

    def kill_actor(self) -> None:
        """End the actor; the owner's driver starts another one."""
        self.end_actor()
        self.after(self.world.random.uniform(0.02, 0.3), self.start_actor)

    def start_actor(self) -> None:
        """Start an actor once there is an owner within reach; its enrolment is never lost."""
        owner = self.world.registered
        if not self.up or self.actor is not None:
            return
        if owner is None or not owner.alive or not self.world.reach(self, owner.machine):
            self.after(0.1, self.start_actor)
        else:
            self.actor = Actor(self, owner)


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

    def _stage(self, stage: Stage) -> None:
        """Get a change from its chief, for as long as it is wanted."""
        random, faults = self.world.random, self.world.faults
        slow = random.random() < faults.slow

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

        self._later(random.uniform(0.5, 2.5) if slow else random.uniform(0.003, 0.06), got)

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

        self._later(random.uniform(0.002, 0.04), done)

    def _named(self, update: Fence, *, differs: bool) -> Lineage:
        """Return the name of an update that the copy gets: the digest is of all its updates."""
        if differs:
            self.world.happened["differs"] += 1
        made = repr((self.memory.lineage.digest, *update, self.machine.number if differs else None))
        return Lineage(*update, zlib.crc32(made.encode()))

    def _replace(self, order: Order) -> None:
        """Get another machine's copy, if it still is the one that was ordered."""
        memory, random = self.memory, self.world.random
        name, wanted = order.source, order.lineage
        assert name is not None
        assert wanted is not None

        def ask() -> None:
            source = self.world.machine(name)
            if source is None or not self.world.reach(source, self.machine) or source.frozen:
                if self.core.follows(order) and source is not None:
                    self._later(0.2, ask)
                else:
                    self.core.changed(memory.look())
            elif source.memory.torn or source.actor is None:
                self._later(0.05, ask)
            elif not same(source.memory.lineage, wanted):
                self.core.changed(memory.look())
            else:
                path, step = source.memory.path, source.memory.step
                self._later(random.uniform(0.002, 0.1), lambda: come(path, step))

        def come(path: Path, step: int) -> None:
            memory.begin(order.step)
            self._later(random.uniform(0.002, 0.1), lambda: done(path, step))

        def done(path: Path, step: int) -> None:
            memory.change(path, step)
            self.world.happened["replaced"] += 1
            self._changed()

        self._later(random.uniform(0.002, 0.03), ask)

    def _changed(self) -> None:
        self.core.changed(self.memory.look())
        self.world.check()


class Worker:
    """Reads the step, then the copy, and applies a gradient that it computes from the copy."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine = world, machine
        self.contributor = next(world.identities) if world.contributors else None
        self.alive = True
        self._work()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        def go_on() -> None:
            if self.alive:
                do()

        self.machine.after(seconds, go_on)

    def _work(self) -> None:
        random, step = self.world.random, self.machine.memory.segment.step
        if step < 0:
            self._after(0.02, self._work)
            return
        weight = random.randint(1, 3)
        gradient = Gradient(next(self.world.identities), step, self.contributor, weight)
        self._after(random.uniform(0.0, 0.01), lambda: self._read(gradient))

    def _read(self, gradient: Gradient) -> None:
        memory = self.machine.memory
        self.world.computed_from[gradient.identity] = TORN if memory.torn else memory.path
        self._after(self.world.random.uniform(0.005, 0.06), lambda: self._apply(gradient))

    def _apply(self, gradient: Gradient) -> None:
        if self.machine.memory.segment.apply(gradient) is None:
            self._after(0.01, lambda: self._apply(gradient))
        elif self.world.follows:
            self._follow(gradient.local_step)
        else:
            self._work()

    def _follow(self, step: int) -> None:
        if self.machine.memory.segment.step == step:
            self._after(0.01, lambda: self._follow(step))
        else:
            self._work()
