"""What a shard makes of the pieces of a round: sums, divided and converted as on one host.

Results are those of one host to the bit where the order of additions does not matter.
"""

from collections.abc import Iterable

from shmacc._core import TakenRound
from shmacc._group import AccumulatorGroup
from shmacc._multihost.messages import Opened
from shmacc._records import GroupPartial, GroupTaken


def reduced(group: AccumulatorGroup, pieces: Iterable[GroupPartial], opened: Opened) -> GroupTaken:
    """Return the reduction of a round's pieces; nothing is added to the group.

    Args:
        group: Of `Plan.at_shard`: its members are those of the pieces.
        pieces: This shard's of the round.
        opened: The round: its gradients count, also those that have nothing at this shard.

    Raises:
        OutOfRangeError: An integer result does not fit its dtype.
        InvalidArgumentError: A piece does not fit the group.
    """
    parts = [part for piece in pieces for part in group._parts(piece)[0]]  # noqa: SLF001
    place = TakenRound(advance=True, seal=False)
    group._handle.reduce(place, parts, opened.count, opened.weight, opened.step)  # noqa: SLF001
    return group._taken(place)  # noqa: SLF001
