"""A tensor that gradients mark with their numbers, and in which they are found again.

What a gradient puts into a member consists of a body, which is one of a few, and of a mark of its
number. All values are small integers, so that sums are exact; a take's result is the sum of its
gradients, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmacc import IndexedSlicesSpec, TensorSpec

Array = npt.NDArray[Any]
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
    """What the numbers of a campaign's gradients stand for: whose, which members, which weight."""

    workers: int  # processes, which take turns in the numbers
    members: int = 1  # of the accumulator
    # Each has its number as contributor: applied again after a kill, it must not be in a round
    # twice.
    contribute: bool = False
    weighted: bool = False  # weights of 1 to 3

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


_BODIES: Final = 8
_BASE: Final = 2 * MOST  # of dense marks: their sum shows how often a gradient is in it


@dataclass(frozen=True)
class Marks:
    """What a take has of one member."""

    numbers: Numbers  # of the gradients found in it
    times: Numbers  # how often each is in it
    exact: bool  # it is their sum (or mean), and nothing else

    @classmethod
    def none(cls) -> Marks:
        """Of a member that is absent."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, exact=True)


def _signature(number: Any) -> Any:
    return number % 997 + 1


def _weight_of_bodies(numbers: Numbers, weights: Numbers) -> Numbers:
    return np.bincount(numbers % _BODIES, weights, minlength=_BODIES).astype(np.int64)


class SparseMember:
    """Rows that all gradients share, and above them one for each gradient there ever is."""

    def __init__(self, dtype: str, width: int, reduction: str, rows: int, touched: int) -> None:
        """Make the bodies: of so many shared rows, each touches some."""
        self.spec = IndexedSlicesSpec((None, width), dtype, reduction_type=reduction)
        self.title = f"sparse {dtype}, rows of {width}, {reduction}"
        self._reduction, self._rows = reduction, rows
        rng = np.random.default_rng(width)
        self._bodies: list[tuple[Array, Array]] = []
        self._sums = np.zeros((_BODIES, rows, width))
        self._touches = np.zeros((_BODIES, rows), dtype=np.int64)
        for body in range(_BODIES):
            indices = rng.choice(rows, size=touched, replace=False)
            if body % 2:
                indices.sort()
            values = rng.integers(-4, 5, size=(touched + 1, width))
            self._sums[body, indices] = values[:-1]
            self._touches[body, indices] = 1
            # The last row is to be the gradient's own.
            self._bodies.append((np.append(indices, 0), values.astype(dtype)))

    def part(self, gradients: Gradients, number: int) -> tuple[Array, ...]:  # noqa: ARG002
        """Return what that gradient has of this member; good until the next is made."""
        indices, values = self._bodies[number % _BODIES]
        indices[-1] = self._rows + number
        values[-1] = _signature(number)
        return indices, values

    def marks(self, gradients: Gradients, taken: Any, round_weight: int) -> Marks:
        """Find out which gradients are in it."""
        own = int(np.searchsorted(taken.indices, self._rows))
        numbers = taken.indices[own:] - self._rows
        weights = gradients.weights(numbers)
        counts = taken.row_counts
        bodies = _weight_of_bodies(numbers, counts[own:])
        row_weights = bodies @ self._touches
        rows = np.flatnonzero(row_weights)
        exact = (
            bool(np.all((numbers < MOST) & (counts[own:] % weights == 0)))
            and np.array_equal(taken.indices[:own], rows)
            and np.array_equal(counts[:own], row_weights[rows])
        )
        if exact:
            marks = np.outer(_signature(numbers) * counts[own:], np.ones(self._sums.shape[2]))
            expected = np.vstack([np.tensordot(bodies, self._sums, 1)[rows], marks])
            if self._reduction != "SUM":
                expected /= counts[:, None] if self._reduction == "MEAN" else round_weight
            exact = np.allclose(taken.values, expected, rtol=1e-12, atol=0)
        known = numbers < MOST
        return Marks(numbers[known], (counts[own:] // weights)[known], exact)


class DenseMember:
    """An array whose front all gradients share; each has an element of its own behind it."""

    def __init__(self, dtype: str, shared: int, reduction: str, places: int) -> None:
        """Make the bodies: of so many shared elements, and so many places for marks."""
        self.spec = TensorSpec((shared + places,), dtype, reduction_type=reduction)
        self.title = f"dense {dtype} of {shared + places}, {reduction}"
        self._reduction, self._shared = reduction, shared
        rng = np.random.default_rng(shared)
        self._sums = rng.integers(-4, 5, size=(_BODIES, shared))
        self._bodies = np.zeros((_BODIES, shared + places), dtype)
        self._bodies[:, :shared] = self._sums

    def part(self, gradients: Gradients, number: int) -> tuple[Array, ...]:
        """Return what that gradient has of this member; good until the next is made."""
        body = self._bodies[number % _BODIES]
        body[self._shared :] = 0
        body[self._shared + gradients.place(np.array(number))] = _BASE + number
        return (body,)

    def marks(self, gradients: Gradients, taken: Any, round_weight: int) -> Marks:
        """Find out which gradients are in it."""
        sums = taken.value.real
        if self._reduction != "SUM":
            sums = np.rint(sums * (taken.weight if self._reduction == "MEAN" else round_weight))
        sums = sums.astype(np.int64)
        own = sums[self._shared :]
        places = np.flatnonzero(own)
        weights = gradients.place_weights(places)
        times = np.maximum(own[places] // weights // _BASE, 1)
        numbers = own[places] // (weights * times) - _BASE
        known = (numbers >= 0) & (numbers < MOST) & (gradients.place(numbers) == places)
        exact = np.array_equal(own[places], weights * times * (_BASE + numbers))
        numbers, times, weights = numbers[known], times[known], weights[known]
        bodies = _weight_of_bodies(numbers, weights * times)
        exact = (
            exact
            and bool(known.all())
            and np.array_equal(sums[: self._shared], bodies @ self._sums)
        )
        return Marks(numbers, times, exact)


Member = SparseMember | DenseMember
