"""What goes wrong in a world of copies."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.copies.machines import Machine

from shmacc.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.copies.world import World

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
    slow: float = 0.02  # to get or to make a change takes longer than a lease
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


class Troubles:
    """Lets faults happen in a world."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.after = world, world.random, world.after
        for name in self._events:
            self._schedule(name)

    def heal(self) -> None:
        """Let nothing go wrong from here on, and put everything right."""
        self.world.faults = Faults()
        self.world.cuts.clear()
        for machine in self.world.machines:
            machine.cut_off = False
            machine.thaw()

    def break_one(self) -> None:
        """Freeze a machine for good, or cut it off from a chief's: the others go on without it.

        The owner's machine and those of chiefs stay. Gradients of the others must be enough.
        """
        world = self.world
        if world.required > world.workers * (len(world.machines) - 1):
            return
        homes = {owner.machine for owner in world.owners[-1:]}
        chiefs = [c.machine for c in world.chiefs if c.machine not in homes]
        others = [m for m in world.machines if m not in {*homes, *chiefs}]
        if not others:
            return
        one = self.random.choice(others)
        if chiefs and self.random.random() < 0.7:
            world.cuts.add(frozenset({one, self.random.choice(chiefs)}))
        else:
            one.frozen = True

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
        # Twice the owner's machine: what it has done alone is of interest.
        owners = [owner.machine for owner in self.world.owners[-1:]]
        machine = self.random.choice(self.world.machines + owners)
        if getattr(self.world.faults, name) > 0 and machine.up and not machine.zombie:
            self.world.happened[name] += 1
            self._events[name](machine)

    def _schedule(self, name: str) -> None:
        rate = getattr(self.world.faults, name)
        if rate > 0:
            self.after(self.random.expovariate(rate), lambda: self._again(name))

    def _again(self, name: str) -> None:
        self._happen(name)
        self._schedule(name)

    def strike(self) -> None:
        """Let some faults happen very soon."""
        kinds = [name for name in self._events if getattr(self.world.faults, name) > 0]
        for _ in range(self.random.choice([1, 1, 2, 3]) if kinds else 0):
            name = self.random.choice(kinds)
            self.after(self.random.uniform(0.0, 0.1), lambda name=name: self._happen(name))  # type: ignore[misc]

    def _freeze(self, machine: Machine) -> None:
        machine.frozen = True
        self.after(self.random.uniform(0.2, 4.0), machine.thaw)

    def _cut_off(self, machine: Machine) -> None:
        machine.cut_off = True
        self.after(self.random.uniform(0.2, 4.0), lambda: setattr(machine, "cut_off", False))

    def _cut(self, machine: Machine) -> None:
        pair = frozenset({machine, self.random.choice(self.world.machines)})
        self.world.cuts.add(pair)
        self.after(self.random.uniform(0.2, 5.0), lambda: self.world.cuts.discard(pair))

    def _end(self, machine: Machine, *, listed: float, memory: bool) -> None:
        """Lose a machine, which Ray strikes off its list later; it comes back with a new name."""
        name = machine.name
        for owner in [o for o in self.world.owners if o.machine is machine and o.alive]:
            owner.die()
            self.after(listed, owner.declare_dead)
        machine.lose(memory=memory)
        self.after(listed, lambda: self.world.listed.discard(name))
        self.after(self.random.uniform(0.3, 2 * DECLARED), machine.boot)

    def _declare_dead(self, machine: Machine) -> None:
        """Have Ray declare a machine dead; its processes go on for a while, then Ray ends them."""
        name = machine.name
        machine.zombie = True
        machine.frozen = self.random.random() < 0.5
        self.world.listed.discard(name)
        for owner in [o for o in self.world.owners if o.machine is machine]:
            owner.declare_dead()

        def end() -> None:
            if machine.name == name and machine.up:
                self._end(machine, listed=0.0, memory=False)

        self.after(self.random.uniform(0.0, 2.0), machine.thaw)
        self.after(self.random.uniform(2.0, 5.0), end)

    def _kill_owner(self) -> None:
        if self.world.owners:
            self.world.owners[-1].die()

    def _advance(self) -> None:
        owner = self.world.registered
        if owner is not None and owner.alive and owner.is_ready:
            with contextlib.suppress(FailedPreconditionError):  # the copies are being changed
                owner.advance_step(owner.step + self.random.randint(0, 2), self.world.now)
                owner.settle()
