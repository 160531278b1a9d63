"""Simulated machines: memory, workers, and an actor that drives the library's state machines."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, cast

from shmacc._base.lineage import Lineage
from shmacc._multihost.changes import same
from shmacc._multihost.forwarder import Do, ForwarderCore, Get
from shmacc._multihost.messages import BatchKey, Refusal
from shmacc._multihost.shard import ShardCore
from shmacc.errors import ResourceExhaustedError
from shmacc_hosts.memory import TORN, Gradient, Memory, Segment, ids
from shmacc_hosts.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc._multihost.forwarder import Action
    from shmacc._multihost.messages import Order, Report, Stage

NO_ROOM = ResourceExhaustedError("no room")
_MOVES = {Do.CONSUME, Do.RESET, Do.SET_STEP}


class Worker:
    """A worker of a machine. It outlives Ray's processes there, but not the machine's memory.

    Attributes:
        gradient: The gradient that it computes; None: next it reads the step and the copy.
        waits: Whether the gradient was applied, and the worker waits for the next step.
    """

    def __init__(self, contributor: int | None) -> None:
        self.contributor = contributor
        self.gradient: Gradient | None = None
        self.waits = False


class Machine:
    """A machine. Each start of Ray gives it another name.

    Attributes:
        up: Whether Ray's processes run.
        frozen: Whether all its processes are stopped for a while.
        cut_off: Whether no message reaches it or leaves it.
        zombie: Whether Ray has declared it dead, though its processes run.
        returned: Whether it was dead, or declared dead, and does not follow the owner again yet.
        core: The `ForwarderCore` of its actor; None: it has no actor.
        serial: The number of the last order.
        doing: The change of the copy that the forwarder wants, and the order; None: no change.
        coming: Path and step of the copy that is being written; None: no copy is being written.
        shards: The machine's shards; they die with the actor.
        sent: The grant that it ships for, and the shards that have their pieces.
        polls: How many reports have no answer yet.
    """

    part = "machine"

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        self.boots = 0
        self.memory = Memory(Segment(step=-1 if world.copies else 0))
        who = range(number * world.workers, (number + 1) * world.workers)
        self.workers = [Worker(each if world.contributors else None) for each in who]
        self.frozen = self.cut_off = self.returned = False
        self.end_actor()
        self.boot()

    @property
    def name(self) -> str:
        return f"host{self.number}.{self.boots}"

    def __repr__(self) -> str:
        memory, core = self.memory, self.core
        names = "up", "frozen", "cut_off", "zombie", "returned"
        flags = [name for name in names if getattr(self, name)]
        at = core and (core.fence, core._promise, core._held_for)
        return (
            f"<{self.name} {flags} {memory.lineage} of {len(memory.path)} begun={memory.begun} "
            f"torn={memory.torn} segment={memory.segment} actor={at} {self.doing} {self.coming}>"
        )

    # Processes

    def boot(self) -> None:
        """Start Ray's processes, under a new name."""
        self.boots += 1
        self.up, self.zombie = True, False
        self.world.listed |= {self.name}

    def lose(self, *, memory: bool) -> None:
        """End Ray's processes; if the memory is lost, too, restart the workers."""
        self.up = self.frozen = self.cut_off = False
        self.returned = True
        self.end_actor()
        if memory:
            self.memory = Memory(Segment(step=-1 if self.world.copies else 0))
            self.workers = [Worker(worker.contributor) for worker in self.workers]

    def end_actor(self) -> None:
        """End the actor, its shards, its changes of the copy, and its round of the segment."""
        self.core: Any = None
        self.incarnation, self.serial, self.polls = 0, -1, 0
        self.doing: Any = None
        self.coming: Any = None
        self.shards: dict[int, ShardCore[tuple[Gradient, ...]]] = {}
        self.sent: tuple[int, frozenset[int]] = (-1, frozenset())
        self.memory.segment.held = False

    # Steps

    def steps(self) -> Iterator[Step]:
        for what, arg in () if self.frozen else self._steps():
            yield Step("machine", self.number, what, arg)

    def _steps(self) -> Iterator[tuple[str, Any]]:
        for number, worker in enumerate(self.workers):
            if (what := self._step_of(worker)) is not None:
                yield what, number
        world, owner = self.world, self.world.registered
        if self.core is None:
            if self.up and owner and owner.alive and world.reach(self, owner.machine):
                yield "start", None
            return
        action = self.core.next_action()
        for owner in world.owners if world.timeless or not action or action[0] is Do.SHIP else ():
            if owner.alive and self._has_word_for(owner):
                yield "report", owner.number
        if action is not None and self._can_do(action):
            yield "act", action[0].name
        for what in self._steps_of_change() if self.doing else ():
            yield what, self.doing[0].name

    def due(self, step: Step) -> float:
        if step.what != "report":
            return 0.0
        if self.core is None:
            return math.inf  # an owner has just ended the actor
        if not (self.polls or self.core.has_answer_to_come):
            return 0.0
        return cast("float", self.core.report_due(self.world.now))

    def start(self, _: None = None) -> None:
        owner, memory, world = self.world.registered, self.memory, self.world
        assert owner is not None
        self.incarnation = owner.enrol(self.name, world.now)
        known = memory.look() if world.copies else None, memory.promise, memory.copies
        self.core = ForwarderCore(self.name, self.incarnation, world.timing, *known)
        owner.settle()
        self._settle()

    # Reports and orders

    def _has_word_for(self, owner: Any) -> bool:
        """Whether a report reaches the owner, and either side would learn something new."""
        world, core = self.world, self.core
        if owner is not world.registered and not world.hears_zombies:
            return False
        if not world.timeless:
            return True
        if not world.reach(self, owner.machine):
            return False
        host, order = owner._hosts.find(self.name), core._order
        last: Report | None = core._reported
        if host is None or host.lost or last is None or host.report is not last or order is None:
            return True
        is_heard = (order.term, order.serial) == (owner.fence.term, owner.serial)
        return not is_heard or core._make(last.number) != last

    def report(self, owner: int) -> None:
        """Send a report to an owner, which answers with an order."""
        self.polls += 1
        world, report = self.world, self.core.report(self.world.now)
        world.send("report", self, world.owners[owner].machine, owner, self.serial, report)

    def receive(self, order: Order) -> None:
        if self.core is None or order.incarnation != self.incarnation:
            return
        self.polls = max(0, self.polls - 1)
        if self.core.may_follow(order):
            self.memory.promise = max(self.memory.promise, order.term)
            self.core.receive(order)
            self.memory.copies, self.serial = self.core.copies, order.serial
        self._settle()

    def _settle(self) -> None:
        """Show the core the segment, and begin the change of the copy that the core wants."""
        core, segment = self.core, self.memory.segment
        if core is None:
            return
        core.observe(segment.step, len(segment.content), finished=segment.finished)
        self.doing = self.doing or core.next_change()
        if self.world.timeless:
            self._do_at_once()

    def _do_at_once(self) -> None:
        """In a search, do at once what has the same effect at any time: this saves states."""
        action = self.core.next_action()
        if action and action[0] not in _MOVES and self._can_do(action):
            self.act()
        elif self.doing and self.doing[0] is Get.STAGE:
            for what in self._steps_of_change():
                if what == "unstage" or not self.world.may("refuse"):
                    getattr(self, what)()
                    return

    # The segment

    def act(self, _: object = None) -> None:
        core, memory, action = self.core, self.memory, self.core.next_action()
        match action:
            case Do.HOLD, _:
                core.held(memory.segment.hold(len(core.shard_hosts)), self.world.now)
            case Do.SHIP, grant:
                self._ship(grant)
            case Do.STOP, _:
                self.end_actor()
            case do, _:
                if do in _MOVES and core._order.lineage:
                    memory.needs = core._order.lineage[:2]
                before = memory.segment.step
                memory.segment.follow(core, action)
                if memory.segment.step > before:
                    self.world.moved_at = self.world.now
        self._settle()

    def _can_do(self, action: Action) -> bool:
        """Whether an action has an effect. Shipping has none while its shards stay out of reach."""
        if action[0] is not Do.SHIP:
            return True
        left, near, core = *self._pieces(action[1]), self.core
        unreached = {core.shard_hosts[shard] for shard in left - near}
        return bool(near) or not left or unreached != core._unreached

    def _pieces(self, grant: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return the shards that lack their pieces, and those of them that are within reach."""
        world, places, content = self.world, self.core.shard_hosts, self.memory.segment.content
        sent = self.sent[1] if self.sent[0] == grant else frozenset()
        left = frozenset(each.identity % len(places) for each in content if places) - sent
        machines = {shard: world.machine(places[shard]) for shard in left}
        awake = {shard: m for shard, m in machines.items() if m and m.core and not m.frozen}
        return left, frozenset(shard for shard, m in awake.items() if world.reach(self, m))

    def _ship(self, grant: int) -> None:
        """Send pieces to the shards that are within reach."""
        world, core, content = self.world, self.core, tuple(self.memory.segment.content)
        key, places = BatchKey(self.name, self.incarnation, grant), core.shard_hosts
        world.ledger.shipped[key] = content
        left, near = self._pieces(grant)
        for shard in near:
            piece = tuple(each for each in content if each.identity % len(places) == shard)
            to: Any = world.machine(places[shard])
            to.shards.setdefault(shard, ShardCore()).stage(core.fence, key, piece)
        self.sent = grant, near | (self.sent[1] if self.sent[0] == grant else frozenset())
        core.shipped(grant, frozenset(places[shard] for shard in left - near))

    # The copy

    @property
    def _change(self) -> Stage:
        """The change that the machine is getting or making."""
        get, order = self.doing
        return cast("Stage", order.stage if get is Get.STAGE else self.core.stage)

    def _steps_of_change(self) -> list[str]:
        world, (get, order) = self.world, self.doing
        refuses = world.may("refuse")
        if get is Get.STAGE:
            if world.chief_of(self._change, self) is not None:
                return ["stage", "refuse"] if refuses else ["stage"]
            is_over = world.maker(self._change) is None or not self.core.wants(self._change)
            return ["unstage"] if is_over else []
        if self.coming is not None:
            differs = get is Get.MAKE and self._change.parent is not None and world.may("differs")
            return ["made", "made_otherwise"] if differs else ["made"]
        if get is Get.MAKE:
            return ["make", "cannot_make"] if refuses else ["make"]
        if (source := self._source(order)) is None:
            return ["cannot_replace"]
        return ["catch_up", "replace"] if self._follows(source) else ["replace"]

    def _follows(self, source: Machine) -> bool:
        """Whether only updates, no restore, have made the source's copy differ from this one."""
        own, path = self.memory.path, source.memory.path
        made = path[len(own) :]
        is_parent = bool(own and made) and path[: len(own)] == own
        return is_parent and all(each[:2] not in self.world.wholes for each in made)

    def catch_up(self, _: object) -> None:
        """Begin to make the next update that this copy lacks."""
        source: Any = self._source(self.doing[1])
        path = source.memory.path[: len(self.memory.path) + 1]
        self.coming = path, self.world.steps[path[-1]]
        self.memory.begin(max(self.coming[1], self.doing[1].step))

    def _done(self, method: str, *args: Any) -> None:
        self.doing = self.coming = None
        getattr(self.core, method)(*args)
        self._settle()

    def stage(self, _: object = None) -> None:
        self._done("staged", self._change)

    def unstage(self, _: object = None) -> None:
        self._done("refused", self._change.update, None)

    def refuse(self, _: object) -> None:
        self.world.fails += 1
        self._done("refused", self._change.update, NO_ROOM)

    def make(self, _: object) -> None:
        memory, stage = self.memory, self._change
        if stage.parent is None:
            self.coming = self.world.wholes[stage.update], self.doing[1].step
        else:
            assert memory.lineage == stage.parent, "PARENT: the copy's lock guards this"
            assert stage.update not in ids(memory.path), f"ONCE {stage} in {memory.path}"
            digest = zlib.crc32(repr((memory.lineage.digest, *stage.update)).encode())
            self.coming = (*memory.path, Lineage(*stage.update, digest)), stage.step
        memory.begin(self.coming[1])

    def made(self, _: object) -> None:
        self.world.note(*self.coming)
        self.memory.change(*self.coming)
        self._done("changed", self.memory.look())

    def made_otherwise(self, _: object) -> None:
        path, step = self.coming
        self.world.fails += 1
        self.coming = (*path[:-1], path[-1]._replace(digest=self.number + 1)), step
        self.made(None)

    def cannot_make(self, _: object) -> None:
        self.world.fails += 1
        self._done("changed", self.memory.look(), Refusal(self._change.update, NO_ROOM))

    def _source(self, order: Order) -> Machine | None:
        """Return the machine that the order names as source, if its copy can be got now."""
        world, source = self.world, self.world.machine(order.source or "")
        if source is None or source.frozen or source.core is None or source.memory.torn:
            return None
        assert order.lineage is not None
        near = world.reach(source, self) and same(source.memory.lineage, order.lineage)
        return source if near else None

    def replace(self, _: object) -> None:
        """Get the source's whole copy, and begin to write it."""
        source: Any = self._source(self.doing[1])
        self.core.gets_whole()
        self.coming = source.memory.path, source.memory.step
        self.memory.begin(self.doing[1].step)

    def cannot_replace(self, _: object) -> None:
        self._done("changed", self.memory.look())

    # Workers

    def _step_of(self, worker: Worker) -> str | None:
        """Return a worker's next step, "read" or "apply"; None: it must wait."""
        world, segment, gradient = self.world, self.memory.segment, worker.gradient
        if gradient is None:
            is_over = world.last_step is not None and segment.step >= world.last_step
            is_refused = world.timeless and (segment.content or segment.held)
            return None if segment.step < 0 or is_over or is_refused else "read"
        if worker.waits:
            return None if segment.step == gradient.local_step else "read"
        return None if segment.held and gradient.local_step > segment.step else "apply"

    def read(self, number: int) -> None:
        worker, memory, identity = self.workers[number], self.memory, self.world.next_number()
        read, step = TORN if memory.torn else memory.path, memory.segment.step
        gradient = Gradient(identity, step, worker.contributor, identity % 3 + 1, read)
        worker.gradient, worker.waits = gradient, False

    def apply(self, number: int) -> None:
        worker, world, segment = self.workers[number], self.world, self.memory.segment
        gradient, before = worker.gradient, len(segment.content)
        assert gradient is not None
        segment.apply(gradient)
        if len(segment.content) > before:
            world.applied_at = world.now
            world.accepted[gradient.identity] = gradient, self.core and self.core.fence
        worker.waits = world.follows
        if not world.follows:
            worker.gradient = None
        self._settle()
