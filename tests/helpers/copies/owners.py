"""Owners: the library's, which show the world what they decide, and what their driver does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.copies.memory import ids
from helpers.multihost_actors import TIMING

from shmacc._multihost.messages import Told
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.rounds import TERM_BITS

if TYPE_CHECKING:
    from helpers.copies.actors import Actor
    from helpers.copies.machines import Machine
    from helpers.copies.memory import Path
    from helpers.copies.world import World

    from shmacc._multihost.copies import Copies
    from shmacc._multihost.hosts import Grant
    from shmacc._multihost.messages import Fence, Report


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
                follows = actor is not None and actor.owner is self
                if actor and follows and self.has_news(machine.name, actor.serial):
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
            self.world.troubles.strike()

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
