"""The world: its parts, their messages, and what must hold at each instant.

    GRAD  Each gradient of a round was computed from exactly the owner's path at the round's step.
    ONCE  No copy has an update twice. No gradient is in two rounds of one line.
    FORK  The copies of living machines are in one line.
    LOST  An update that a chief was told of is in the owner's line, while a machine lives that has
          it, or took part in it.
    SEEN  Workers see no step before its parameters.
    CALL  A chief's call is made once, however often and late it is repeated.
    OWN   A chief's own machine has the copy of its round.

Without parameters, the ledger checks each round. Machines that have come back, or that Ray has
declared dead, may have anything until they are back in line.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmacc._multihost.messages import Timing
from shmacc._multihost.rounds import TERM_BITS
from shmacc_hosts.chief import Chief
from shmacc_hosts.faults import Faults
from shmacc_hosts.machine import Machine
from shmacc_hosts.memory import Ledger, Path, ids
from shmacc_hosts.owner import Owner
from shmacc_hosts.steps import Message

if TYPE_CHECKING:
    from shmacc._base.lineage import Lineage
    from shmacc._multihost.messages import Fence, Opened, Stage
    from shmacc_hosts.memory import Gradient
    from shmacc_hosts.steps import Step

TIMING = Timing(heartbeat=0.1, announce=0.01, lease=1.0, grace=0.3, expiry=5.0, chief_lease=2.0)


@dataclass(eq=False, repr=False, kw_only=True)
class World:
    """Machines, owners and chiefs."""

    hosts: int = 3  # how many machines
    workers: int = 2  # on each machine
    leaders: int = 2  # how many chiefs; they ask for rounds in turn
    required: int = 3  # the gradients that a round requires
    shards: int = 2  # how many; 0: nothing is shipped
    copies: bool = True  # whether the group has parameters
    contributors: bool = True  # whether workers say who they are
    follows: bool = True  # whether workers wait for the next step after each gradient
    last_step: int | None = None  # at which rounds end
    # Whether no time passes: messages arrive at once, and waits end by steps.
    timeless: bool = False
    kinds: frozenset[str] = frozenset()  # of the failures that may happen
    failures: int = 0  # how many in a timeless world
    timing: Timing = TIMING  # how long the parts wait for each other
    size: int = 0  # of an update, in bytes
    parks: float = 0.0  # the seconds that a chief's call waits at the owner
    # Whether an owner that Ray has declared dead may still hear machines.
    hears_zombies: bool = False
    fails: int = 0  # how many failures have happened
    now: float = 0.0
    listed: frozenset[str] = frozenset()  # the machines that live, by Ray's word
    cuts: frozenset[tuple[int, int]] = frozenset()
    known_step: int = 0  # the step that a chief without parameters knows
    applied_at: float = 0.0
    moved_at: float = 0.0
    rounds: int = 0
    told: tuple[tuple[tuple[int, int], tuple[tuple[int, str], ...]], ...] = ()
    messages: list[Message] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    # Gradients, with the fence of their segment.
    accepted: dict[int, tuple[Gradient, Fence | None]] = field(default_factory=dict)
    paths: dict[Lineage, Path] = field(default_factory=dict)  # what copies with a lineage have
    # The steps of these copies; of a restored one, where it was made first.
    steps: dict[Lineage, int] = field(default_factory=dict)
    # What a copy is after a restore, by the restore's name.
    wholes: dict[Fence, Path] = field(default_factory=dict)
    _rounds_of: dict[int, tuple[tuple[int, int] | None, ...]] = field(default_factory=dict)
    _numbers: int = 0

    def __post_init__(self) -> None:
        """Make the parts. The first chief that calls makes the first owner."""
        self.ledger, self.faults = Ledger(self.required), Faults(self)
        self.owners: list[Owner] = []
        self.machines: list[Machine] = []
        self.machines += [Machine(self, number) for number in range(self.hosts)]
        places = [self.machines[n % self.hosts] for n in range(self.leaders)]
        self.chiefs = [Chief(self, n, place, 0) for n, place in enumerate(places)]

    def __repr__(self) -> str:
        parts = [
            self.happened,
            self.cuts,
            self.listed,
            *self.owners[-2:],
            *self.machines,
            *self.chiefs,
        ]
        return "\n".join(f"{self.now:.2f} {part}" for part in parts)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # Steps

    @property
    def parts(self) -> list[Any]:
        return [self.faults, *self.machines, *self.owners, *self.chiefs]

    def part(self, step: Step) -> Any:
        """Return the part that takes a step."""
        if step.part == "faults":
            return self.faults
        return getattr(self, f"{step.part}s")[step.number]

    def do(self, step: Step) -> None:
        getattr(self.part(step), step.what)(step.arg)

    def settle(self) -> None:
        """Take the steps that are the same whenever they are taken: a search has fewer states then.

        Workers forget gradients that will be refused. Chiefs hear the answers to their calls.
        """
        for machine in self.machines:
            segment = machine.memory.segment
            for worker in machine.workers:
                one = worker.gradient
                if one and (one.local_step < segment.step or segment.content or segment.held):
                    worker.gradient, worker.waits = None, False
        while (step := self._next_call()) is not None:
            self.do(step)

    def _next_call(self) -> Step | None:
        for chief in self.chiefs:
            for step in chief.steps():
                if step.what == "find" and self.registered is not None:
                    return step
                if step.what == "call" and chief.waits_at(self.owners[chief.owner or 0]):
                    return step
        return None

    def may(self, kind: str) -> bool:
        """Whether there may be one more failure of this kind."""
        return kind in self.kinds and (not self.timeless or self.fails < self.failures)

    # Messages

    def reach(self, one: Machine, other: Machine) -> bool:
        """Whether messages get from one machine to the other."""
        if one is other:
            return one.up
        pair = min(one.number, other.number), max(one.number, other.number)
        return pair not in self.cuts and all(
            m.up and not m.cut_off and (not m.zombie or self.hears_zombies) for m in (one, other)
        )

    def send(self, kind: str, sender: Machine, receiver: Machine, *data: Any) -> None:
        if self.reach(sender, receiver):
            message = Message(kind, sender.number, receiver.number, receiver.name, data)
            if self.timeless:
                self.deliver(message)
            else:
                self.messages.append(message)

    def deliver(self, message: Message) -> None:
        """Let a message arrive, if it still can."""
        receiver, data = self.machines[message.receiver], message.data
        if receiver.name != message.name or not self.reach(self.machines[message.sender], receiver):
            return
        match message.kind:
            case "order":
                receiver.receive(*data)
            case "report" if self.owners[data[0]].alive:
                self.owners[data[0]].hear_machine(message.sender, *data[1:])
            case "call" if self.owners[data[0]].alive:
                self._call(*data)
            case "answer":
                self.chiefs[data[0]].hear_answer(*data[1:])

    def _call(self, owner: int, number: int, call: tuple[Any, ...]) -> None:
        to, (_, _, method, args, _) = self.owners[owner], call
        if method == "hear":
            to.hear(args[0], self.now)
        else:
            to.call(number, call, self.now + self.parks)

    def may_call(self, chief: Chief, owner: Owner) -> bool:
        """Whether a chief's call can have an effect; if time passes, messages may be lost, too."""
        if not self.timeless:
            return True
        if not owner.alive or not self.reach(chief.machine, owner.machine):
            return False
        # Chiefs do not queue behind one that can be served: that gives fewer states.
        others = [c for c in self.chiefs if c is not chief and c.does == "ask" and c.alive]
        waiting = [c for c in others if owner._queue.find(c.ticket) is not None]
        served = any(
            self.reach(c.machine, owner.machine) and c.machine.memory.path == owner.line
            for c in waiting
        )
        return chief.does != "ask" or not served or chief.waits_at(owner)

    # Who is where

    def machine(self, name: str) -> Machine | None:
        """Return the machine that has this name now."""
        return next((m for m in self.machines if m.name == name and m.up), None)

    def chief_with(self, ticket: str) -> Chief | None:
        """Return the living chief that has a ticket."""
        return next((c for c in self.chiefs if c.ticket == ticket and c.alive), None)

    def maker(self, stage: Stage) -> Chief | None:
        """Return the chief that makes a change; None: it has dropped it."""
        name, call = stage.source
        chief = self.chiefs[name[0]]
        return chief if chief.alive and (chief.name, chief.made) == (name, call) else None

    def chief_of(self, stage: Stage, machine: Machine) -> Chief | None:
        """Return the chief from which a machine can get a change now."""
        chief = self.maker(stage)
        able = chief is not None and not chief.machine.frozen
        return chief if able and chief and self.reach(chief.machine, machine) else None

    @property
    def registered(self) -> Owner | None:
        """The owner that Ray knows; None: it knows that there is none."""
        found = self.owners[-1] if self.owners else None
        return None if found is None or found.known_dead else found

    def find_owner(self, machine: Machine, *, is_behind: bool = False) -> Owner:
        """Return the owner that a chief finds, or makes. Clocks of machines differ."""
        if self.registered is None:
            number = len(self.owners)
            clock = 0 if is_behind else 1
            if not self.timeless:
                clock = int(1e6 + 1e3 * (self.now + (7 * number) % 5 - 2))
            term = (clock << TERM_BITS) + number
            self.owners.append(Owner(self, machine, number, term))
            self.happened["owners made"] += 1
        return self.owners[-1]

    def restored_step(self, chief: Chief) -> int:
        """Return the step of a checkpoint: an earlier one, or a later one."""
        later = chief.life % 2 and not self.timeless
        return self.owners[chief.owner or 0].step + 2 if later else 0

    def end_others(self, contributor: int) -> None:
        """End all workers of a contributor but the latest, as the error of a conflict advises."""
        self.happened["conflicts"] += 1
        having = [(m, w) for m in self.machines for w in m.workers if w.contributor == contributor]
        for machine, worker in having[:-1]:
            machine.workers.remove(worker)

    # What must hold

    def note(self, path: Path, step: int) -> None:
        """Note path and step of a copy: its lineage says it whole."""
        self.steps.setdefault(path[-1], step)
        assert self.paths.setdefault(path[-1], path) == path, f"two copies are {path[-1]}"

    def check_pieces(self, opened: Opened, found: list[Gradient]) -> None:
        """Check what a chief has got from the shards."""
        assert sorted(found) == sorted(self.ledger.content(opened)), "PIECES"
        assert opened.count == len(found)
        assert opened.weight == sum(each.weight for each in found)

    def consumed(
        self, owner: Owner, block: Opened, step: int, update: tuple[int, int] | None
    ) -> None:
        """Check a round that is consumed, with the update that it has made."""
        ledger = self.ledger
        if self.copies:
            ledger = Ledger(self.required)
            ledger.shipped = self.ledger.shipped
        for gradient in ledger.consume(block, step):
            assert gradient.identity in self.accepted, f"{gradient} from nowhere"
            if self.copies:
                before = self._rounds_of.get(gradient.identity, ())
                twice = set(before) & set(ids(owner.line))
                assert not twice, f"ONCE {gradient} is in {update}, and before in {twice}"
                self._rounds_of[gradient.identity] = (*before, update)
        self.rounds += 1

    def was_told(self, update: tuple[int, int], names: list[str]) -> None:
        """Note that a chief may be told of an update that these hosts have."""
        if all(update != other for other, _ in self.told):
            who = [(m.number, name) for name in names if (m := self.machine(name)) is not None]
            self.told = (*self.told, (update, tuple(who)))

    def check(self) -> None:
        """Check what must hold at each instant."""
        owner = self.registered
        if owner is not None:
            pending = sum(host.pending(owner.fence) for host in owner._hosts)
            assert owner.accumulated == pending, "what is counted once is true all the time"
        if not self.copies:
            return
        leads = owner is not None and owner.leads
        if owner is not None and leads:
            for machine in self.machines:
                if machine.returned and self._is_back(machine, owner):
                    machine.returned = False
        living = [m for m in self.machines if m.up and not m.zombie]
        right = [m for m in living if not m.returned and not m.memory.torn]
        paths = sorted({ids(m.memory.path) for m in right}, key=len)
        for shorter, longer in itertools.pairwise(paths):
            assert longer[: len(shorter)] == shorter, f"FORK {shorter} {longer}"
        for machine in right:
            assert machine.memory.shows_its_step, f"SEEN {machine} needs {machine.memory.needs}"
        if owner is None or not leads:
            return
        line = set(ids(owner.line))
        for update, who in self.told:
            if update not in line:
                has = [m for m in living if update in ids(m.memory.path) and not m.returned]
                had = [m for n, name in who if (m := self.machines[n]).name == name and m in living]
                assert not has + had, f"LOST {update}: {has} {had}, owner at {owner.line[-3:]}"

    @staticmethod
    def _is_back(machine: Machine, owner: Owner) -> bool:
        memory = machine.memory
        if not machine.up or machine.zombie or memory.torn or not memory.path:
            return False
        in_line = memory.path == owner.line[: len(memory.path)]
        return in_line and memory.shows_its_step and memory.promise == owner.fence.term

    def are_in_line(self) -> bool:
        """Whether all living machines have the owner's copy and step, and count again."""
        owner = self.registered
        return (
            owner is not None
            and owner.leads
            and self.reach(owner.machine, owner.machine)
            and not (owner.machine.cut_off or owner.machine.zombie)
            and all(
                m.up
                and not (m.zombie or m.cut_off)
                and m.memory.path == owner.line
                and m.memory.segment.step == owner.step
                and not m.memory.torn
                and m.memory.begun <= owner.step
                for m in self.machines
                if m.up or not self.timeless
            )
        )

    def lost(self) -> list[Gradient]:
        """Return gradients of past steps that were accepted and are in no round.

        Without those that `advance_step` dropped: at which fence is in `faults.dropped`.
        """
        step = self.owners[-1].step
        return [
            gradient
            for gradient, fence in self.accepted.values()
            if gradient.local_step < step
            and gradient.identity not in self.ledger.consumed
            and fence not in self.faults.dropped
        ]
