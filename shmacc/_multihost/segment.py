"""A host's segment, as its forwarder uses it: the actions of forwarder.py on an ordinary group.

The seal is a round that the forwarder has open: applies of this step are refused, later ones wait,
nothing is consumed, and the death of the forwarder ends it.

A contributor that is listed without a gradient is an empty gradient to the group: it touches
nothing.
What is said of the segment here is without these.
"""

import numpy as np

from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import Sealed
from shmacc._records.taken import GroupPartial
from shmacc.errors import WorkerDiedError


class LocalSegment:
    """A group that a forwarder drives. Not for several threads at a time.

    Args:
        group: The group.
        shards: How many shards the sealed rows are for.
    """

    def __init__(self, group: HostGroup, shards: int = 1) -> None:
        self.group = group
        self._shards = shards
        self._handle = group.handle
        self._round = 0

    @property
    def is_sealed(self) -> bool:
        """Whether its round is open: what it has does not change."""
        return self._round != 0

    def dropped(self) -> int:
        """Return how many gradients it has ever refused, or accepted and then dropped."""
        stats = self.group.stats()
        return stats.dropped + stats.discarded

    def present(self, watched: frozenset[int]) -> frozenset[int]:
        """Return which of these contributors it has."""
        return watched & set(self.group.contributors().tolist()) if watched else frozenset()

    def pending(self, listed: frozenset[int]) -> int:
        """Return how many gradients it has."""
        return max(0, self.group.num_accumulated() - len(listed))

    def deaths(self) -> WorkerDiedError | None:
        """Return the error for processes that had applied and are gone, as a take is told; once."""
        try:
            self._handle.check_departures()
        except WorkerDiedError as error:
            return error
        return None

    def copy(self, listed: frozenset[int]) -> GroupPartial:
        """Return a copy of what it has; neither seals nor consumes."""
        return _without(self.group.look(), listed)

    def seal(self, listed: frozenset[int] = frozenset()) -> GroupPartial:
        """Open a round, unless it is open, and return a copy of what it has; consumes nothing.

        Rows come shard by shard, as `Plan.split` takes them.
        """
        return _without(self._sealed(), listed)

    def _sealed(self) -> GroupPartial:
        if self._round:
            return self.group.look(self._shards)
        if self.group.stats().round_pid is not None:
            # An earlier forwarder that was stopped, and is alive: a new step ends its round.
            self._handle.set_step(self.group.global_step)
        self._round, copy = self.group.open_round(self._shards)
        return copy

    def release(self) -> None:
        """Give the round up."""
        self._forget_round()

    def consume(self) -> None:
        """Consume the round, if it is still open: the step moves on by one."""
        step, self._round, serial = self.group.global_step + 1, 0, self._round
        if not self._handle.consume_round(serial):
            self.reset(step, frozenset())

    def reset(self, step: int, listed: frozenset[int]) -> None:
        """Empty it and set its step, with these contributors in; an open round ends."""
        who = np.array(sorted(listed), dtype=np.int64) if listed else None
        self._handle.restore([], step, (len(listed), len(listed), who, None))
        self._forget_round()

    def set_step(self, step: int) -> None:
        """Set the step; gradients stay; an open round ends."""
        self._handle.set_step(step)
        self._forget_round()

    def _forget_round(self) -> None:
        self._handle.give_up_round(self._round)
        self._round = 0


def _without(partial: GroupPartial, listed: frozenset[int]) -> GroupPartial:
    """Leave out the contributors that are listed without a gradient."""
    if not listed:
        return partial
    who = np.array([c for c in partial.contributors.tolist() if c not in listed], np.int64)
    extra = len(listed)
    return GroupPartial(partial, partial.count - extra, partial.step, partial.weight - extra, who)


def describe(partial: GroupPartial) -> Sealed:
    """Return what the owner must know of a sealed segment."""
    return Sealed(
        partial.count,
        partial.weight,
        frozenset(partial.contributors.tolist()),
        {name: (sums.count, sums.weight) for name, sums in partial.items()},
    )
