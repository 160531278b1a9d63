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

import contextlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.multihost_actors import TIMING
from helpers.multihost_chiefs import Chief
from helpers.multihost_machines import Machine, ids

from shmacc._base.lineage import Lineage
from shmacc._multihost.messages import Told
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.rounds import TERM_BITS
from shmacc.errors import FailedPreconditionError
from shmacc_simulate.ledger import Ledger
from shmacc_simulate.world import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from helpers.multihost_machines import Actor, Path

    from shmacc._multihost.copies import Copies
    from shmacc._multihost.hosts import Grant
    from shmacc._multihost.messages import BatchKey, Fence, Opened, Report
    from shmacc_simulate.ledger import Gradient

DECLARED = 5.0
"""Seconds until Ray strikes a dead machine off its list: as the leases, less than in reality."""


@dataclass
class Faults:
    """How much goes wrong: the first are probabilities, from `actors` on events a second.

    What has a rate also strikes right after the owner has changed something, with the probability
    `strikes`: then the least is finished.
    """

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    slow: float = 0.0  # to get a change takes longer than a lease
    errors: float = 0.0  # a machine cannot make a change
    differs: float = 0.0  # a machine computes something else
    chiefs: float = 0.0  # the chief dies in its block
    raises: float = 0.0
    restores: float = 0.0  # a chief restores a checkpoint before its round
    strikes: float = 0.05
    actors: float = 0.0
    freezes: float = 0.0
    islands: float = 0.0  # a machine is cut off from all
    pairs: float = 0.0  # two machines are cut off from each other
    reboots: float = 0.0  # a machine comes back with its memory
    losses: float = 0.0  # or without
    owners: float = 0.0
    zombies: float = 0.0  # Ray declares a machine dead that goes on
    advances: float = 0.0


