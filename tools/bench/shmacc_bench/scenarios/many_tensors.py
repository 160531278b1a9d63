"""A model of many small tensors: as one group, and as an accumulator for each tensor."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import shmacc
from shmacc import NEVER_STALE, AccumulatorGroup, ConditionalAccumulator, TensorSpec
from shmacc_bench.machine import SHARED_MEMORY, allocated_bytes
from shmacc_bench.samples import paired_ratio, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmacc_bench.peers.base import Peer

WIDTHS = (32, 64, 64, 32, 4)  # of the layers of each of two networks, as A3C has them
SHAPES = {
    f"{network}.{layer}.{what}": shape
    for network in ("actor", "critic")
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS))
    for what, shape in (("weights", (inputs, outputs)), ("bias", (outputs,)))
}
APPLIES = 100  # in a turn, and then a take


class Scenario:
    """One process; the two have their turns one after the other, many times."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del name, peer  # both ways are shmacc's own
        self.turns = 5 if quick else 40
        rng = np.random.default_rng(0)
        self.gradient = {
            key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()
        }
        prefix = f"bench.{os.getpid()}.tensors"
        specs = {key: TensorSpec(shape) for key, shape in SHAPES.items()}
        self.group = AccumulatorGroup(specs, f"{prefix}.group")
        self.singles = [
            (ConditionalAccumulator("float32", shape, f"{prefix}.single.{key}"), self.gradient[key])
            for key, shape in SHAPES.items()
        ]

    def step(self) -> dict[str, Any]:
        """Return the microseconds of an apply of all tensors in each turn, and the bytes held."""
        turns = [(_turn(self._as_group), _turn(self._as_singles)) for _ in range(self.turns)]
        return {
            "group": [group for group, _ in turns],
            "singles": [singles for _, singles in turns],
            "group_bytes": _bytes(self.group),
            "singles_bytes": sum(_bytes(acc) for acc, _ in self.singles),
        }

    def _as_group(self, applies: int) -> None:
        for _ in range(applies):
            self.group.apply(self.gradient, NEVER_STALE)
        self.group.take(applies)

    def _as_singles(self, applies: int) -> None:
        for _ in range(applies):
            for acc, array in self.singles:
                acc.apply_grad(array, NEVER_STALE)
        for acc, _ in self.singles:
            acc.take(applies)

    def close(self) -> None:
        """Remove the segments."""
        for acc in (self.group, *(acc for acc, _ in self.singles)):
            acc.unlink()
            acc.close()


def _turn(use: Callable[[int], None]) -> float:
    """Return the microseconds of an apply, the share of the take that ends the turn included."""
    begun = time.perf_counter_ns()
    use(APPLIES)
    return (time.perf_counter_ns() - begun) / APPLIES / 1000


def _bytes(acc: shmacc.AccumulatorGroup | shmacc.ConditionalAccumulator) -> int:
    return allocated_bytes(SHARED_MEMORY.glob(f"shmacc.*{acc.shared_name}"))


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return both distributions, their paired ratio, and the bytes of both."""
    group, singles = ([us for step in steps for us in step[of]] for of in ("group", "singles"))
    return {
        "tensors": len(SHAPES),
        "bytes": sum(4 * int(np.prod(shape)) for shape in SHAPES.values()),
        "group": summarise(group),
        "singles": summarise(singles),
        "ratio": paired_ratio([[us] for us in group], [[us] for us in singles]),
        "group_bytes": steps[-1]["group_bytes"],
        "singles_bytes": steps[-1]["singles_bytes"],
    }
