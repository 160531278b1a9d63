"""The accumulators of the campaigns, how gradients are applied to them, and how takes are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shmacc import AccumulatorGroup, ConditionalAccumulator, SparseConditionalAccumulator
from shmacc_soak.members import NO_MARKS, DenseMember, Gradients, Member, Numbers, SparseMember

MOST_WAITING: Final = 512
"""Workers pause while more gradients than this wait to be taken."""


@dataclass(frozen=True)
class Contents:
    """What a take handed out."""

    numbers: Numbers  # the gradients in it, ascending
    torn: int  # gradients missing from some members, and members that are not their sum
    repeated: int  # gradients that are in it more than once
    misreported: int  # counts, weights and lists of contributors that are wrong


@dataclass(frozen=True)
class Plan:
    """An accumulator, and its gradients."""

    title: str
    members: dict[str, Member]  # by name; a single accumulator has one, named ""
    gradients: Gradients
    # True: all takes are rounds and are noted in their blocks, so none is missed. False: a take is
    # noted when it is over, if its taker still lives.
    chief: bool = False
    lanes: int = 1
    capacity: int | None = None

    @property
    def _is_single(self) -> bool:
        return "" in self.members

    def create(self, shared_name: str) -> Any:
        """Make the accumulator."""
        specs = {name: member.spec for name, member in self.members.items()}
        if not self._is_single:
            return AccumulatorGroup(specs, shared_name, lanes=self.lanes, capacity=self.capacity)
        spec = specs[""]
        sparse = isinstance(self.members[""], SparseMember)
        make: Any = SparseConditionalAccumulator if sparse else ConditionalAccumulator
        return make(
            spec.dtype,
            spec.shape,
            shared_name,
            reduction_type=spec.reduction_type,
            lanes=self.lanes,
            capacity=self.capacity,
        )

    def apply(self, acc: Any, number: int, step: int, timeout: float | None) -> bool:
        """Apply the gradient of that number."""
        one = np.array([number])
        gradient = {
            name: member.part(self.gradients, number)
            for (name, member), touched in zip(
                self.members.items(), self.gradients.touches(one)[0], strict=True
            )
            if touched
        }
        terms = {
            "contributor": number if self.gradients.contribute else None,
            "weight": int(self.gradients.weights(one)[0]),
            "timeout": timeout,
        }
        if self._is_single:
            return bool(acc.apply_grad(*gradient[""], local_step=step, **terms))
        parts = {name: part if len(part) > 1 else part[0] for name, part in gradient.items()}
        return bool(acc.apply(parts, step, **terms))

    def contents(self, taken: Any) -> Contents:
        """Read what a take handed out."""
        parts = {"": taken} if self._is_single else taken
        found = [
            member.marks(self.gradients, parts[name], taken.weight) if name in parts else NO_MARKS
            for name, member in self.members.items()
        ]
        numbers = np.unique(np.concatenate([marks.numbers for marks in found]))
        times = np.zeros((len(numbers), len(found)), np.int64)
        for member, marks in enumerate(found):
            times[np.searchsorted(numbers, marks.numbers), member] = marks.times
        often = times.max(axis=1, initial=0)
        torn = np.any(times != often[:, None] * self.gradients.touches(numbers), axis=1)

        weights = self.gradients.weights(numbers)
        counts, sums = times.sum(axis=0), weights @ times
        of_members = [
            (parts[name].count, parts[name].weight) == (counts[member], sums[member])
            for member, name in enumerate(self.members)
            if name in parts
        ]
        contributors = numbers if self.gradients.contribute else numbers[:0]
        checks = [
            taken.count == often.sum(),
            taken.weight == weights @ often,
            np.array_equal(taken.contributors, contributors),
            *of_members,
        ]
        return Contents(
            numbers,
            torn=int(np.count_nonzero(torn)) + sum(not marks.exact for marks in found),
            repeated=int(np.count_nonzero(often > 1)),
            misreported=sum(not check for check in checks),
        )


def plans(workers: int) -> list[Plan]:
    """Return all plans, for this number of workers."""

    def single(title: str, member: Member) -> tuple[str, dict[str, Member], Gradients]:
        return title, {"": member}, Gradients(workers)

    def group(
        title: str, *members: Member, **of_the_gradients: bool
    ) -> tuple[str, dict[str, Member], Gradients]:
        named = {f"member {number}": member for number, member in enumerate(members)}
        return title, named, Gradients(workers, len(members), **of_the_gradients)

    places = Gradients(workers).places
    mixed: list[Member] = [
        SparseMember("float32", 16, "SUM", rows=2000, touched=500),
        DenseMember("float32", 5000, "SUM", places),
        SparseMember("float64", 8, "MEAN", rows=500, touched=200),
        DenseMember("int64", 100, "SUM", places),
        SparseMember("int64", 1, "SUM", rows=9000, touched=3000),
    ]
    small: list[Member] = [
        SparseMember("complex64", 4, "SUM", rows=50, touched=10),
        DenseMember("float64", 20, "MEAN", places),
        SparseMember("float64", 2, "CMEAN", rows=30, touched=10),
        DenseMember("float64", 10, "CMEAN", places),
    ]
    return [
        Plan(*single("sparse", SparseMember("float32", 16, "SUM", rows=4000, touched=2000))),
        Plan(*group("rounds", *mixed, contribute=True), chief=True),
        Plan(
            *group("rounds, 2 lanes", *mixed, contribute=True, weighted=True), chief=True, lanes=2
        ),
        Plan(*single("dense, 2 lanes", DenseMember("float32", 50_000, "SUM", places)), lanes=2),
        Plan(*group("little room", *small, weighted=True), lanes=2, capacity=64),
        Plan(*single("sparse, rounds", SparseMember("float64", 64, "MEAN", 1000, 400)), chief=True),
        Plan(*group("group of 11", *small, *mixed[:3], *small, contribute=True), lanes=2),
        Plan(*group("group of 14", *mixed, *small, *mixed)),
    ]
