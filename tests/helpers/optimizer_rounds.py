"""Rounds of updates, for comparison with the same updates by another library."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import AccumulatorGroup, Parameters, optim

Array = npt.NDArray[Any]

_ROWS, _WIDTH, _ROUNDS = 40, 12, 8


class Ours:
    """Parameters and a group of one member, updated by one gradient a round."""

    def __init__(self, table: Array, optimizer: optim.Optimizer, *, sparse: bool) -> None:
        self.params = Parameters({"table": table}, optimizer=optimizer)
        specs = self.params.member_specs(sparse=["table"] if sparse else ())
        self.group = AccumulatorGroup(specs)

    def update(self, gradient: Any) -> None:
        """Apply the gradient, and update the parameters in a round."""
        assert self.group.apply({"table": gradient}, self.group.global_step)
        with self.group.round(1) as taken:
            assert self.params.update(taken)

    def close(self) -> None:
        self.group.close()
        self.params.close()


def gradients(seed: int, dtype: str, *, sparse: bool) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(_ROUNDS):
        rows = np.sort(rng.choice(_ROWS, 15, replace=False)) if sparse else np.arange(_ROWS)
        made.append((rows, rng.standard_normal((len(rows), _WIDTH)).astype(dtype)))
    return made


def beginning(dtype: str) -> Array:
    """Return contents far from zero, where errors of TensorFlow's float32 powers would show."""
    rng = np.random.default_rng(0)
    numbers = rng.uniform(0.5, 2, (_ROWS, _WIDTH)) * rng.choice([-1, 1], (_ROWS, _WIDTH))
    return np.asarray(numbers, dtype)


def assert_close(ours: Array, theirs: Array, history: Array, tolerance: float = 1e-6) -> None:
    """Assert that no element differs by more than `tolerance * history`.

    `history` is the sum of the absolute values of the first contents and of all changes.
    """
    assert np.all(np.abs(ours - theirs) <= tolerance * history)
