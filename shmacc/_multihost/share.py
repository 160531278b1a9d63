"""A shard's share of a round."""

from dataclasses import dataclass
from typing import Self

from shmacc._multihost.messages import BatchKey, Fence, Opened


@dataclass(frozen=True, slots=True)
class Share:
    """What determines a shard's share of a round: its pieces, and numbers of the whole round."""

    fence: Fence
    keys: tuple[BatchKey, ...]
    count: int
    weight: int
    step: int

    @classmethod
    def of(cls, opened: Opened, shard: int) -> Self:
        """Return a shard's share of a round."""
        keys = opened.of_shard(shard)
        return cls(opened.fence, keys, opened.count, opened.weight, opened.step)
