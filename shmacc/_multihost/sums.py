"""A shard's sums: a group adds, divides and converts, so results are those of one host.

To the bit where the order of additions does not matter.
"""

from collections.abc import Mapping

from shmacc._group import AccumulatorGroup
from shmacc._multihost.messages import BatchKey, Opened
from shmacc._records import GroupPartial, GroupTaken


class Sums:
    """Adds pieces up as they come, so that little is left to do when their round is opened.

    Which pieces are a round's is known only then. If one was added that is not (its host has
    shipped again, or was lost), it starts over, since sums cannot be taken apart.

    Args:
        group: Of `Plan.at_shard`, this shard's own.
    """

    def __init__(self, group: AccumulatorGroup) -> None:
        self._group = group
        self._added: set[BatchKey] = set()

    def add(self, key: BatchKey, piece: GroupPartial) -> None:
        """Add a piece, unless there is one of the same host, which it may replace.

        Raises:
            InvalidArgumentError: It does not fit the group; nothing was added.
        """
        if not any(other.host == key.host for other in self._added):
            self._group.apply_partial(piece, self._group.global_step)
            self._added.add(key)

    def forget(self) -> None:
        """Drop what was added."""
        self._group.take_partial(0)
        self._added.clear()

    def reduced(self, pieces: Mapping[BatchKey, GroupPartial], opened: Opened) -> GroupTaken:
        """Return the reduction of a round's pieces, and forget them.

        Args:
            pieces: This shard's of the round.
            opened: The round: its gradients count, also those that have nothing at this shard.

        Raises:
            OutOfRangeError: An integer result does not fit its dtype.
            InvalidArgumentError: A piece does not fit the group.
        """
        try:
            if not self._added <= pieces.keys():
                self.forget()
            for key in pieces.keys() - self._added:
                self._group.apply_partial(pieces[key], self._group.global_step)
            count = sum(piece.count for piece in pieces.values())
            weight = sum(piece.weight for piece in pieces.values())
            if count < opened.count:
                rest = GroupPartial({}, opened.count - count, opened.step, opened.weight - weight)
                self._group.apply_partial(rest, self._group.global_step)
            taken = self._group.take(1)
        except BaseException:
            self.forget()
            raise
        self._added.clear()
        return taken
