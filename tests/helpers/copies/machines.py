"""Machines, which start Ray's processes and workers, and may be frozen, cut off, or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.copies.actors import Actor
from helpers.copies.memory import Memory
from helpers.copies.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.copies.world import World


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
