"""Workers: they outlive Ray's processes on their machine, but not its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.copies.memory import TORN

from shmacc_simulate.ledger import Gradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.copies.machines import Machine
    from helpers.copies.world import World


class Worker:
    """Reads the step, then the copy, and applies a gradient that it computes from the copy."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine = world, machine
        self.contributor = next(world.identities) if world.contributors else None
        self.alive = True
        self._work()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        def go_on() -> None:
            if self.alive:
                do()

        self.machine.after(seconds, go_on)

    def _work(self) -> None:
        random, step = self.world.random, self.machine.memory.segment.step
        if step < 0:
            self._after(0.02, self._work)
            return
        weight = random.randint(1, 3)
        gradient = Gradient(next(self.world.identities), step, self.contributor, weight)
        self._after(random.uniform(0.0, 0.01), lambda: self._read(gradient))

    def _read(self, gradient: Gradient) -> None:
        memory = self.machine.memory
        self.world.computed_from[gradient.identity] = TORN if memory.torn else memory.path
        self._after(self.world.random.uniform(0.005, 0.06), lambda: self._apply(gradient))

    def _apply(self, gradient: Gradient) -> None:
        if self.machine.memory.segment.apply(gradient) is None:
            self._after(0.01, lambda: self._apply(gradient))
        elif self.world.follows:
            self._follow(gradient.local_step)
        else:
            self._work()

    def _follow(self, step: int) -> None:
        if self.machine.memory.segment.step == step:
            self._after(0.01, lambda: self._follow(step))
        else:
            self._work()
