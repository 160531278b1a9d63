"""The chief: asks for one round after the other, gets the mean, and updates the parameters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shmacc._multihost.messages import Opened, Staging, Told, Waiting
from shmacc_simulate.clock import Event, Processor
from shmacc_simulate.network import Stored
from shmacc_simulate.scenario import ROW_BYTES
from shmacc_simulate.world import HOME

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.copies import ChangeAnswer
    from shmacc_simulate.clock import Steps
    from shmacc_simulate.owner import Owner
    from shmacc_simulate.world import World

_Answer = TypeVar("_Answer")


class Update(NamedTuple):
    """The seconds of an update."""

    put: float = 0.0  # the chief puts it into Ray's store
    pull: float = 0.0  # the transfer to a host that ended last
    check: float = 0.0  # at a host
    make: float = 0.0  # at a host
    messages: float = 0.0  # the rest: messages, and waiting for the owner


class Round(NamedTuple):
    """What a round has cost."""

    seconds: float  # from the last gradient's apply until all hosts are at the next step
    update: Update
    out: float  # bytes in large messages from the chief's node
    calls: float  # that the owner has answered


class Chief:
    """The chief, with its rounds."""

    def __init__(self, world: World, owner: Owner) -> None:
        self._world, self._owner = world, owner
        self._processor = Processor(world.clock)
        self._ticket = ""  # of the round
        self.rounds: list[Round] = []
        world.clock.start(self._run())

    def _run(self) -> Steps[None]:
        world, core = self._world, self._owner.core
        first = partial(core.restore, "first", str(HOME), self._stored(0.0), 0, 0, only_first=True)
        yield from self._call(first, Told)
        opened = yield from self._next_round()
        while True:
            applied, out, calls = world.applied_at, world.network.sent[HOME], self._owner.calls
            yield from self._fetch(opened)
            update = (yield from self._update()) if world.scenario.updates else Update()
            step = core.step
            if not (yield from self._call(partial(core.leave, self._ticket, consume=True), bool)):
                raise RuntimeError(f"The round of step {step} has not ended with its block")
            world.ledger.consume(opened, step)
            opened = yield from self._next_round()
            spent = world.network.sent[HOME] - out, self._owner.calls - calls
            self.rounds.append(Round(world.moved_at - applied, update, *spent))

    def _next_round(self) -> Steps[Opened]:
        """Wait for a round. All hosts are at its step then, since all have gradients in it."""
        core, required = self._owner.core, self._world.ledger.required
        self._ticket = f"ticket {next(self._world.numbers)}"
        ask = partial(core.ask, self._ticket, required, host=str(HOME))
        return (yield from self._call(ask, Opened))

    def _call(self, ask: Callable[[float], object], wanted: type[_Answer]) -> Steps[_Answer]:
        """Call the owner until it has a result."""
        while isinstance(answer := (yield from self._owner.serve(ask)), Waiting | Staging):
            pass
        if not isinstance(answer, wanted):
            raise TypeError(f"The owner's answer to the chief is {answer}")
        return answer

    def _fetch(self, opened: Opened) -> Steps[None]:
        """Get the mean: a part of each shard."""
        world, costs = self._world, self._world.costs
        left, fetched = set(map(int, opened.shard_hosts)), Event()
        parts, size = len(left), world.scenario.shipped(opened.count)
        received = sum(world.scenario.shipped(each.batch.count) for each in opened.members)

        def get(at: int) -> Steps[None]:
            yield self._processor.done(costs.call)
            yield world.network.small(HOME, at)
            yield world.shards[at].done(costs.call + received / parts / costs.reduce)
            yield from world.network.large(at, HOME, size / parts, world.clock.now)
            left.discard(at)
            if not left:
                fetched.happen()

        for at in sorted(left):
            world.clock.start(get(at))
        yield fetched
        yield self._processor.done(size / costs.join)

    def _update(self) -> Steps[Update]:
        """Update the parameters of all hosts."""
        clock, costs, rows = self._world.clock, self._world.costs, self._world.scenario.update
        began, size = clock.now, rows * ROW_BYTES
        yield began + size / costs.put
        core, ticket, stored = self._owner.core, self._ticket, self._stored(size)

        def update(now: float) -> ChangeAnswer:
            core.hear(ticket, now)  # a thread of the chief's does it, more rarely
            return core.update(f"update of {ticket}", ticket, stored, int(size), now)

        yield from self._call(update, Told)
        parts = size / costs.put, stored.last, rows * costs.check, rows * costs.make
        return Update(*parts, messages=clock.now - began - sum(parts))

    def _stored(self, size: float) -> Stored:
        return Stored(self._world.network, self._world.clock, HOME, size)
