"""Times blocks of one operation on one workload, in a peer's own process."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from shmacc_bench.peers import peer_class
from shmacc_bench.workload import Workload, make_filling, make_gradient

# The operations that can be timed:
APPLY: Final = "apply"  # to rows that are there already; the table has no others
APPLY_FULL: Final = "apply, full table"  # every row of the table is there
APPLY_OTHERS: Final = "apply, full table, others each time"  # so that no cache has the rows
APPLY_NEW: Final = "apply, new segment"  # the first apply: the kernel has to provide the memory
ROUND: Final = "round"  # two gradients of the same rows, and the take of their mean

_SHORTEST: Final = 20_000  # ns: shorter calls are timed in batches, because the clock takes time
_BATCH: Final = 100
_GRADIENTS: Final = 8
_TOLERANCE: Final = 0.02


def microseconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the microseconds of a call, as the mean of several calls."""
    begun = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begun) / calls / 1000


class Timed:
    """One peer, with one workload open."""

    def __init__(self, name: str) -> None:
        self.peer = peer_class(name)()
        self._stack = ExitStack()

    def open(self, workload: Workload) -> str:
        """Make an accumulator; return what is wrong with the peer's answer, "" if nothing is."""
        self._stack.close()
        self.workload = workload
        self.peer.open(workload)
        self._stack.callback(self.peer.close)
        self.gradient = make_gradient(workload)
        self.prepared = self.peer.prepare(self.gradient)
        return self._check() if self.peer.has_take else ""

    def begin(self, operation: str) -> None:
        """Bring the accumulator into the state that the operation starts from."""
        self.batch = 1
        self.others: Iterator[Any] = itertools.repeat(self.prepared)
        calls = {APPLY_NEW: self._apply_new, ROUND: self._round}
        self.call: Callable[[], int] = calls.get(operation, self._apply)
        if operation in {APPLY_FULL, APPLY_OTHERS}:
            for gradient in make_filling(self.workload):
                self.peer.apply(self.peer.prepare(gradient))
        if operation == APPLY_OTHERS:
            gradients = [make_gradient(self.workload, seed) for seed in range(1, _GRADIENTS + 1)]
            self.others = itertools.cycle([self.peer.prepare(one) for one in gradients])
        elif operation not in calls:
            self.peer.apply(self.prepared)
            duration = min(self._apply() for _ in range(3))
            self.batch = min(_BATCH, max(1, _SHORTEST // max(1, duration)))

    def block(self, budget: int, most: int) -> list[float]:
        """Return samples, in nanoseconds a call: at least one, and as many as the budget allows.

        The first calls are not counted, because the previous peer has filled the caches.
        """
        samples: list[float] = []
        begun = time.perf_counter_ns()
        self.call()
        if time.perf_counter_ns() - begun < budget:
            self.call()
        begun = time.perf_counter_ns()
        while not samples or (len(samples) < most and time.perf_counter_ns() - begun < budget):
            samples.append(self.call() / self.batch)
        return samples

    def close(self) -> None:
        """Close the accumulator, and end the peer's server, if it has one."""
        self._stack.close()
        self.peer.shutdown()

    def _check(self) -> str:
        """Compare a round's mean with NumPy's in float64; return what is wrong, if anything."""
        for _ in range(2):
            self.peer.apply(self.prepared)
        rows, values = self.peer.take(2)
        if rows is None:
            expected = self.gradient.values
        else:
            distinct, expected, repeats = self.gradient.merged()
            if self.peer.counts_repeats:
                expected = expected / repeats[:, None]
            if not np.array_equal(np.sort(rows), distinct):
                return "repeated rows are not merged"
            values = values[np.argsort(rows)]
        right = np.allclose(values, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
        return "" if right else "other values"

    def _apply(self) -> int:
        apply, prepared = self.peer.apply, next(self.others)
        begun = time.perf_counter_ns()
        for _ in range(self.batch):
            apply(prepared)
        return time.perf_counter_ns() - begun

    def _apply_new(self) -> int:
        self.peer.close()
        self.peer.open(self.workload)
        prepared = self.peer.prepare(self.gradient)
        begun = time.perf_counter_ns()
        self.peer.apply(prepared)
        return time.perf_counter_ns() - begun

    def _round(self) -> int:
        peer, prepared = self.peer, self.prepared
        begun = time.perf_counter_ns()
        peer.apply(prepared)
        peer.apply(prepared)
        peer.take(2)
        return time.perf_counter_ns() - begun
