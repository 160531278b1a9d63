"""Parameters over many hosts: machines, owners and chiefs in one thread and simulated time.

The protocol's owner and forwarders are the library's. Each copy of the parameters is the path of
its updates, so that it shows exactly what is in it. At each change the world checks:

    GRAD  Each gradient of a round was computed from exactly the owner's path at the round's step.
    ONCE  No copy has an update twice. No gradient is in two rounds of one line.
    FORK  The copies of living machines are in one line.
    LOST  An update that a chief was told of is in the owner's line, while a machine lives that has
          it, or took part in it.
    SEEN  Workers see no step before its parameters.
    CALL  A chief's call is made once, however often and late it is repeated.

The faults are those of tools/model/copies, which searches the same protocol without code; time,
messages and the library's code are here only. Machines that have come back, or that Ray has
declared dead, may have anything until they are back in line.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING

from helpers.copies.chiefs import Chief
from helpers.copies.faults import Faults, Troubles
from helpers.copies.machines import Machine
from helpers.copies.memory import ids
from helpers.copies.owners import Owner

from shmacc._multihost.rounds import TERM_BITS
from shmacc_simulate.clock import Clock
from shmacc_simulate.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from helpers.copies.actors import Actor
    from helpers.copies.memory import Path

    from shmacc._base.lineage import Lineage
    from shmacc._multihost.messages import BatchKey, Fence, Opened
    from shmacc_simulate.ledger import Gradient


class World:
    """Machines, owners, chiefs; what fails; and what must hold."""

    def __init__(
        self,
        seed: int,
        *,
        machines: int = 3,
        workers: int = 2,
        chiefs: int = 2,
        required: int = 3,
        contributors: bool = True,
        follows: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.after = self.clock.after
        self.faults = faults or Faults()
        self.workers, self.required = workers, required
        self.contributors, self.follows = contributors, follows
        self.trains = True  # False: chiefs ask for no more rounds
        self.identities = itertools.count(1)
        self.happened: Counter[str] = Counter()
        self.listed: set[str] = set()  # the machines that live, by Ray's word
        self.cuts: set[frozenset[Machine]] = set()
        self.shipped: dict[BatchKey, Sequence[Gradient]] = {}
        self.computed_from: dict[int, Path] = {}
        self.paths: dict[Lineage, Path] = {}  # what copies with a lineage have
        self.wholes: dict[Fence, Path] = {}  # what a copy is after a restore
        self.rounds: list[tuple[Owner, int]] = []
        self._rounds_of: dict[int, list[tuple[int, int]]] = {}  # a gradient's updates
        self._told: list[tuple[tuple[int, int], list[tuple[Machine, str]]]] = []
        self.owners: list[Owner] = []
        self.machines: list[Machine] = []
        self.troubles = Troubles(self)
        self.machines += [Machine(self, number) for number in range(machines)]
        self.chiefs = [Chief(self, self.machines[n % machines]) for n in range(chiefs)]
        self._replace_chiefs()

    def __repr__(self) -> str:
        parts = [self.happened, *self.owners[-2:], *self.machines, *self.chiefs, *self.cuts]
        return "\n".join(f"{self.now:.2f} {part}" for part in parts)

    # Time and messages

    @property
    def now(self) -> float:
        return self.clock.now

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        self.clock.run(self.now + seconds, until)

    def reach(self, one: Machine, other: Machine) -> bool:
        """Whether messages get from one machine to the other."""
        if one is other:
            return one.up
        together = frozenset({one, other}) not in self.cuts
        return together and all(m.up and not m.cut_off for m in (one, other))

    def send(self, arrive: Callable[[], None], sender: Machine, receiver: Machine) -> None:
        """Send a message; faults may lose, double or delay it. A frozen machine gets it later."""
        name = receiver.name

        def deliver() -> None:
            if receiver.name == name and self.reach(sender, receiver):
                arrive()

        for _ in range(2 if self.random.random() < self.faults.double else 1):
            if self.random.random() >= self.faults.drop and self.reach(sender, receiver):
                late = self.random.random() < self.faults.late
                delay = self.random.uniform(0.3, 3.0) if late else self.random.uniform(0.0005, 0.01)
                receiver.after(delay, deliver)

    def machine(self, name: str) -> Machine | None:
        """Return the machine that has this name now."""
        return next((m for m in self.machines if m.name == name and m.up), None)

    # Owners

    @property
    def registered(self) -> Owner | None:
        """The owner that Ray knows; None: it knows that there is none."""
        found = self.owners[-1] if self.owners else None
        return None if found is None or found.known_dead else found

    def owner_for(self, machine: Machine) -> Owner | None:
        """Return the owner that a chief finds, or makes."""
        if self.registered is None and not machine.zombie and not machine.cut_off:
            clock = int((1000 + self.now + self.random.uniform(-2, 2)) * 1000)  # clocks differ
            term = (clock << TERM_BITS) + self.random.getrandbits(TERM_BITS)
            self.owners.append(Owner(self, machine, term))
            self.happened["owners made"] += 1
        return self.registered

    def owners_heard_by(self, actor: Actor) -> list[Owner]:
        """Return the owners that a report reaches: perhaps also an earlier one that still lives."""
        also = [
            owner
            for owner in (self.owners if self.faults.zombies else [])
            if owner.alive and actor.ears.setdefault(owner, self.random.random() < 0.3)
        ]
        return list(dict.fromkeys([*also, *([] if actor.owner is None else [actor.owner])]))

    # What must hold

    def note(self, path: Path) -> None:
        """Note the path of a copy: its lineage says it whole."""
        assert self.paths.setdefault(path[-1], path) == path, f"two copies are {path[-1]}"

    def content(self, block: Opened) -> list[Gradient]:
        return [g for member in block.members for g in self.shipped.get(member.key, ())]

    def consumed(self, owner: Owner, block: Opened, *, is_updated: bool) -> None:
        """Check a round that is consumed."""
        ledger = Ledger(self.required)
        ledger.shipped = dict(self.shipped)
        update = owner.line[-1][:2]
        for gradient in ledger.consume(block, owner.step):
            before = self._rounds_of.setdefault(gradient.identity, [])
            twice = set(before) & set(ids(owner.line))
            assert not twice, f"ONCE {gradient} is in {update}, and before in {twice}"
            if is_updated:
                before.append(update)
        self.happened["rounds"] += 1
        self.rounds.append((owner, owner.step))

    def was_told(self, update: tuple[int, int], names: list[str]) -> None:
        """Note that a chief may be told of an update that these hosts have."""
        if all(update != other for other, _ in self._told):
            who = [(m, name) for name in names if (m := self.machine(name)) is not None]
            self._told.append((update, who))

    def check(self) -> None:
        """Check what must hold at each instant."""
        owner = self.registered
        leads = owner is not None and owner.leads and owner.alive
        if owner is not None and leads:
            for machine in self.machines:
                if machine.returned and self._is_in_line(machine, owner):
                    machine.returned = False
        living = [m for m in self.machines if m.up and not m.zombie]
        right = [m for m in living if not m.returned and not m.memory.torn]
        paths = sorted({ids(m.memory.path) for m in right}, key=len)
        for shorter, longer in itertools.pairwise(paths):
            assert longer[: len(shorter)] == shorter, f"FORK {shorter} {longer}"
        for machine in right:
            memory = machine.memory
            if memory.needs is not None and memory.segment.step >= memory.begun:
                assert memory.needs in ids(memory.path), f"SEEN {machine} needs {memory.needs}"
        if owner is None or not leads:
            return
        line = set(ids(owner.line))
        for update, who in self._told:
            if update not in line:
                has = [m for m in living if update in ids(m.memory.path) and not m.returned]
                had = [m for m, name in who if m.name == name and m in living]
                assert not has + had, f"LOST {update}: {has} {had}, owner at {owner.line[-3:]}"

    @staticmethod
    def _is_in_line(machine: Machine, owner: Owner) -> bool:
        memory = machine.memory
        if not machine.up or machine.zombie or memory.torn or not memory.path:
            return False
        in_line = memory.path == owner.line[: len(memory.path)]
        seen = memory.needs in ids(memory.path) or memory.segment.step < memory.begun
        return in_line and seen and memory.promise == owner.fence.term

    def are_in_line(self) -> bool:
        """Whether all machines have the owner's copy and step, and count again."""
        owner = self.registered
        return owner is not None and all(
            m.up
            and not m.zombie
            and m.memory.path == owner.line
            and m.memory.segment.step == owner.step
            and not m.memory.torn
            and m.memory.begun <= owner.step
            for m in self.machines
        )

    def _replace_chiefs(self) -> None:
        """Start another chief for each that is dead, perhaps on another machine."""
        able = [m for m in self.machines if m.up and not m.zombie]
        for number, chief in enumerate(self.chiefs):
            if (not chief.alive or chief.machine.zombie) and able:
                self.chiefs[number] = Chief(self, self.random.choice(able))
        self.after(0.5, self._replace_chiefs)
