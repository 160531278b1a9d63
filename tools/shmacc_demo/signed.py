"""Accumulators whose gradients carry the signature of the worker that gave them.

A signature is an extra row below a table, or an extra entry at the end of a vector, that belongs to
one worker alone. It is part of the gradient, so it is in the accumulator exactly if the gradient
is: the sum shows whose gradients it contains, and how often.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

import shmacc
from shmacc_demo.ledger import Account
from shmacc_demo.model import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

Accumulator = TypeVar(
    "Accumulator", shmacc.SparseConditionalAccumulator, shmacc.ConditionalAccumulator
)
Part = TypeVar("Part")


class ExactnessError(RuntimeError):
    """A gradient was lost, or counted twice: the one thing that must not happen."""


class Signed(abc.ABC, Generic[Accumulator, Part]):
    """One accumulator, with `size` rows or entries of the model and then the signatures."""

    def __init__(self, accumulator: Accumulator, size: int) -> None:
        self.accumulator: Accumulator = accumulator
        self._size = size
        self.taken = 0
        """How many gradients the means were of, all together."""
        self._put_back = 0

    @abc.abstractmethod
    def give(self, part: Part, step: int, worker: int) -> bool:
        """Sign and apply; False if the step is over."""

    @abc.abstractmethod
    def take(self, required: int, timeout: float | None = None) -> Part:
        """Seal the step and take the mean of its gradients, when that many are there."""

    @abc.abstractmethod
    def signers(self, step: int) -> frozenset[int]:
        """See whose gradients are there, without taking any of them away."""

    def account(self, name: str, given: int) -> Account:
        """Compare the accumulator's counters with what was taken here."""
        stats = self.accumulator.stats()
        return Account(
            part=name,
            given=given,
            accepted=stats.applied - self._put_back,
            refused=stats.dropped,
            handed_out=stats.taken - self._put_back,
            taken=self.taken,
            left=stats.discarded + stats.num_accumulated,
            recoveries=stats.recoveries,
        )

    def _check(self, signers: NDArray[np.int64], times: NDArray[np.int64], count: int) -> None:
        if len(signers) != count or not (times == 1).all():
            raise ExactnessError(
                f"{self.accumulator.shared_name} holds {count} gradients, which were signed by "
                f"the workers {signers.tolist()}, {times.tolist()} times"
            )

    def _note_put_back(self, count: int, *, accepted: bool) -> None:
        if not accepted:
            raise ExactnessError(f"{self.accumulator.shared_name} did not take back its own")
        self._put_back += count


class SignedTable(Signed[shmacc.SparseConditionalAccumulator, Rows]):
    """A sparse accumulator for the rows of a table."""

    @classmethod
    def create(cls, name: str, words: int, width: int, workers: int) -> SignedTable:
        """Make a new one."""
        # The chief divides by itself; CMEAN documents the divisor for inspection: all gradients.
        return cls(
            shmacc.SparseConditionalAccumulator(
                "float32", (words + workers, width), shared_name=name, reduction_type="CMEAN"
            ),
            words,
        )

    @classmethod
    def attach(cls, name: str, words: int) -> SignedTable:
        """Find the one of this name; NotFoundError if it is gone."""
        accumulator = shmacc.attach(name)
        if not isinstance(accumulator, shmacc.SparseConditionalAccumulator):
            raise TypeError(f"{name} is not a sparse accumulator")
        return cls(accumulator, words)

    def give(self, part: Rows, step: int, worker: int) -> bool:
        """Sign and apply; False if the step is over."""
        values = np.zeros((len(part.indices) + 1, part.values.shape[1]), np.float32)
        values[:-1] = part.values
        indices = np.append(part.indices, self._size + worker)
        return self.accumulator.apply_grad(indices, values, local_step=step)

    def take(self, required: int, timeout: float | None = None) -> Rows:
        """Seal the step and take the mean of its gradients, when that many are there."""
        sums = self.accumulator.take_partial(required, timeout=timeout, seal=True)
        ours = sums.indices < self._size
        self._check(sums.indices[~ours] - self._size, sums.row_counts[~ours], sums.count)
        self.taken += sums.count
        mean = np.asarray(sums.values[ours] / np.float32(sums.count), np.float32)
        return Rows(sums.indices[ours], mean)

    def signers(self, step: int) -> frozenset[int]:
        """See whose gradients are there, without taking any of them away."""
        sums = self.accumulator.take_partial(0)
        if sums.count == 0:
            return frozenset()
        accepted = self.accumulator.apply_partial(sums, local_step=step)
        self._note_put_back(sums.count, accepted=accepted)
        return frozenset((sums.indices[sums.indices >= self._size] - self._size).tolist())


class SignedVector(Signed[shmacc.ConditionalAccumulator, "NDArray[np.float32]"]):
    """A dense accumulator for a vector."""

    @classmethod
    def create(cls, name: str, length: int, workers: int) -> SignedVector:
        """Make a new one."""
        return cls(
            shmacc.ConditionalAccumulator("float32", (length + workers,), shared_name=name), length
        )

    @classmethod
    def attach(cls, name: str, length: int) -> SignedVector:
        """Find the one of this name; NotFoundError if it is gone."""
        accumulator = shmacc.attach(name)
        if not isinstance(accumulator, shmacc.ConditionalAccumulator):
            raise TypeError(f"{name} is not a dense accumulator")
        return cls(accumulator, length)

    def give(self, part: NDArray[np.float32], step: int, worker: int) -> bool:
        """Sign and apply; False if the step is over."""
        (length,) = self.accumulator.shape or (0,)
        value = np.zeros(length or 0, np.float32)
        value[: self._size] = part
        value[self._size + worker] = 1
        return self.accumulator.apply_grad(value, local_step=step)

    def take(self, required: int, timeout: float | None = None) -> NDArray[np.float32]:
        """Seal the step and take the mean of its gradients, when that many are there."""
        sums = self.accumulator.take_partial(required, timeout=timeout, seal=True)
        times = sums.value[self._size :].astype(np.int64)
        (signers,) = times.nonzero()
        self._check(signers, times[signers], sums.count)
        self.taken += sums.count
        return np.asarray(sums.value[: self._size] / np.float32(sums.count), np.float32)

    def signers(self, step: int) -> frozenset[int]:
        """See whose gradients are there, without taking any of them away."""
        sums = self.accumulator.take_partial(0)
        if sums.count == 0:
            return frozenset()
        accepted = self.accumulator.apply_partial(sums, local_step=step)
        self._note_put_back(sums.count, accepted=accepted)
        return frozenset(sums.value[self._size :].nonzero()[0].tolist())
