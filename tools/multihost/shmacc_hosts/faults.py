"""Faults: what can go wrong in a world. The beginning and the end of each fault are steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmacc._multihost.messages import NotReady
from shmacc.errors import FailedPreconditionError
from shmacc_hosts.machine import Worker
from shmacc_hosts.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc._multihost.messages import Fence

CHOICES = {"raise", "restore", "differs", "refuse", "lease", "withdraw", "clock"}
"""Faults that are steps of other parts: of a chief, a machine, or an owner (the end of a lease).

"clock" means that a new owner's clock is behind the clocks of all earlier owners.
"""

EVENTS = (
    *("actor", "silent", "frozen", "lost", "zombie", "pair", "owner", "chief", "advance"),
    *("shards", "same_step", "move", "twin"),
)
"""All other faults. They strike a machine, a pair of machines, the owner, a chief, or a worker."""


class Faults:
    """The faults of a world.

    Attributes:
        last: Whether the present faults last for ever.
        dropped: The fences at which `advance_step` has dropped gradients.
    """

    part, number = "faults", 0

    def __init__(self, world: Any) -> None:
        self.world = world
        self.last = False
        self.dropped: frozenset[Fence | None] = frozenset()

    def due(self, _: Step) -> float:
        return 0.0

    def steps(self) -> Iterator[Step]:
        """Yield the steps by which the present faults can end, or go on."""
        world = self.world
        if self.last:
            return
        for machine in world.machines:
            found = []
            if not machine.up:
                found = ["unlist"] if machine.name in world.listed else ["back", "back_empty"]
            elif machine.zombie:
                found = ["end_zombie"]
            elif machine.cut_off:
                found = ["join", "declare"] if world.timeless else ["join"]
            for what in [*found, *(["thaw"] if machine.frozen else [])]:
                yield Step("faults", 0, what, machine.number)
        for pair in sorted(world.cuts):
            yield Step("faults", 0, "mend", pair)

    def strikes(self) -> Iterator[Step]:
        """Yield each fault that can strike now."""
        world = self.world
        right = [m for m in world.machines if m.up and not (m.zombie or m.cut_off or m.frozen)]
        numbers = [machine.number for machine in right]
        leads = [o for o in world.owners[-1:] if o.leads and not o.machine.frozen]
        acts = [m for m in world.machines if m.core and (m.core._order or not world.timeless)]
        able: dict[str, list[Any]] = {
            **dict.fromkeys(("silent", "frozen", "lost", "shards"), numbers),
            "zombie": [] if world.timeless else numbers,  # in a search, "declare" does the same
            "actor": [machine.number for machine in acts],
            "pair": [
                (a, b) for b in numbers for a in numbers if a < b and (a, b) not in world.cuts
            ],
            "owner": [owner.number for owner in world.owners if owner.alive],
            "chief": [
                c.number for c in world.chiefs if c.alive and (c.block or not world.timeless)
            ],
            "advance": [owner.number for owner in leads if owner.is_ready],
            "same_step": [o.number for o in leads if not isinstance(o.answer(""), NotReady)],
        }
        able["move"] = able["twin"] = [
            (m.number, place, to)  # from this machine, and the worker's place there
            for m in right
            for place, worker in enumerate(m.workers)
            for to in numbers
            if worker.contributor is not None and to != m.number
        ]  # fmt: skip
        for kind in EVENTS:
            if world.may(kind):
                for arg in able[kind]:
                    yield Step("faults", 0, kind, arg)

    def _failed(self, kind: str) -> Any:
        self.world.fails += 1
        self.world.happened[kind] += 1
        return self.world

    def actor(self, number: int) -> None:
        self._failed("actor").machines[number].end_actor()

    def silent(self, number: int) -> None:
        """Cut a machine off from all other machines."""
        self._failed("silent").machines[number].cut_off = True

    def frozen(self, number: int) -> None:
        self._failed("frozen").machines[number].frozen = True

    def lost(self, number: int) -> None:
        """Lose a machine. In a timeless world Ray notices this at once, else later."""
        world = self._failed("lost")
        self.end_zombie(number)
        if world.timeless:
            self.unlist(number)

    def zombie(self, number: int) -> None:
        """Have Ray declare a machine dead; its processes go on for a while."""
        self._failed("zombie")
        self.declare(number)

    def pair(self, pair: tuple[int, int]) -> None:
        """Cut two machines off from each other."""
        self._failed("pair").cuts |= {pair}

    def owner(self, number: int) -> None:
        owner = self._failed("owner").owners[number]
        owner.die()
        owner.known_dead |= self.world.timeless

    def chief(self, number: int) -> None:
        chief = self._failed("chief").chiefs[number]
        chief.is_dead = True
        if self.world.timeless:
            chief.replaced()

    def advance(self, number: int) -> None:
        """Move the step on without a round."""
        owner = self._failed("advance").owners[number]
        self.dropped |= {owner.fence, None}  # None: a host has not had its first order
        try:
            owner.advance_step(owner.step + 1, self.world.now)
        except FailedPreconditionError:
            return  # the group's copies are just being changed
        owner.settle()

    def same_step(self, number: int) -> None:
        """Call `set_global_step` with the present step."""
        owner = self._failed("same_step").owners[number]
        owner.set_global_step(owner.step, f"set {self.world.next_number()}", self.world.now)

    def shards(self, number: int) -> None:
        """Lose the pieces of a machine's shards."""
        self._failed("shards").machines[number].shards = {}

    def move(self, what: tuple[int, int, int]) -> None:
        """End a worker, and start it on another machine."""
        self.twin(what)
        self.world.machines[what[0]].workers.pop(what[1])

    def twin(self, what: tuple[int, int, int]) -> None:
        """Start a worker on another machine, too, so that it runs twice."""
        machines = self._failed("moved").machines
        machines[what[2]].workers.append(Worker(machines[what[0]].workers[what[1]].contributor))

    # Steps that continue or end a fault

    def thaw(self, number: int) -> None:
        self.world.machines[number].frozen = False

    def join(self, number: int) -> None:
        self.world.machines[number].cut_off = False

    def mend(self, pair: tuple[int, int]) -> None:
        self.world.cuts -= {pair}

    def declare(self, number: int) -> None:
        """Have Ray declare a running machine dead."""
        machine = self.world.machines[number]
        machine.zombie, machine.cut_off, machine.returned = True, False, True
        self.unlist(number)

    def unlist(self, number: int) -> None:
        """Have Ray strike a machine off its list."""
        world, machine = self.world, self.world.machines[number]
        world.listed -= {machine.name}
        for owner in world.owners:
            owner.known_dead |= owner.machine is machine

    def end_zombie(self, number: int) -> None:
        """End the processes of a machine, whose memory stays."""
        world, machine = self.world, self.world.machines[number]
        machine.lose(memory=False)
        world.cuts = frozenset(pair for pair in world.cuts if number not in pair)
        for owner in world.owners:
            if owner.machine is machine:
                owner.die()

    def back(self, number: int) -> None:
        """Restart a machine under another name, with its memory."""
        machine, world = self.world.machines[number], self.world
        before = machine.name
        machine.boot()
        for owner in world.owners if world.timeless else ():
            if (host := owner._hosts.find(before)) is not None:
                host.heard = -1e9  # the machine does not report under its old name any more
                owner.tick(world.now)
        for chief in world.chiefs if world.timeless else ():
            if chief.machine is machine:
                chief.replaced()

    def back_empty(self, number: int) -> None:
        """Restart a machine under another name, with its memory empty."""
        self.world.machines[number].lose(memory=True)
        self.back(number)

    def heal(self) -> None:
        """End all present faults, and allow no new ones."""
        world = self.world
        world.kinds, world.cuts, self.last = frozenset(), frozenset(), False
        for machine in world.machines:
            machine.cut_off = machine.frozen = False
