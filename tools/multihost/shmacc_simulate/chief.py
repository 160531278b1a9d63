"""The chief: asks for one round after the other, and has the shards add up the pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmacc._multihost.messages import Ended, Opened, Waiting
from shmacc_simulate.scenario import SMALL_BYTES, Round
from shmacc_simulate.world import Processor

if TYPE_CHECKING:
    from shmacc._multihost.messages import Answer
    from shmacc_simulate.owner import Owner
    from shmacc_simulate.world import Steps, World

_AT = 0  # the chief's host is the first one


@dataclass
class _Fetch:
    """The calls to all shards that have a part of a round."""

    opened: Opened
    mean: float  # its bytes; 0: it stays at the shards
    waiting: set[int]
    is_whole: bool = True  # no shard has lost a piece


class Chief:
    """Asks for a round, fetches the mean or leaves it at the shards, and begins again."""

    def __init__(self, world: World, owner: Owner) -> None:
        self._world, self._owner = world, owner
        self._processor = Processor(world.clock)
        self._ticket = ""
        self._asked = 0.0
        self._in_block = ""  # the ticket whose block it keeps alive
        self.rounds: list[Round] = []

    def next_round(self) -> None:
        """Ask for a round."""
        self._ticket = f"ticket {next(self._world.numbers)}"
        self._asked = self._world.clock.now
        self._ask()

    def _ask(self) -> None:
        required = self._world.scenario.required
        self._world.clock.start(self._owner.ask(self._ticket, required, self._answered))

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Opened):
            if self._in_block != self._ticket:
                self._in_block = self._ticket
                self._world.clock.start(self._keep_alive(self._ticket))
            self._fetch(answer)
        elif isinstance(answer, Waiting):
            self._ask()
        elif isinstance(answer, Ended):  # the owner was too busy to hear the chief in time
            self.next_round()
        else:
            raise TypeError(f"The owner's answer to the chief is {answer}")

    def _keep_alive(self, ticket: str) -> Steps[None]:
        """Tell the owner that the chief is alive while it is in the block."""
        clock = self._world.clock
        while True:
            yield clock.now + self._world.scenario.timing.chief_lease / 4
            if ticket != self._ticket:
                return
            clock.start(self._owner.hear(ticket))

    def _fetch(self, opened: Opened) -> None:
        scenario = self._world.scenario
        mean = scenario.shipped(opened.count) if scenario.whole else 0.0
        numbers = [n for n in range(len(opened.shard_hosts)) if opened.of_shard(n)]
        fetch = _Fetch(opened, mean, set(numbers))
        for number in numbers:
            self._world.clock.start(self._call(fetch, number, mean / len(numbers)))

    def _call(self, fetch: _Fetch, number: int, size: float) -> Steps[None]:
        """Call a shard until it answers, or the owner says that its host is lost."""
        world, network = self._world, self._world.network
        place = fetch.opened.shard_hosts[number]
        shard = world.shard(place, number)
        while shard is None and place not in self._owner.core.lost:
            yield world.clock.now + world.scenario.machine.retry
            shard = world.shard(place, number)
        at, has_all = _AT, False
        if shard is not None:
            at = shard.at
            yield network.small(_AT, at, SMALL_BYTES)
            has_all = yield from shard.reduced(fetch.opened, number)
        if size and has_all:
            yield from network.large(at, _AT, size, world.clock.now)
        else:
            yield network.small(at, _AT, SMALL_BYTES)
        fetch.waiting.discard(number)
        fetch.is_whole = fetch.is_whole and has_all
        if not fetch.waiting:
            yield from self._fetched(fetch)

    def _fetched(self, fetch: _Fetch) -> Steps[None]:
        clock = self._world.clock
        if not fetch.is_whole:
            yield from self._owner.missing(self._ticket)
            self._ask()
            return
        yield self._processor.done(fetch.mean / self._world.rates.join)
        began = clock.now
        yield from self._owner.leave(self._ticket)
        self.rounds.append(Round(self._asked, began, clock.now, fetch.opened.count))
        self._ticket = ""
        yield clock.now + self._world.scenario.pause
        self.next_round()
