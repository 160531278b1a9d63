"""How a host's sums are divided among shards, and how the shards' results are joined.

The hash of a row's number determines its shard. (Rows that are used often tend to have low numbers,
so a division into ranges would send most bytes to the first shard.) A dense member is cut into one
run of elements for each shard. A small dense member goes to one shard, by the hash of its name.
"""

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shmacc import _core
from shmacc._accumulators.taken import DenseTaken, GroupTaken, SparseTaken
from shmacc._multihost.columns import Bytes, Format, Rows, aligned
from shmacc._multihost.messages import Opened
from shmacc._values.arguments import describe_shape
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shmacc._base.array_types import IndexArray

_SMALL = 1 << 14  # a dense member with fewer elements goes to one shard
_LARGE = 1 << 20  # a result with at least this many bytes has memory of its own


class Plan:
    """Determines which part of each member of an `AccumulatorGroup` is at which shard.

    Raises:
        InvalidArgumentError: A shape is not fully declared. Only the first dimension of a sparse
            member may be unknown, since hosts do not see each other's gradients.
    """

    def __init__(self, members: Mapping[str, TensorSpec], shards: int) -> None:
        self.members: dict[str, TensorSpec] = dict(members)
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(members)}
        self.shards = shards
        for name, spec in members.items():
            dims = spec.shape
            if _is_sparse(spec):
                dims = spec.shape[1:] if spec.shape else None  # dimensions of a row
            if dims is None or None in dims:
                raise InvalidArgumentError(
                    f"Member {name!r} of a group over several hosts needs a shape whose dimensions "
                    "are known (of a sparse one all but the first), but was declared as "
                    f"{describe_shape(spec.shape)}"
                )
        self.results: Format = Format(
            (_is_sparse(spec), spec.shape or (), spec.dtype) for spec in members.values()
        )

        # By member and shard: where the shard's run of elements ends; 0 for a sparse member.
        self.ends: IndexArray = np.array([self._ends(name) for name in members], np.int64)
        before = np.zeros((len(members), 1), np.int64)
        self.begins: IndexArray = np.hstack([before, self.ends[:, :-1]])

    def _ends(self, name: str) -> list[int]:
        number = self.numbers[name]
        size = 0 if self.results.sparse[number] else math.prod(self.results.dims[number])
        if size < _SMALL:
            home = zlib.crc32(name.encode()) % self.shards
            return [size if shard >= home else 0 for shard in range(self.shards)]
        return [size * (shard + 1) // self.shards for shard in range(self.shards)]

    def at_shard(self, shard: int) -> dict[str, TensorSpec]:
        """Return the members of a shard's group."""
        lengths = (self.ends - self.begins)[:, shard].tolist()
        return {
            name: spec
            if _is_sparse(spec)
            else TensorSpec((length,), spec.dtype, reduction_type=spec.reduction_type)
            for (name, spec), length in zip(self.members.items(), lengths, strict=True)
        }


class Joining:
    """Joins a round from the shards' parts, as they arrive.

    First all shards send the numbers of their rows, which is little data. Then the place of each
    row is known, and each shard's values are put in place as they arrive.
    """

    def __init__(self, plan: Plan, opened: Opened, rows: Mapping[int, Rows]) -> None:
        self._plan, self._opened, self._rows = plan, opened, rows
        totals = opened.totals()
        self._totals = {name: totals[name] for name in plan.members if name in totals}
        numbers = [plan.numbers[name] for name in self._totals]
        self._check_runs([n for n in numbers if not plan.results.sparse[n]])
        sparse = np.array([n for n in numbers if plan.results.sparse[n]], np.int64)
        lengths = [own.lengths(sparse) for own in rows.values()]
        columns = [own.numbers for own in rows.values()], [own.counts for own in rows.values()]
        self._row_numbers, self._row_counts, positions = _core.merge_columns(*columns, lengths)
        self._positions = dict(zip(rows, positions, strict=True))
        total = sum(lengths, np.zeros(len(sparse), np.int64))
        ends = np.cumsum(total)
        self._slices = {
            number: slice(begin, end)
            for number, begin, end in zip(
                sparse.tolist(), (ends - total).tolist(), ends.tolist(), strict=True
            )
        }
        self._wholes = self._make_room(numbers)

    def _check_runs(self, dense: list[int]) -> None:
        """Refuse shards whose runs of these members are not as long as the plan says.

        Otherwise a part of the result that no shard fills would contain arbitrary old memory.
        """
        found = np.zeros_like(self._plan.ends)
        for shard, own in self._rows.items():
            found[own.parts[:, 0], shard] = own.parts[:, 3]
        if (found != self._plan.ends - self._plan.begins)[dense].any():
            raise InvalidArgumentError(
                "A shard does not have the run of a dense member that it should"
            )

    def _make_room(self, numbers: list[int]) -> dict[int, Bytes]:
        """Allocate memory for the members. Small members share a block, which costs less.

        Returns:
            By member number, a 2-D array of bytes: a line for each row (dense: for each element).
        """
        form = self._plan.results
        lengths = {n: math.prod(form.dims[n]) for n in numbers}
        lengths |= {n: own.stop - own.start for n, own in self._slices.items()}
        sizes = {n: length * form.widths[n] for n, length in lengths.items()}
        small = _core.memory(sum(aligned(size) for size in sizes.values() if size < _LARGE))
        rooms, begin = {}, 0
        for n, size in sizes.items():
            if size < _LARGE:
                memory = small[begin : begin + size]
                begin += aligned(size)
            else:
                memory = _core.memory(size)
            rooms[n] = memory.reshape(lengths[n], form.widths[n])
        return rooms

    def add(self, shard: int, values: Bytes) -> None:
        numbers, plan = self._rows[shard].parts[:, 0], self._plan
        firsts = np.where(plan.results.sparse[numbers], -1, plan.begins[numbers, shard])
        wholes = [self._wholes[number] for number in numbers.tolist()]
        lengths = self._rows[shard].parts[:, 3].copy()
        _core.put_values(wholes, firsts, lengths, self._positions[shard], values)

    def taken(self) -> GroupTaken:
        opened, form = self._opened, self._plan.results
        step, who = opened.step, opened.contributors
        taken: dict[str, SparseTaken | DenseTaken] = {}
        for name, (count, weight) in self._totals.items():
            number = self._plan.numbers[name]
            rows = self._slices.get(number)
            dims = form.dims[number]
            if rows is not None:
                dims = (rows.stop - rows.start, *dims)
            values = self._wholes[number].reshape(-1).view(form.dtypes[number]).reshape(dims)
            if rows is None:
                taken[name] = DenseTaken(values, count, step, weight, who)
                continue
            shape = self._plan.members[name].shape
            first = shape[0] if shape else None
            whole = np.array([-1 if first is None else first, *values.shape[1:]], np.int64)
            own = self._row_numbers[rows], self._row_counts[rows]
            taken[name] = SparseTaken(own[0], values, whole, own[1], count, step, weight, who)
        made = GroupTaken(taken, opened.count, step, opened.weight, who)
        return made._of_group(tuple(self._plan.members))  # noqa: SLF001


def _is_sparse(spec: TensorSpec) -> bool:
    return isinstance(spec, IndexedSlicesSpec)
