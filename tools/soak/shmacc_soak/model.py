"""The model that training campaigns train, and what its parameters must be after each round.

A gradient is a function of its worker, of the step and of the parameters that it was computed
from. Each round has one gradient of each worker. So the parameters are a function of the step, and
one process alone can compute them: whatever was lost, doubled, torn or read too early shows in each
later step. Gradients are small integers, so that sums are the same in any order.

The ledger has a row for each step. A round adds a digit for each worker there, so the row shows
which gradients were in the round, and how often the round was put into the parameters.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmacc import AccumulatorGroup, Parameters, TensorSpec, optim

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def specs(params: Parameters) -> dict[str, Any]:
    """Return the members of the group whose rounds update these parameters."""
    found: dict[str, Any] = params.member_specs(["rows", "ledger"])
    del found["own"]
    return found


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


def update(params: Parameters, taken: Any) -> bool:
    """Update the parameters by a round, or skip it; False: the round was in them already."""
    if skips(taken.step):
        return params.skip(taken)
    return params.update(taken, {"own": params["own"] * 3 + taken.step})


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


def reference(workers: int) -> Iterator[Parameters]:
    """Yield the parameters of one process alone: at the start, and after each round."""
    with (
        Parameters(CONTENTS, optimizer=OPTIMIZERS) as params,
        AccumulatorGroup(specs(params), reduction_type="SUM") as group,
    ):
        for step in range(STEPS):
            yield params
            for worker in range(workers):
                group.apply(gradient(worker, step, params), step)
            with group.round(workers) as taken:
                update(params, taken)