class Owner(OwnerCore):
    """An owner on a machine. It shows the world its line, its rounds, and what it tells chiefs.

    Attributes:
        line: The path that its lineage names.
        updates: The update of each call that it has committed.
        opened: The line at which each ticket's block was opened.
        known_dead: Whether Ray says that it is dead.
    """

    def __init__(self, world: World, machine: Machine, term: int) -> None:
        super().__init__(term, None, TIMING, shards=2, copies=True)
        self.world, self.machine = world, machine
        self.line: Path = ()
        self.updates: dict[str, Fence] = {}
        self.opened: dict[str, Path] = {}
        self.alive, self.known_dead = True, False
        self._boot = machine.boots
        self._unheard: dict[str, float] = {}
        self._opened_at: Path = ()  # the line when the last block was opened
        self._run()
        self._tend()

    def __repr__(self) -> str:
        return (
            f"<owner {self.fence} on {self.machine.name} step={self.step} ready={self.is_ready} "
            f"{self.copies and (self.copies.lineage, self.copies.change)} block={self.block} "
            f"grant={self._grant} {self.hosts()} {self.counters}>"
        )

    @property
    def leads(self) -> bool:
        return not self.is_learning

    def die(self) -> None:
        """End; Ray sees it soon, if it sees the machine."""
        if self.alive:
            self.alive = False
            if self.machine.up:
                self.world.after(self.world.random.uniform(0.01, 0.3), self.declare_dead)

    def declare_dead(self) -> None:
        self.known_dead = True

    def _run(self) -> None:
        if self.alive:
            self.tick(self.world.now)
            self.settle()
            self.machine.after(0.05, self._run)

    def _tend(self) -> None:
        """Look which machines Ray lists, and end actors that do not answer."""
        if not self.alive:
            return
        now, world = self.world.now, self.world
        self.list_hosts(frozenset(world.listed), now)
        self.settle()
        self._unheard = {name: self._unheard.get(name, now) for name in sorted(self.unanswered())}
        for name, since in self._unheard.items():
            machine = world.machine(name)
            if now - since > 2.0 and machine is not None and not machine.cut_off:
                self._unheard[name] = now
                machine.after(0, machine.kill_actor)
        self.machine.after(0.3, self._tend)

    def hear_actor(self, report: Report, actor: Actor) -> None:
        if self.alive:
            self.report(report, self.world.now)
            self.settle()
            self._answer(actor)

    def settle(self) -> None:
        """Do what the driver does after each event."""
        if self.has_resigned:
            self.world.happened["resigned"] += 1
            self.die()
        elif self.serial != self._settled:
            self._settled = self.serial
            for machine in self.world.machines:
                actor = machine.actor
                mine = actor is not None and actor.owner is self
                if actor is not None and mine and self.has_news(machine.name, actor.serial):
                    self._answer(actor)
            self.world.check()

    _settled = -1

    def _answer(self, actor: Actor) -> None:
        if self.alive:
            order = self.order(actor.machine.name, actor.incarnation)
            self.world.send(lambda: actor.receive(order), self.machine, actor.machine)

    # What the world looks at

    def _changed(self) -> None:
        super()._changed()
        if self.world.random.random() < self.world.faults.strikes:
            self.world.strike()

    def _tend_copies(self, copies: Copies, now: float) -> None:
        change = copies.change
        super()._tend_copies(copies, now)
        self._follow_line(copies)
        if change is not None and isinstance(copies.answered(change.call), Told):
            living = [host for host in self._hosts if not host.lost]
            could = [h.name for h in living if self._can_make(h.report, change.stage.update)]
            self.world.was_told(change.stage.update, could)

    @staticmethod
    def _can_make(report: Report | None, update: Fence) -> bool:
        """Whether a machine has made an update, or has it staged: chiefs are told after that."""
        if report is None or report.copy is None:
            return False
        refused = report.refused is not None and report.refused.update == update
        return update in {report.copy.lineage[:2], None if refused else report.staged}

    def _follow_line(self, copies: Copies) -> None:
        """Find the path that the lineage names now."""
        lineage, change = copies.lineage, copies.change
        if lineage is None:
            self.line = ()
        elif self.line and self.line[-1][:2] == lineage[:2]:
            self.line = (*self.line[:-1], lineage)  # its digest is known now
        elif change is not None and change.committed and change.stage.update == lineage[:2]:
            self.line = (*self.line, lineage)
            assert change.call not in self.updates, f"CALL {change} twice"
            self.updates[change.call] = change.stage.update
            if change.is_whole:
                self.world.wholes[change.stage.update] = self.line
        else:
            self.line = self.world.paths[lineage]

    def _close_grant(self, grant: Grant, now: float) -> None:
        super()._close_grant(grant, now)
        if self.block is None:
            return
        self._opened_at = self.opened[self._block_ticket] = self.line
        for gradient in self.world.content(self.block):
            read = self.world.computed_from[gradient.identity]
            assert read == self.line, f"GRAD {gradient} of {read[-1:]} in a round of {self.line}"

    def _consume_block(self) -> None:
        if self.block is not None:
            is_updated = ids(self.line) != ids(self._opened_at)
            self.world.consumed(self, self.block, is_updated=is_updated)
        super()._consume_block()

    def _later_term(self, term: int) -> int:  # type: ignore[override]
        return ((term >> TERM_BITS) + 1 << TERM_BITS) + self.world.random.getrandbits(TERM_BITS)


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
        self.machines += [Machine(self, number) for number in range(machines)]
        self._chiefs = [Chief(self, self.machines[n % machines]) for n in range(chiefs)]
        self._replace_chiefs()
        self._schedule_faults()

    def __repr__(self) -> str:
        parts = [self.happened, *self.owners[-2:], *self.machines, *self._chiefs, *self.cuts]
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
            m.memory.path == owner.line
            and m.memory.segment.step == owner.step
            and not m.memory.torn
            and m.memory.begun <= owner.step
            for m in self.machines
        )

    # Faults

    def heal(self) -> None:
        """Let nothing go wrong from here on, and put everything right."""
        self.faults = Faults()
        self.cuts.clear()
        for machine in self.machines:
            machine.cut_off = False
            machine.thaw()

    def break_one(self) -> None:
        """Freeze a machine for good, or cut it off from a chief's: the others go on without it.

        The owner's machine and those of chiefs stay. Gradients of the others must be enough.
        """
        if self.required > self.workers * (len(self.machines) - 1):
            return
        needed = {chief.machine for chief in self._chiefs}
        needed |= {owner.machine for owner in self.owners[-1:]}
        others = [m for m in self.machines if m not in needed]
        if others and self.random.random() < 0.5:
            self.random.choice(others).frozen = True
        elif others:
            self.cuts.add(frozenset({self._chiefs[0].machine, self.random.choice(others)}))

    @property
    def _events(self) -> dict[str, Callable[[Machine], object]]:
        return {
            "actors": Machine.kill_actor,
            "freezes": self._freeze,
            "islands": self._cut_off,
            "pairs": self._cut,
            "reboots": lambda machine: self._end(machine, listed=DECLARED, memory=False),
            "losses": lambda machine: self._end(machine, listed=DECLARED, memory=True),
            "owners": lambda _: self._kill_owner(),
            "zombies": self._declare_dead,
            "advances": lambda _: self._advance(),
        }

    def _happen(self, name: str) -> None:
        # The owner's machine more often: what it has done alone is of interest.
        owners = [owner.machine for owner in self.owners[-1:]]
        machine = self.random.choice(self.machines + owners)
        if getattr(self.faults, name) > 0 and machine.up and not machine.zombie:
            self.happened[name] += 1
            self._events[name](machine)

    def _schedule_faults(self) -> None:
        def schedule(name: str) -> None:
            rate = getattr(self.faults, name)
            if rate > 0:
                self.after(self.random.expovariate(rate), lambda: again(name))

        def again(name: str) -> None:
            self._happen(name)
            schedule(name)

        for name in self._events:
            schedule(name)

    def strike(self) -> None:
        """Let one of the kinds of faults happen very soon."""
        kinds = [name for name in self._events if getattr(self.faults, name) > 0]
        if kinds:
            name = self.random.choice(kinds)
            self.after(self.random.uniform(0.0, 0.05), lambda: self._happen(name))

    def _freeze(self, machine: Machine) -> None:
        machine.frozen = True
        self.after(self.random.uniform(0.2, 4.0), machine.thaw)

    def _cut_off(self, machine: Machine) -> None:
        machine.cut_off = True
        self.after(self.random.uniform(0.2, 4.0), lambda: setattr(machine, "cut_off", False))

    def _cut(self, machine: Machine) -> None:
        pair = frozenset({machine, self.random.choice(self.machines)})
        self.cuts.add(pair)
        self.after(self.random.uniform(0.2, 5.0), lambda: self.cuts.discard(pair))

    def _end(self, machine: Machine, *, listed: float, memory: bool) -> None:
        """Lose a machine, which Ray strikes off its list later; it comes back with a new name."""
        name = machine.name
        for owner in [o for o in self.owners if o.machine is machine and o.alive]:
            owner.die()
            self.after(listed, owner.declare_dead)
        machine.lose(memory=memory)
        self.after(listed, lambda: self.listed.discard(name))
        self.after(self.random.uniform(0.3, 2 * DECLARED), machine.boot)

    def _declare_dead(self, machine: Machine) -> None:
        """Have Ray declare a machine dead; its processes go on for a while, then Ray ends them."""
        name = machine.name
        machine.zombie = True
        machine.frozen = self.random.random() < 0.5
        self.listed.discard(name)
        for owner in [o for o in self.owners if o.machine is machine]:
            owner.declare_dead()

        def end() -> None:
            if machine.name == name and machine.up:
                self._end(machine, listed=0.0, memory=False)

        self.after(self.random.uniform(0.0, 2.0), machine.thaw)
        self.after(self.random.uniform(2.0, 5.0), end)

    def _kill_owner(self) -> None:
        if self.owners:
            self.owners[-1].die()

    def _advance(self) -> None:
        owner = self.registered
        if owner is not None and owner.alive and owner.is_ready:
            with contextlib.suppress(FailedPreconditionError):  # the copies are being changed
                owner.advance_step(owner.step + self.random.randint(0, 2), self.now)
                owner.settle()

    def _replace_chiefs(self) -> None:
        """Start another chief for each that is dead, perhaps on another machine."""
        able = [m for m in self.machines if m.up and not m.zombie]
        for number, chief in enumerate(self._chiefs):
            if (not chief.alive or chief.machine.zombie) and able:
                self._chiefs[number] = Chief(self, self.random.choice(able))
        self.after(0.5, self._replace_chiefs)
