"""What is timed: the operations, as loops that one peer's process runs on its own clock."""

from __future__ import annotations

import itertools
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.peers.base import Peer, UnsupportedError
from shmacc_bench.workload import Workload, make_filling, make_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIN_SAMPLE_NS = 20_000  # shorter calls are timed in batches, or the clock would be the result
MAX_BATCH = 100
GRADIENTS = 8  # of other rows
WARM_UP = 2


class Operation(StrEnum):
    """What one sample is."""

    APPLY = "apply"
    """An apply of rows that are all there already; nothing else is there ("steady")."""
    APPLY_FULL = "apply, full table"
    """An apply of rows that are all there already, as is every other row of the table."""
    APPLY_OTHERS = "apply, full table, others each time"
    """The same, of other rows than the applies before: none of them is in a cache."""
    APPLY_FRESH = "apply, fresh round"
    """The first apply after a take: no row is there."""
    APPLY_NEW = "apply, new segment"
    """The first apply ever: the memory itself has yet to come from the system."""
    ROUND = "round"
    """Two applies of the same rows and the take of their mean."""
    TAKE = "take"
    """The take of the mean of two gradients of the same rows, alone."""


NEEDS_TAKE = (Operation.APPLY_FRESH, Operation.ROUND, Operation.TAKE)


class Session:
    """One peer with one workload open, ready to run blocks of any operation."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        self.peer = peer
        self.workload = workload
        peer.open(workload)
        # The same arrays each time: a gradient that was just computed is in the cache, as this one
        # is, and it is so for every peer and for the limits.
        self.gradient = make_gradient(workload)
        self.prepared = peer.prepare(self.gradient)
        self.others: Iterator[Any] = iter(())
        self.batch = 1
        self.sampler: Callable[[], int] = self._apply

    def begin(self, operation: Operation) -> None:
        """Bring the accumulator into the state that the operation starts from."""
        if operation in NEEDS_TAKE and not self.peer.has_take:
            raise UnsupportedError("nothing to take")
        self.batch = 1
        if operation is Operation.APPLY_NEW:
            self.sampler = self._apply_new
        elif operation is Operation.APPLY_FRESH:
            self.peer.apply(self.prepared)
            self.sampler = self._apply_fresh
        elif operation is Operation.ROUND:
            self._empty()
            self.sampler = self._round
        elif operation is Operation.TAKE:
            self._empty()
            self.sampler = self._take
        elif operation is Operation.APPLY_OTHERS:
            self._empty()
            self._fill()
            gradients = [make_gradient(self.workload, seed) for seed in range(1, GRADIENTS + 1)]
            self.others = itertools.cycle([self.peer.prepare(of) for of in gradients])
            self.sampler = self._apply_another
        else:
            if self.peer.has_take:
                self._empty()
                if operation is Operation.APPLY_FULL:
                    self._fill()
            self.peer.apply(self.prepared)
            self.sampler = self._apply
            duration = min(self._apply() for _ in range(3))
            self.batch = min(MAX_BATCH, max(1, MIN_SAMPLE_NS // max(1, duration)))

    def block(self, budget_ns: int, most: int) -> list[float]:
        """Return nanoseconds a call, of as many samples as the budget holds (one at the least)."""
        samples: list[float] = []
        begun = time.perf_counter_ns()
        for warm_up in range(WARM_UP):
            self.sampler()
            if warm_up == 0 and time.perf_counter_ns() - begun > budget_ns:
                break
        begun = time.perf_counter_ns()
        while not samples or (len(samples) < most and time.perf_counter_ns() - begun < budget_ns):
            samples.append(self.sampler() / self.batch)
        return samples

    def check(self) -> str:
        """Return "right" if a round of this peer gives the mean it should, else what is off."""
        if not self.peer.has_take:
            return "no take"
        self._empty()
        self.peer.apply(self.prepared)
        self.peer.apply(self.prepared)
        taken = self.peer.take(2)
        indices, sums = self.gradient.merged()
        mean = sums
        if indices.size and self.peer.counts_occurrences:
            mean = sums / self.gradient.occurrences()[:, None]
        if not np.array_equal(np.sort(taken.indices), indices):
            return "wrong rows (repeats are not merged)"
        values = np.asarray(taken.values, np.float64)
        if indices.size:
            values = values[np.argsort(taken.indices, kind="stable")]
        return "right" if np.allclose(values, mean, rtol=0.02, atol=0.02) else "wrong values"

    def close(self) -> None:
        """Close the workload."""
        self.peer.close()

    def _empty(self) -> None:
        self.peer.apply(self.prepared)
        self.peer.take(1)

    def _fill(self) -> None:
        for gradient in make_filling(self.workload):
            self.peer.apply(self.peer.prepare(gradient))

    def _apply(self) -> int:
        apply, prepared = self.peer.apply, self.prepared
        begun = time.perf_counter_ns()
        for _ in range(self.batch):
            apply(prepared)
        return time.perf_counter_ns() - begun

    def _apply_another(self) -> int:
        apply, prepared = self.peer.apply, next(self.others)
        begun = time.perf_counter_ns()
        apply(prepared)
        return time.perf_counter_ns() - begun

    def _apply_fresh(self) -> int:
        self.peer.take(1)
        return self._apply()

    def _apply_new(self) -> int:
        self.peer.close()
        self.peer.open(self.workload)
        self.prepared = self.peer.prepare(self.gradient)
        return self._apply()

    def _round(self) -> int:
        peer, prepared = self.peer, self.prepared
        begun = time.perf_counter_ns()
        peer.apply(prepared)
        peer.apply(prepared)
        peer.take(2)
        return time.perf_counter_ns() - begun

    def _take(self) -> int:
        peer: Any = self.peer
        peer.apply(self.prepared)
        peer.apply(self.prepared)
        begun = time.perf_counter_ns()
        peer.take(2)
        return time.perf_counter_ns() - begun
