"""A host's segment, as its forwarder uses it: the actions of forwarder.py on an ordinary group.

The seal is a round that the forwarder has open: applies of this step are refused, later ones wait,
nothing is consumed, and the death of the forwarder ends it.
"""

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

    def deaths(self) -> WorkerDiedError | None:
        """Return the error for processes that had applied and are gone, as a take is told; once."""
        try:
            self._handle.check_departures()
        except WorkerDiedError as error:
            return error
        return None

    def copy(self) -> GroupPartial:
        """Return a copy of what it has; neither seals nor consumes."""
        return self.group.look()

    def seal(self) -> GroupPartial:
        """Open a round, unless it is open, and return a copy of what it has; consumes nothing.

        Rows come shard by shard, as `Plan.split` takes them.
        """
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
            self.reset(step)

    def reset(self, step: int) -> None:
        """Empty it and set its step; an open round ends."""
        self._handle.restore([], step, (0, 0, None, None))
        self._forget_round()

    def set_step(self, step: int) -> None:
        """Set the step; gradients stay; an open round ends."""
        self._handle.set_step(step)
        self._forget_round()

    def _forget_round(self) -> None:
        self._handle.give_up_round(self._round)
        self._round = 0


def describe(partial: GroupPartial) -> Sealed:
    """Return what the owner must know of a sealed segment."""
    return Sealed(
        partial.count,
        partial.weight,
        frozenset(partial.contributors.tolist()),
        {name: (sums.count, sums.weight) for name, sums in partial.items()},
    )
