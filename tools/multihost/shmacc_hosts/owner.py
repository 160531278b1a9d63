"""The simulated owner: the library's `OwnerCore` with a driver, and attributes for checks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shmacc._multihost.messages import Opened, Staging, Told, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.rounds import TERM_BITS
from shmacc_hosts.memory import Path, ids
from shmacc_hosts.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc._multihost.hosts import Grant
    from shmacc._multihost.messages import Fence, Report
    from shmacc_hosts.machine import Machine

_PATIENCE = 2.0  # seconds until an actor that does not answer a new owner is ended
_PAST = -1e9  # a time so long ago that every wait that began then is over


class Owner(OwnerCore):
    """An owner on a machine. The world checks its line, its rounds, and its answers to chiefs.

    Attributes:
        line: The path of the copies that have the owner's lineage.
        updates: By call: the update that the owner has committed for it.
        opened: The path and the step at which the last block was opened.
        known_dead: Whether Ray knows that the owner is dead.
        parked: Reports that wait for an order, by number. Each has its machine, host, incarnation,
            the serial of the host's last order, and the time until which the report waits.
        calls: Waiting calls, by chief: the call, the serial at its last try, its time limit.
        answered: How many calls it has answered.
    """

    part = "owner"

    def __init__(self, world: Any, machine: Machine, number: int, term: int) -> None:
        step = 0 if not world.copies and not number else None
        home = machine.name
        super().__init__(term, step, world.timing, world.shards, copies=world.copies, home=home)
        self.world, self.machine, self.number = world, machine, number
        self.line: Path = ()
        self.updates: dict[str, Fence] = {}
        self.opened: tuple[Path, int] = (), 0
        self.alive, self.known_dead = True, False
        self.parked: dict[int, tuple[int, str, int, int, float]] = {}
        self.calls: dict[int, tuple[tuple[Any, ...], int, float]] = {}
        self.woken: dict[int, Step] = {}  # by parked report with news: the step that sends an order
        self.looked: dict[int, int] = {}  # by parked report: the serial when last checked for news
        self.unheard: dict[str, float] = {}
        self.answered = 0

    def __repr__(self) -> str:
        copies = self.copies.lineage, self.is_learning, self.copies.change
        return (
            f"<owner {self.number} {self.fence} on {self.machine.name} alive={self.alive} "
            f"known_dead={self.known_dead} step={self.step} ready={self.is_ready} {copies} "
            f"block={self.block} {self._grant} {self.hosts()} {self._queue.tickets()} "
            f"{self.counters}>"
        )

    @property
    def leads(self) -> bool:
        return self.alive and not self.is_learning

    def die(self) -> None:
        self.alive = False
        self.parked, self.calls = {}, {}

    # Steps

    def steps(self) -> Iterator[Step]:
        if not self.alive or self.machine.frozen:
            if not self.alive and not self.known_dead and not self.machine.cut_off:
                yield Step("owner", self.number, "found_dead")
            return
        if self.world.timeless:
            for what in self._waits():
                if what[2] or self.world.may("lease"):
                    yield Step("owner", self.number, "end_wait", what)
            return
        yield Step("owner", self.number, "wake")
        if self.world.copies and (self.copies.listed != self.world.listed or self.unanswered()):
            yield Step("owner", self.number, "look_around")
        for number, (_, name, _, serial, until) in self.parked.items():
            if number not in self.woken:
                looks = self.looked.get(number, serial) != self.serial
                self.looked[number] = self.serial
                news = looks and self.has_news(name, serial)
                if not news and self.world.now < until:
                    continue
                self.woken[number] = Step("owner", self.number, "send_order", number)
            yield self.woken[number]
        for number, (_, serial, until) in self.calls.items():
            if serial != self.serial or self.world.now >= until:
                yield Step("owner", self.number, "serve", number)

    def due(self, step: Step) -> float:
        return self.next_time(self.world.now) if step.what == "wake" else 0.0

    def found_dead(self, _: None = None) -> None:
        self.known_dead = True

    def wake(self, _: None = None) -> None:
        self.tick(self.world.now)
        self.settle()

    def look_around(self, _: None = None) -> None:
        """Get Ray's list of machines, and end actors that do not answer a new owner."""
        world, now = self.world, self.world.now
        if self.machine.up and not (self.machine.cut_off or self.machine.zombie):
            self.list_hosts(world.listed, now)
        self.unheard = {name: self.unheard.get(name, now) for name in sorted(self.unanswered())}
        for name, since in self.unheard.items():
            machine = world.machine(name)
            if now - since > _PATIENCE and machine is not None and not machine.cut_off:
                self.unheard[name] = now
                world.happened["actors ended"] += 1
                machine.end_actor()
        self.settle()

    def settle(self) -> None:
        """End the owner, if it has resigned. A driver checks this after each event."""
        if self.has_resigned and self.alive:
            self.world.happened["resigned"] += 1
            self.die()
            self.known_dead |= self.world.timeless

    # Calls

    def hear_machine(self, sender: int, serial: int, report: Report) -> None:
        """Receive a machine's report; answer when there is news, or in a search at once."""
        world = self.world
        if world.timeless:
            self.look_around()
        self.report(report, world.now)
        self.settle()
        until = world.now + 2 * world.timing.quiet(self.pace)
        if self.alive:
            number = world.next_number()
            self.parked[number] = sender, report.host, report.incarnation, serial, until
            if world.timeless:
                self.send_order(number)

    def send_order(self, number: int) -> None:
        at, name, incarnation, _, _ = self.parked.pop(number)
        self.woken.pop(number, None)
        self.looked.pop(number, None)
        self.answered += 1
        to = self.world.machines[at]
        self.world.send("order", self.machine, to, self.order(name, incarnation))

    def call(self, number: int, call: tuple[Any, ...], until: float) -> None:
        """Do a chief's call, and answer it. If the chief must wait, keep the call until `until`."""
        _, _, method, args, options = call
        if self.world.timeless:
            self.look_around()
        found = getattr(self, method)(*args, now=self.world.now, **options)
        self.settle()
        if isinstance(found, Waiting | Staging) and self.world.now < until:
            self.calls[number] = call, self.serial, until
        elif self.alive:
            self.answered += 1
            to = self.world.chiefs[number].machine
            self.world.send("answer", self.machine, to, number, call[:2], found)

    def serve(self, number: int) -> None:
        call, _, until = self.calls.pop(number)
        self.call(number, call, until)

    # Time in a search: the end of a wait is a step

    def _waits(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield each wait that may end: its step, the part that it waits for, whether that is away.

        If the part is not away, the wait ends only where the failure "lease" is possible.
        """
        world, change = self.world, self.copies.change
        for host in self._hosts:
            if not host.lost:
                yield "lease_ends", host.name, not self._hears(host.name)
        for ticket in self._queue.tickets():
            chief = world.chief_with(ticket)
            yield "chief_ends", ticket, chief is None or not self._hears(chief.machine.name)
        if self._grant is not None and (late := self._grant.waits_for(self._hosts)):
            yield "grant_ends", None, not any(self._hears(host.name) for host in late)
        if change is not None and change.since == 0.0:
            late_ones = change.late(self._hosts.reports, 0.0, 1.0)
            able = [m for m in map(world.machine, late_ones) if m and self._hears(m.name)]
            if late_ones:
                yield "staging_ends", None, not any(world.chief_of(change.stage, m) for m in able)
        if change is not None and change.is_whole and not change.left:
            maker = world.maker(change.stage)
            yield "restore_ends", None, maker is None or not self._hears(maker.machine.name)
        if self.is_learning and self.copies._answered_at == 0.0:
            yield "learning_ends", None, True
        if self._wants_round() and not self._is_enough() and self._in_doubt:
            yield "nothing_comes", None, True

    def _hears(self, name: str) -> bool:
        machine = self.world.machine(name)
        return machine is not None and self.world.reach(machine, self.machine)

    def end_wait(self, what: tuple[str, Any, bool]) -> None:
        """End a wait, by moving its beginning far into the past."""
        kind, name, is_due = what
        self.world.fails += not is_due
        host, ticket, change = self._hosts.find(name), self._queue.find(name), self.copies.change
        match kind:
            case "lease_ends" if host is not None:
                host.heard = _PAST
            case "chief_ends" if ticket is not None:
                ticket.heard = _PAST
            case "grant_ends" if self._grant is not None:
                self._grant = dataclasses.replace(self._grant, since=_PAST)
            case "staging_ends" if change is not None:
                change.since = _PAST
            case "restore_ends" if change is not None:
                change.heard = _PAST
            case "learning_ends":
                self.copies._answered_at = _PAST
            case "nothing_comes":
                self.tick(0.0)
                self._seen = self._seen and (self._seen[0], _PAST)
        self.wake()

    # Hooks for the world's checks

    def _tend_copies(self, now: float) -> None:
        copies, change = self.copies, self.copies.change
        super()._tend_copies(now)
        self._follow_line()
        if change is not None and isinstance(copies.answered(change.call), Told):
            living = [host for host in self._hosts if not host.lost]
            could = [h.name for h in living if self._can_make(h.report, change.stage.update)]
            self.world.was_told(change.stage.update, could)

    @staticmethod
    def _can_make(report: Report | None, update: Fence) -> bool:
        """Whether a machine has made an update, or can make it."""
        if report is None or report.copy is None:
            return False
        refused = report.refused is not None and report.refused.update == update
        return update in {report.copy.lineage[:2], None if refused else report.staged}

    def _follow_line(self) -> None:
        """Set `line` to the path of the present lineage."""
        lineage, change = self.copies.lineage, self.copies.change
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

    def resume(self, ticket: str, block: Opened, now: float, *, host: str = "") -> Any:
        before, found = self.block, super().resume(ticket, block, now, host=host)
        if isinstance(found, Opened) and before is None:
            self.opened = self.line, self.step
        return found

    def _mark(self, ticket: str) -> int:
        chief = self.world.chief_with(ticket)
        return 0 if chief is None else 1 + chief.number + len(self.world.chiefs) * (chief.life % 2)

    def _close_grant(self, grant: Grant, now: float) -> None:
        super()._close_grant(grant, now)
        if self.block is None:
            return
        self.opened = self.line, self.step
        for gradient in self.world.ledger.content(self.block) if self.world.copies else ():
            read = gradient.read
            assert read == self.line, f"GRAD {gradient} of {read[-1:]} in a round of {self.line}"

    def _consume_block(self) -> None:
        if self.block is not None:
            self._audit(self.block)
        super()._consume_block()

    def _audit(self, block: Opened) -> None:
        world = self.world
        update = self.line[-1][:2] if ids(self.line) != ids(self.opened[0]) else None
        world.consumed(self, block, self.step, update)

    def _later_term(self, term: int) -> int:  # type: ignore[override]
        return ((term >> TERM_BITS) + 1 << TERM_BITS) + self.number
