"""The model that training campaigns train, and what its parameters must be after each round.

A gradient is a function of its worker, of the step and of the parameters that it was computed
from. Each round has one gradient of each worker. So the parameters are a function of the step, and
one process alone can compute them, in NumPy: whatever was lost, doubled, torn or read too early
shows in each later step. Gradients are small integers, so that sums are the same in any order.

The ledger has a row for each step. A round adds a digit for each worker there, so the row shows
which gradients were in the round, and how often the round was put into the parameters.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmacc import TensorSpec, optim

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = dict[str, npt.NDArray[Any]]

STEPS: Final = 1 << 16
"""A campaign has fewer rounds than this."""

_ROWS, _WIDTH, _TOUCHED = 300, 8, 12
_DENSE: Final = 6000
_BASE: Final = 8  # base of the ledger's numbers, which have a digit for each worker
_SKIPPED: Final = 13  # one round in 13 is skipped

CONTENTS: Final[dict[str, Any]] = {
    "rows": np.ones((_ROWS, _WIDTH), np.float32),
    "dense": np.zeros(_DENSE),
    "whole": np.zeros(16),
    "own": np.zeros(8, np.int64),  # has no optimizer: the chief computes its contents
    "ledger": TensorSpec((STEPS, 1), "float64"),
}
OPTIMIZERS: Final[dict[str, optim.Optimizer]] = {
    "rows": optim.Adagrad(0.5),
    "dense": optim.Adam(0.25),
    "whole": optim.SGD(1.0),
    "ledger": optim.SGD(1.0),
}
SPARSE: Final = ("rows", "ledger")


def gradient(worker: int, step: int, arrays: Any) -> dict[str, Any]:
    """Return a worker's gradient of that step, as computed from these parameters."""
    rng = np.random.default_rng([worker, step])
    rows = rng.integers(0, _ROWS, _TOUCHED)
    seen = np.floor(arrays["rows"][rows]) % 3
    return {
        "rows": (rows, (rng.integers(-2, 2, (_TOUCHED, _WIDTH)) + seen).astype(np.float32)),
        "dense": np.full(_DENSE, worker + step % 3 - 1) + np.floor(arrays["dense"]) % 2,
        "whole": rng.integers(-3, 3, 16) + arrays["whole"] % 2,
        "ledger": ([step], [[-digit(worker)]]),
    }


def digit(worker: int) -> float:
    """Return what a worker adds to a step's row of the ledger."""
    return float(_BASE**worker)


def own(arrays: Any, step: int) -> npt.NDArray[Any]:
    """Return the new contents of the array without an optimizer, after the round of a step."""
    new: npt.NDArray[Any] = arrays["own"] * 3 + step
    return new


def skips(step: int) -> bool:
    """Whether the round of that step is skipped."""
    return step % _SKIPPED == _SKIPPED - 1


def digest(arrays: Any) -> int:
    """Return a number other than 0 that depends on every bit outside the ledger."""
    found = 1
    for name in CONTENTS:
        if name != "ledger":
            found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), found)
    return found + 1


class Reference:
    """The parameters as one process makes them, without the library and the ledger."""

    def __init__(self, workers: int) -> None:
        """Start as the campaign does."""
        self.step = self._updates = 0
        self.arrays: Arrays = {
            name: array.copy() for name, array in CONTENTS.items() if name != "ledger"
        }
        self._workers = workers
        self._accumulator = np.full((_ROWS, _WIDTH), 0.1, np.float32)
        self._m, self._v = np.zeros(_DENSE), np.zeros(_DENSE)

    def advance(self) -> None:
        """Make the next round."""
        step, arrays = self.step, self.arrays
        if not skips(step):
            of_workers = [gradient(worker, step, arrays) for worker in range(self._workers)]
            rows = np.zeros((_ROWS, _WIDTH), np.float32)
            for one in of_workers:
                np.add.at(rows, one["rows"][0], one["rows"][1])
            touched = np.unique(np.concatenate([one["rows"][0] for one in of_workers]))
            arrays["own"] = own(arrays, step)
            self._adagrad(touched, rows[touched])
            self._adam(np.sum([one["dense"] for one in of_workers], axis=0))
            arrays["whole"] = arrays["whole"] - np.sum([one["whole"] for one in of_workers], axis=0)
        self.step += 1

    def _adagrad(self, rows: npt.NDArray[Any], g: npt.NDArray[Any]) -> None:
        self._accumulator[rows] += g * g
        self.arrays["rows"][rows] -= np.float32(0.5) * g / np.sqrt(self._accumulator[rows])

    def _adam(self, g: npt.NDArray[Any]) -> None:
        self._updates += 1
        t, beta_1, beta_2 = self._updates, 0.9, 0.999
        rate = 0.25 * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        self._m += (g - self._m) * (1 - beta_1)
        self._v += (g * g - self._v) * (1 - beta_2)
        self.arrays["dense"] -= rate * self._m / (np.sqrt(self._v) + 1e-8)
