"""What a shard makes of the pieces of a round: sums, divided and converted as on one host.

Results are those of one host to the bit where the order of additions does not matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._core import TakenRound
from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._records.taken import GroupPartial, GroupTaken


@dataclass(frozen=True, slots=True)
class Part:
    """What determines a shard's part of a round: its pieces, and numbers of the whole round."""

    fence: Fence
    keys: tuple[BatchKey, ...]
    count: int
    weight: int
    step: int

    @classmethod
    def of(cls, opened: Opened, shard: int) -> "Part":
        """Return a shard's part of a round."""
        keys = opened.of_shard(shard)
        return cls(opened.fence, keys, opened.count, opened.weight, opened.step)


def reduced(group: AccumulatorGroup, pieces: Iterable[GroupPartial], part: Part) -> GroupTaken:
    """Return the reduction of a round's pieces; nothing is added to the group.

    Args:
        group: Of `Plan.at_shard`: its members are those of the pieces.
        pieces: This shard's of the round.
        part: Of the round: its gradients count, also those that have nothing at this shard.

    Raises:
        OutOfRangeError: An integer result does not fit its dtype.
        InvalidArgumentError: A piece does not fit the group.
    """
    sums = [each for piece in pieces for each in group._parts(piece)[0]]  # noqa: SLF001
    place = TakenRound(advance=True, seal=False)
    group._handle.reduce(place, sums, part.count, part.weight, part.step)  # noqa: SLF001
    return group._taken(place)  # noqa: SLF001
