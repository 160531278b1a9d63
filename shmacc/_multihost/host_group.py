"""A group on one of many hosts: what the protocol needs of a group beyond its public methods."""

from collections.abc import Iterable
from functools import cached_property

from shmacc import _core
from shmacc._accumulators import rounds
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._core import TakenRound
from shmacc._multihost.columns import Format, Piece
from shmacc._multihost.share import Share
from shmacc._records.taken import GroupPartial, GroupTaken


class HostGroup(AccumulatorGroup):
    """An ordinary group, to the processes of its host; engines and simulations drive it."""

    @property
    def handle(self) -> _core.Handle:
        """The extension's, of which rounds are made."""
        return self._handle

    @cached_property
    def _form(self) -> Format:
        return Format.of(
            (spec.name, spec.kind == "sparse", spec.shape or (), spec.dtype.partial)
            for spec in self._spec.members
        )

    def look(self, shards: int = 1) -> GroupPartial:
        """Return a copy of what it has, with rows shard by shard; consumes nothing."""
        return rounds.look(self._handle, self._partial, partial=True, shards=shards)

    def open_round(self, shards: int) -> tuple[int, GroupPartial]:
        """Open a round of whatever it has, at once; return its serial and a copy, as `look`."""
        taken = TakenRound(advance=False, seal=False, shards=shards)
        self._handle.open_round(taken, 0, 0, None, raise_departures=False, caller=None)
        return taken.serial, self._partial(taken)

    def reduce(self, pieces: Iterable[Piece], share: Share) -> GroupTaken:
        """Return the reduction of a round's pieces; nothing is added to the group.

        Results are those of one host to the bit where the order of additions does not matter.

        Args:
            pieces: This shard's of the round; its group, of `Plan.at_shard`, has their members.
            share: Of the round: its gradients count, also those that have nothing at this shard.

        Raises:
            OutOfRangeError: An integer result does not fit its dtype.
            InvalidArgumentError: A piece does not fit the group.
        """
        sums = [each for piece in pieces for each in piece.gradients(self._form)]
        taken = TakenRound(advance=True, seal=False)
        self._handle.reduce(taken, sums, share.count, share.weight, share.step)
        return self._taken(taken)
