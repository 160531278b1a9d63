"""The world: its parts, their messages, and what must hold at each instant.

    GRAD  Each gradient of a round was computed from exactly the owner's path at the round's step.
    ONCE  No copy has an update twice. No gradient is in two rounds of one line of changes.
    FORK  The copies of living machines belong to one line: of two paths, one begins with the other.
    LOST  An update that a chief was told of is in the owner's line, as long as a machine lives that
          has the update, or could make it.
    SEEN  Workers see no step before its parameters.
    CALL  A chief's call is made once, however often and late it is repeated.
    OWN   A chief's own machine has the copy of its round.

Without parameters, the ledger checks each round. Machines that have come back, or that Ray has
declared dead, may break these rules until they follow the owner again.
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
    """Machines, owners and chiefs, with the records by which they are checked."""

    hosts: int = 3  # how many machines
    workers: int = 2  # on each machine
    leaders: int = 2  # how many chiefs; they ask for rounds in turn
    required: int = 3  # the gradients that a round requires
    shards: int = 2  # how many shards; 0: nothing is shipped
    copies: bool = True  # whether the group has parameters
    contributors: bool = True  # whether workers say who they are
    follows: bool = True  # whether workers wait for the next step after each gradient
    last_step: int | None = None  # at this step the world makes no more rounds
    # Whether no time passes (in a search): messages arrive at once, and waits end by steps.
    timeless: bool = False
    kinds: frozenset[str] = frozenset()  # the kinds of failures that may happen
    failures: int = 0  # how many failures may happen, in a timeless world
    timing: Timing = TIMING  # how long the parts wait for each other
    size: int = 0  # of an update, in bytes
    parks: float = 0.0  # the seconds that a chief's call waits at the owner
    # Whether machines that Ray has declared dead can still exchange messages.
    hears_zombies: bool = False
    fails: int = 0  # how many failures have happened
    now: float = 0.0
    listed: frozenset[str] = frozenset()  # the machines that Ray lists as alive
    cuts: frozenset[tuple[int, int]] = frozenset()
    known_step: int = 0  # the step that a chief without parameters knows
    applied_at: float = 0.0
    moved_at: float = 0.0
    rounds: int = 0
    told: tuple[tuple[tuple[int, int], tuple[tuple[int, str], ...]], ...] = ()
    messages: list[Message] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    # The accepted gradients by identity, with the fence of their segment.
    accepted: dict[int, tuple[Gradient, Fence | None]] = field(default_factory=dict)
    paths: dict[Lineage, Path] = field(default_factory=dict)  # the path of copies with a lineage
    # By lineage: the step of the first copy that had it.
    steps: dict[Lineage, int] = field(default_factory=dict)
    # By a restore's name: the path of copies after this restore.
    wholes: dict[Fence, Path] = field(default_factory=dict)
    _rounds_of: dict[int, tuple[tuple[int, int] | None, ...]] = field(default_factory=dict)
    _numbers: int = 0

    def __post_init__(self) -> None:
        """Make machines and chiefs. The first chief that calls makes the first owner."""
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
        """Take at once the steps that have the same effect at any time: this saves states.

        Workers forget gradients that will be refused, and chiefs get answers to their calls.
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
        """Whether one more failure of this kind may happen."""
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
        """Whether a chief may call: in a search, only if the call has an effect; else always."""
        if not self.timeless:
            return True
        if not owner.alive or not self.reach(chief.machine, owner.machine):
            return False
        # A chief does not queue behind another that can be served: this saves states.
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
        """Return the chief that makes a change; None: it is dead, or no longer makes the change."""
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
        """The owner that Ray knows; None: there was none, or Ray knows that it is dead."""
        found = self.owners[-1] if self.owners else None
        return None if found is None or found.known_dead else found

    def find_owner(self, machine: Machine, *, is_behind: bool = False) -> Owner:
        """Return the owner that Ray knows; if there is none, make one, with a clock of its own."""
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
        """Return the step of a checkpoint, which is earlier or later than the owner's step."""
        later = chief.life % 2 and not self.timeless
        return self.owners[chief.owner or 0].step + 2 if later else 0

    def end_others(self, contributor: int) -> None:
        """End all but one worker of a contributor, as the error message of a conflict advises."""
        self.happened["conflicts"] += 1
        having = [(m, w) for m in self.machines for w in m.workers if w.contributor == contributor]
        for machine, worker in having[:-1]:
            machine.workers.remove(worker)

    # What must hold

    def note(self, path: Path, step: int) -> None:
        """Note path and step of a copy; fail if another copy has this lineage and another path."""
        self.steps.setdefault(path[-1], step)
        assert self.paths.setdefault(path[-1], path) == path, f"two copies are {path[-1]}"

    def check_pieces(self, opened: Opened, found: list[Gradient]) -> None:
        """Check that the pieces from the shards are the round's gradients."""
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
        """Note that a chief is told of an update, and which hosts could make it."""
        if all(update != other for other, _ in self.told):
            who = [(m.number, name) for name in names if (m := self.machine(name)) is not None]
            self.told = (*self.told, (update, tuple(who)))

    def check(self) -> None:
        """Check all that must hold at each instant (see the head of this file)."""
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
        """Whether all living machines have the owner's copy and step: so all gradients count."""
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
        """Return gradients of past steps that were accepted, but are in no round.

        Leave out gradients of the fences in `faults.dropped`: `advance_step` has dropped them.
        """
        step = self.owners[-1].step
        return [
            gradient
            for gradient, fence in self.accepted.values()
            if gradient.local_step < step
            and gradient.identity not in self.ledger.consumed
            and fence not in self.faults.dropped
        ]
