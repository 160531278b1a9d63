"""The gradients of a campaign: each identified by its number, and exact in any sum.

A gradient consists of a body, which is one of a few, and of a mark of its number. All values are
small integers, so that sums are exact; a take's result is the sum of its gradients, and nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

if TYPE_CHECKING:
    Array = npt.NDArray[Any]
    Numbers = npt.NDArray[np.int64]

MOST_WAITING: Final = 512
"""Workers hold back while more gradients than these wait to be taken."""

_BODIES: Final = 8


@dataclass(frozen=True)
class Contents:
    """What a take handed out.

    Attributes:
        numbers: Those of the gradients in it.
        whole: Whether it is exactly their sum (or mean).
    """

    numbers: Numbers
    whole: bool


def _signature(number: Any) -> Any:
    return number % 997 + 1


class SparsePlan:
    """Rows that all gradients share, and above them one for each gradient there ever is."""

    def __init__(self, dtype: str, width: int, reduction: str, rows: int, touched: int) -> None:
        """Make the bodies: of so many shared rows, each touches some."""
        self.title = f"sparse {dtype}, rows of {width}, {reduction}"
        self._dtype, self._width, self._reduction, self._rows = dtype, width, reduction, rows
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

    def create(self, shared_name: str) -> SparseConditionalAccumulator:
        """Make the accumulator."""
        shape = [None, self._width]
        return SparseConditionalAccumulator(
            self._dtype, shape, shared_name, reduction_type=self._reduction
        )

    def gradient(self, number: int, slot: int, turn: int) -> tuple[Array, ...]:  # noqa: ARG002
        """Make the gradient of that number; its arrays are good until the next is made."""
        indices, values = self._bodies[number % _BODIES]
        indices[-1] = self._rows + number
        values[-1] = _signature(number)
        return indices, values

    def contents(self, taken: Any) -> Contents:
        """Read what a take handed out."""
        own = int(np.searchsorted(taken.indices, self._rows))
        numbers = taken.indices[own:] - self._rows
        bodies = np.bincount(numbers % _BODIES, minlength=_BODIES)
        touches = bodies @ self._touches
        rows = np.flatnonzero(touches)
        expected = np.tensordot(bodies, self._sums, 1)[rows]
        if self._reduction == "MEAN":
            expected /= touches[rows, None]
        whole = (
            len(numbers) == taken.count
            and np.array_equal(taken.indices[:own], rows)
            and np.array_equal(taken.row_counts[:own], touches[rows])
            and bool(np.all(taken.row_counts[own:] == 1))
            and np.allclose(taken.values[:own], expected, rtol=1e-12, atol=0)
            and bool(np.all(taken.values[own:] == _signature(numbers)[:, None]))
        )
        return Contents(numbers, whole)


class DensePlan:
    """An array whose front all gradients share; each has an element of its own behind it.

    There are as many such elements for each worker as gradients of one worker can be in a round.
    """

    def __init__(self, dtype: str, shared: int, workers: int) -> None:
        self.title = f"dense {dtype} of {shared + workers * 2 * MOST_WAITING}"
        self._dtype, self._shared, self._each = dtype, shared, 2 * MOST_WAITING
        rng = np.random.default_rng(shared)
        self._sums = rng.integers(-4, 5, size=(_BODIES, shared))
        self._bodies = np.zeros((_BODIES, shared + workers * self._each), dtype)
        self._bodies[:, :shared] = self._sums

    def create(self, shared_name: str) -> ConditionalAccumulator:
        """Make the accumulator."""
        shape = self._bodies.shape[1:]
        return ConditionalAccumulator(self._dtype, shape, shared_name, reduction_type="SUM")

    def gradient(self, number: int, slot: int, turn: int) -> tuple[Array, ...]:
        """Make the gradient of that number, which is that worker's turn-th."""
        body = self._bodies[number % _BODIES]
        body[self._shared :] = 0
        body[self._shared + slot * self._each + turn % self._each] = number + 1
        return (body,)

    def contents(self, taken: Any) -> Contents:
        """Read what a take handed out."""
        own = taken.value[self._shared :]
        numbers = own[own != 0].real.astype(np.int64) - 1
        bodies = np.bincount(numbers % _BODIES, minlength=_BODIES)
        whole = len(numbers) == taken.count and np.array_equal(
            taken.value[: self._shared], bodies @ self._sums
        )
        return Contents(numbers, bool(whole))


Plan = SparsePlan | DensePlan


def plans(workers: int) -> list[Plan]:
    """All there are, for so many workers."""
    return [
        SparsePlan("float32", 16, "SUM", rows=4000, touched=2000),
        DensePlan("float32", 50_000, workers),
        SparsePlan("int64", 1, "SUM", rows=20_000, touched=8000),
        SparsePlan("float64", 64, "MEAN", rows=1000, touched=400),
        DensePlan("int64", 5000, workers),
        SparsePlan("complex64", 4, "SUM", rows=500, touched=100),
    ]
