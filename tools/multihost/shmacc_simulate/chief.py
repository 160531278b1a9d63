"""The chief: asks for rounds, one after the other, and has the shards add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmacc._multihost.messages import Ended, Opened, Waiting
from shmacc_simulate.events import Processor
from shmacc_simulate.scenario import ROW_BYTES, SMALL_BYTES, WIDTH, Round

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Answer
    from shmacc_simulate.center import Owner, Shards
    from shmacc_simulate.world import World

_AT = 0  # its host: the first one


class Chief:
    """Leads: asks, fetches the mean, or leaves it at the shards; and again."""

    def __init__(self, world: World, owner: Owner, shards: Shards) -> None:
        self._world, self._owner, self._shards = world, owner, shards
        self._processor = Processor(world.clock)
        self._ticket = ""
        self._asked = 0.0
        self._in_block = ""  # the ticket for which it goes on asking
        self.rounds: list[Round] = []
        self.cancelled = 0

    def next_round(self) -> None:
        """Ask for a round."""
        self._ticket = f"ticket {self._world.new_number()}"
        self._asked = self._world.clock.now
        self._ask()

    def _ask(self) -> None:
        self._owner.ask(self._ticket, self._world.scenario.required, self._answered)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Opened):
            if self._in_block != self._ticket:
                self._in_block = self._ticket
                self._keep_alive(self._ticket)
            _Fetch(
                self._world,
                self._owner,
                self._shards,
                answer,
                lambda is_whole: self._fetched(answer, is_whole=is_whole),
            ).start()
        elif isinstance(answer, Waiting):
            self._ask()
        elif isinstance(answer, Ended):  # the owner has not got to the chief's calls for so long
            self.cancelled += 1
            self.next_round()
        else:
            raise TypeError(f"The owner's answer to the chief is {answer}")

    def _keep_alive(self, ticket: str) -> None:
        """Say that it is alive while it is in the block."""

        def again() -> None:
            if ticket == self._ticket:
                self._owner.hear(ticket)
                self._keep_alive(ticket)

        self._world.clock.after(self._world.scenario.timing.chief_lease / 4, again)

    def _fetched(self, opened: Opened, *, is_whole: bool) -> None:
        world = self._world
        if not is_whole:
            self._owner.missing(self._ticket, self._ask)
            return

        def begun() -> None:
            began = world.clock.now

            def over() -> None:
                self.rounds.append(Round(self._asked, began, world.clock.now, opened.count))
                self._ticket = ""
                world.clock.after(world.scenario.pause, self.next_round)

            self._owner.leave(self._ticket, over)

        self._processor.run(_mean(world, opened) / world.rates.join, begun)


class _Fetch:
    """Calls of all shards that have something of a round.

    Args:
        world: Of the world.
        owner: Says which hosts are lost.
        shards: All of them.
        opened: The round.
        then: Called with whether no shard has lost a piece.
    """

    def __init__(
        self,
        world: World,
        owner: Owner,
        shards: Shards,
        opened: Opened,
        then: Callable[[bool], None],
    ) -> None:
        self._world, self._owner, self._shards = world, owner, shards
        self._opened, self._then = opened, then
        self._numbers = [n for n in range(len(opened.places)) if opened.of_shard(n)]
        self._waiting = set(self._numbers)
        self._is_whole = True

    def start(self) -> None:
        """Make the calls."""
        for number in self._numbers:
            self._call(number)

    def _call(self, number: int) -> None:
        opened = self._opened
        place = opened.places[number]
        shard = self._shards.at(place, number)
        if shard is None:
            if place in self._owner.core.lost:
                self._answer(number, _AT, has_all=False)
            else:
                retry = self._world.scenario.machine.retry
                self._world.clock.after(retry, lambda: self._call(number))
            return
        at = shard.at

        def answer(has_all: bool) -> None:
            self._answer(number, at, has_all=has_all)

        def arrive() -> None:
            shard.reduced(opened, number, answer)

        self._world.network.small(_AT, at, SMALL_BYTES, arrive)

    def _answer(self, number: int, at: int, *, has_all: bool) -> None:
        network = self._world.network
        mean = _mean(self._world, self._opened)

        def arrive() -> None:
            self._waiting.discard(number)
            self._is_whole = self._is_whole and has_all
            if not self._waiting:
                self._then(self._is_whole)

        if mean and has_all:
            network.large(at, _AT, mean / len(self._numbers), self._world.clock.now, arrive)
        else:
            network.small(at, _AT, SMALL_BYTES, arrive)


def _mean(world: World, opened: Opened) -> float:
    """Return the bytes of the mean, if the chief fetches it."""
    scenario = world.scenario
    if not scenario.whole:
        return 0.0
    return scenario.table.union(opened.count) * (WIDTH * 4 if scenario.table.dense else ROW_BYTES)
