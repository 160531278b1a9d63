"""What the number of a gradient stands for: whose it is, which members it touches, its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

MOST: Final = 1 << 20
"""More gradients than a campaign can come to."""

TURNS: Final = 1024
"""More gradients of one worker than can be in a round."""

_WEIGHTS: Final = 3
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


@dataclass(frozen=True)
class Gradients:
    """Those of a campaign.

    Attributes:
        workers: How many processes they are of, which take turns in the numbers.
        members: How many members the accumulator has.
        contribute: Whether each has its number as contributor: applied again after a kill, it must
            not be in a round twice.
        weighted: Whether they have weights, of 1 to 3.
    """

    workers: int
    members: int = 1
    contribute: bool = False
    weighted: bool = False

    def number(self, slot: int, turn: int) -> int:
        """Return the number of a worker's turn-th gradient."""
        return turn * self.workers + slot

    @property
    def places(self) -> int:
        """How many places there are, see `place`."""
        return self.workers * TURNS

    def place(self, numbers: Numbers) -> Numbers:
        """Return the place of each, which no other one has in the same round."""
        return numbers % self.workers * TURNS + numbers // self.workers % TURNS

    def place_weights(self, places: Numbers) -> Numbers:
        """Return the weight of the gradients that have these places."""
        return 1 + places % _WEIGHTS if self.weighted else np.ones_like(places)

    def weights(self, numbers: Numbers) -> Numbers:
        """Return the weight of each."""
        return self.place_weights(self.place(numbers))

    def touches(self, numbers: Numbers) -> Truths:
        """Return which members each touches: about half of them, and one at least."""
        hashed = (numbers.astype(np.uint64) * _SPREAD)[:, None]
        members = np.arange(self.members)
        some: Truths = (hashed >> (63 - members).astype(np.uint64)) & np.uint64(1) == 1
        some |= numbers[:, None] % self.members == members
        return some
