"""Chiefs: they ask for rounds, and change the parameters in their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.copies.memory import ids

from shmacc._multihost.messages import (
    Conflict,
    Ended,
    NotReady,
    Opened,
    Refused,
    Staging,
    Told,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.copies.machines import Machine
    from helpers.copies.owners import Owner
    from helpers.copies.world import World


class Source:
    """What machines get a change by: an object of the chief, gone once the chief drops it."""

    def __init__(self, chief: Chief, call: str) -> None:
        self._chief, self._call = chief, call

    @property
    def is_gone(self) -> bool:
        return not self._chief.alive or self._chief.call != self._call

    def is_within_reach(self, machine: Machine) -> bool:
        home = self._chief.machine
        return not self.is_gone and not home.frozen and self._chief.world.reach(home, machine)


class Chief:
    """A chief. What it is doing is the name of a method, which it calls every 30 ms.

    Each of its messages may be lost: so it repeats them until it is answered.
    """

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine = world, machine
        self._boot = machine.boots
        self._is_dead = False
        self._owner: Owner | None = None
        self._ticket = self.call = ""
        self._does: Callable[[Owner], None] = self._ask
        self._next_round()
        self._poll()

    def __repr__(self) -> str:
        return f"<chief on {self.machine.name} {self.alive} {self._does.__name__} {self._ticket}>"

    @property
    def alive(self) -> bool:
        return not self._is_dead and self.machine.up and self.machine.boots == self._boot

    def die(self) -> None:
        if self.alive:
            self._is_dead = True
            self.world.happened["chiefs"] += 1

    def _poll(self) -> None:
        if not self.alive:
            return
        owner = self._owner
        if owner is None or (owner.known_dead and not self.machine.zombie):
            # Whatever it was doing raises. Its next call makes an owner, if there is none.
            self._owner = owner = self.world.owner_for(self.machine)
            self._next_round()
        if owner is not None:
            self._does(owner)
        self.machine.after(0.03, self._poll)

    def _send(
        self, owner: Owner, do: Callable[[], object], answered: Callable[[object], None]
    ) -> None:
        """Call the owner; the answer counts only if the chief still does the same."""
        state = self._does, self._ticket, self.call

        def arrive() -> None:
            if owner.alive:
                answer = do()
                owner.settle()
                self.world.send(lambda: hear(answer), owner.machine, self.machine)

        def hear(answer: object) -> None:
            if self.alive and (self._does, self._ticket, self.call) == state:
                answered(answer)

        self.world.send(arrive, self.machine, owner.machine)

    def _later(self, do: Callable[[], None]) -> None:
        """Go on in its block after some time, if it is still the same block."""
        ticket = self._ticket

        def go_on() -> None:
            if self.alive and self._ticket == ticket:
                do()

        self.machine.after(self.world.random.uniform(0.0, 0.1), go_on)

    def _new_call(self) -> None:
        self.call = f"call {next(self.world.identities)}"

    # Between rounds

    def _next_round(self) -> None:
        self._ticket, self.call = f"ticket {next(self.world.identities)}", ""
        self._does = self._ask
        if self.world.random.random() < self.world.faults.restores:
            self._new_call()
            self._does = self._restore

    def _ask(self, owner: Owner) -> None:
        ticket, world = self._ticket, self.world
        if not world.trains:
            self._send(owner, lambda: owner.leave(ticket, world.now, consume=False), lambda _: None)
            return
        self._send(
            owner,
            lambda: owner.ask(ticket, world.required, world.now, host=self.machine.name),
            self._asked,
        )

    def _asked(self, answer: object) -> None:
        if isinstance(answer, NotReady):
            self._new_call()
            self._does = self._restore_first
        elif isinstance(answer, Opened):
            assert self._owner is not None
            line, path = self._owner.opened[self._ticket], self.machine.memory.path
            assert path[: len(line)] == line, f"OWN {path} in a round of {line}"
            self._does = self._stay
            self._later(self._choose)
        elif isinstance(answer, Conflict | Ended):
            self._next_round()

    def _restore_first(self, owner: Owner) -> None:
        self._restore(owner, only_first=True)

    def _restore(self, owner: Owner, *, only_first: bool = False) -> None:
        call, world, source = self.call, self.world, Source(self, self.call)
        name, step = self.machine.name, world.random.choice([0, owner.step + 2])
        self._send(
            owner,
            lambda: owner.restore(call, name, source, 0, step, world.now, only_first=only_first),
            self._restored,
        )

    def _restored(self, answer: object) -> None:
        if isinstance(answer, Told):
            self.world.happened["restores"] += 1
        if not isinstance(answer, Staging):
            self._does = self._ask
        elif not answer.committed and self.world.random.random() < 0.005:  # its timeout has passed
            self._does = self._withdraw

    # In its block

    def _stay(self, owner: Owner) -> None:
        """Only say that it is alive."""
        ticket, now = self._ticket, self.world.now
        self._send(owner, lambda: owner.hear(ticket, now), lambda _: None)

    def _choose(self) -> None:
        """Update, or do something else."""
        random, faults = self.world.random, self.world.faults
        if random.random() < faults.chiefs:
            self.machine.after(random.uniform(0.0, 0.3), self.die)
        if random.random() < faults.raises:
            self._does = self._raise if random.random() < 0.5 else self._leave
        else:
            self._new_call()
            self._does = self._update

    def _update(self, owner: Owner) -> None:
        self._stay(owner)
        ticket, call, source, now = self._ticket, self.call, Source(self, self.call), self.world.now
        self._send(owner, lambda: owner.update(call, ticket, source, 0, now), self._updated)

    def _updated(self, answer: object) -> None:
        random = self.world.random
        if isinstance(answer, Told):
            owner = self._owner
            assert owner is not None
            update = owner.updates.get(self.call)
            path = self.machine.memory.path
            assert update in ids(path), f"the chief is told of {update}, but reads {path}"
            self._does = self._stay
            self._later(self._finish)
        elif isinstance(answer, Refused):
            self.world.happened["refused"] += 1
            self._does = random.choice([self._raise, self._leave, self._stay])
            if self._does == self._stay and not answer.committed:
                self._later(self._choose)
            else:
                self._does = self._raise
        elif isinstance(answer, Ended):
            self._does = self._raise
        elif random.random() < self.world.faults.raises / 30:  # its timeout has passed
            self._does = self._withdraw

    def _withdraw(self, owner: Owner) -> None:
        self._stay(owner)
        call, now = self.call, self.world.now
        self._send(owner, lambda: owner.withdraw(call, now), self._withdrawn)

    def _withdrawn(self, answer: object) -> None:
        if not isinstance(answer, Staging):  # else it is committed, and will be told soon
            self.world.happened["withdrawn"] += 1
            self._does = self._raise

    def _finish(self) -> None:
        raises = self.world.random.random() < self.world.faults.raises / 2
        self._does = self._raise if raises else self._leave

    def _leave(self, owner: Owner, *, consume: bool = True) -> None:
        ticket, now = self._ticket, self.world.now
        self._send(owner, lambda: owner.leave(ticket, now, consume=consume), self._left)

    def _raise(self, owner: Owner) -> None:
        self._leave(owner, consume=False)

    def _left(self, _: object) -> None:
        self._next_round()
