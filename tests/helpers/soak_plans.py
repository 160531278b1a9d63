"""The soak's accumulators. The result of a take shows exactly which gradients are in it.

In each member, a gradient is one of a few ready-made arrays, its body, plus a mark that shows the
gradient's number. All values are small integers, so sums are exact: a take must equal the sum of
the gradients whose marks it shows.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from helpers.books import MOST, Books, Count, Numbers

import shmacc

Array = npt.NDArray[Any]
Truths = npt.NDArray[np.bool_]

TURNS: Final = 1024
"""A round has fewer than this number of gradients from one worker."""

_WEIGHTS: Final = 3
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio


@dataclass(frozen=True)
class Gradients:
    """Derives a gradient's worker, members and weight from its number."""

    workers: int  # consecutive gradients belong to the workers in turn
    members: int = 1  # members of the accumulator
    # Whether a gradient's number is its contributor. If so, it is applied again after a kill, and
    # must not be in a round twice.
    contribute: bool = False
    weighted: bool = False  # weights of 1 to 3

    def number(self, slot: int, turn: int) -> int:
        """Return the number of a worker's turn-th gradient."""
        return turn * self.workers + slot

    @property
    def places(self) -> int:
        """The number of places; `place` says what a place is."""
        return self.workers * TURNS

    def place(self, numbers: Numbers) -> Numbers:
        """Return the indices of these gradients' dense marks; in a round, all indices differ."""
        return numbers % self.workers * TURNS + numbers // self.workers % TURNS

    def place_weights(self, places: Numbers) -> Numbers:
        """Return the weight of the gradients that have these places."""
        return 1 + places % _WEIGHTS if self.weighted else np.ones_like(places)

    def weights(self, numbers: Numbers) -> Numbers:
        return self.place_weights(self.place(numbers))

    def touches(self, numbers: Numbers) -> Truths:
        """Return which members each gradient touches: about half of them, at least one."""
        hashed = (numbers.astype(np.uint64) * _SPREAD)[:, None]
        members = np.arange(self.members)
        some: Truths = (hashed >> (63 - members).astype(np.uint64)) & np.uint64(1) == 1
        some |= numbers[:, None] % self.members == members
        return some


_BODIES: Final = 8
_BASE: Final = 2 * MOST  # added to each dense mark, so that a sum shows how many marks it contains


@dataclass(frozen=True)
class Marks:
    """The gradients that a take has in one member."""

    numbers: Numbers  # which gradients the take has
    times: Numbers  # how often the take has each gradient
    exact: bool  # the member's value is the sum (or mean) of these gradients


NO_MARKS: Final = Marks(np.empty(0, np.int64), np.empty(0, np.int64), exact=True)
"""The marks of a member that is absent from a take."""


def _signature(number: Any) -> Any:
    return number % 997 + 1


def _weight_of_bodies(numbers: Numbers, weights: Numbers) -> Numbers:
    return np.bincount(numbers % _BODIES, weights, minlength=_BODIES).astype(np.int64)


class SparseMember:
    """Rows: all gradients share the first rows; after these, each gradient has its own row."""

    def __init__(self, dtype: str, width: int, reduction: str, rows: int, touched: int) -> None:
        """Make the bodies. Each touches `touched` of the shared `rows`."""
        self.spec = shmacc.IndexedSlicesSpec((None, width), dtype, reduction_type=reduction)
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
            # The last row is the gradient's own: `part` fills it in.
            self._bodies.append((np.append(indices, 0), values.astype(dtype)))

    def part(self, gradients: Gradients, number: int) -> tuple[Array, ...]:  # noqa: ARG002
        """Return this member's part of a gradient. The next call overwrites it."""
        indices, values = self._bodies[number % _BODIES]
        indices[-1] = self._rows + number
        values[-1] = _signature(number)
        return indices, values

    def marks(self, gradients: Gradients, taken: Any, round_weight: int) -> Marks:
        """Find the gradients that a take has in this member."""
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
    """An array: all gradients share the first elements; after these, each has its own element."""

    def __init__(self, dtype: str, shared: int, reduction: str, places: int) -> None:
        """Make the bodies: `shared` elements, then `places` elements for marks."""
        self.spec = shmacc.TensorSpec((shared + places,), dtype, reduction_type=reduction)
        self._reduction, self._shared = reduction, shared
        rng = np.random.default_rng(shared)
        self._sums = rng.integers(-4, 5, size=(_BODIES, shared))
        self._bodies = np.zeros((_BODIES, shared + places), dtype)
        self._bodies[:, :shared] = self._sums

    def part(self, gradients: Gradients, number: int) -> tuple[Array, ...]:
        """Return this member's part of a gradient. The next call overwrites it."""
        body = self._bodies[number % _BODIES]
        body[self._shared :] = 0
        body[self._shared + gradients.place(np.array(number))] = _BASE + number
        return (body,)

    def marks(self, gradients: Gradients, taken: Any, round_weight: int) -> Marks:
        """Find the gradients that a take has in this member."""
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

MOST_WAITING: Final = 512
"""Workers pause while more gradients than this wait to be taken."""


@dataclass(frozen=True)
class Contents:
    """What the result of a take contains."""

    numbers: Numbers  # the gradients in the take, ascending
    torn: int  # gradients missing from some members, and members with wrong sums
    repeated: int  # gradients that the take has more than once
    misreported: int  # counts, weights and lists of contributors that are wrong


@dataclass(frozen=True)
class Plan:
    """An accumulator, and its gradients."""

    title: str
    members: dict[str, Member]  # by name; a single accumulator has one, named ""
    gradients: Gradients
    # Whether all takes are rounds, noted in their blocks, so that the books have every take. If
    # not, a take is noted when it is over, if its taker still lives.
    chief: bool = False
    lanes: int = 1
    capacity: int | None = None

    @property
    def _is_single(self) -> bool:
        return "" in self.members

    def create(self, shared_name: str) -> Any:
        specs = {name: member.spec for name, member in self.members.items()}
        if not self._is_single:
            return shmacc.AccumulatorGroup(
                specs, shared_name, lanes=self.lanes, capacity=self.capacity
            )
        spec = specs[""]
        sparse = isinstance(self.members[""], SparseMember)
        make: Any = shmacc.SparseConditionalAccumulator if sparse else shmacc.ConditionalAccumulator
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

    def note(self, books: Books, process: int, taken: Any) -> None:
        """Record a take, or a round that is still open."""
        books.note(process, self.check(books, process, taken), taken.step, taken.count)

    def check(self, books: Books, process: int, taken: Any) -> Numbers:
        """Record the faults within a take or a snapshot; return the gradients in it."""
        contents = self._contents(taken)
        repeated = Count.REPEATED if self.gradients.contribute else Count.DOUBLED
        books.add(process, Count.TORN, contents.torn)
        books.add(process, repeated, contents.repeated)
        books.add(process, Count.MISCOUNTED, contents.misreported)
        return contents.numbers

    def _contents(self, taken: Any) -> Contents:
        """Read the result of a take."""
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
