"""How a host's sums are divided among shards, and what these make of them put together.

Rows go to the shard that their number hashes to: rows that are used often tend to have low numbers,
so a division into ranges would send most bytes to the first shard. A dense member is cut into as
many runs of elements as there are shards; a small one goes to one shard, by the hash of its name.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._gradients.arguments import describe_shape
from shmacc._gradients.spec import IndexedSlicesSpec, TensorSpec
from shmacc._multihost.columns import Format, Piece, Rows, Values
from shmacc._multihost.messages import Opened
from shmacc._records.taken import DenseTaken, GroupPartial, GroupTaken, SparsePartial, SparseTaken
from shmacc.errors import InvalidArgumentError

_SMALL = 1 << 14  # elements of a dense member that are not worth a message to each shard
_LARGE = 1 << 20  # bytes of a result that has memory of its own


class Plan:
    """Which part of which member is at which shard.

    Args:
        members: The group's, with what is not given filled in (`AccumulatorGroup.members`).
        shards: How many there are.

    Raises:
        InvalidArgumentError: A shape is not declared: only the first dimension of a sparse member
            may be unknown, since hosts do not see each other's gradients.
    """

    def __init__(self, members: Mapping[str, TensorSpec], shards: int) -> None:
        self.members: dict[str, TensorSpec] = dict(members)
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(members)}
        self.shards = shards
        for name, spec in members.items():
            dims = spec.shape[1:] if spec.shape and _is_sparse(spec) else spec.shape
            if dims is None or None in dims:
                raise InvalidArgumentError(
                    f"Member {name!r} of a group over several hosts needs a shape whose dimensions "
                    "are known (of a sparse one all but the first), but was declared as "
                    f"{describe_shape(spec.shape)}"
                )
        self.results: Format = Format.of(
            (name, _is_sparse(spec), spec.shape or (), spec.dtype) for name, spec in members.items()
        )

    def runs(self, name: str) -> list[tuple[int, int]]:
        """Return which run of a dense member's elements each shard has."""
        size = math.prod(self.results.dims[self.numbers[name]])
        if size < _SMALL:
            home = zlib.crc32(name.encode()) % self.shards
            return [(0, size) if shard == home else (0, 0) for shard in range(self.shards)]
        ends = [size * (shard + 1) // self.shards for shard in range(self.shards)]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def at_shard(self, shard: int) -> dict[str, TensorSpec]:
        """Return the members of a shard's group."""
        members = {}
        for name, spec in self.members.items():
            if _is_sparse(spec):
                members[name] = spec
            else:
                first, end = self.runs(name)[shard]
                members[name] = TensorSpec(
                    (end - first,), spec.dtype, reduction_type=spec.reduction_type
                )
        return members

    def split(self, partial: GroupPartial, first: int = 0) -> Iterator[tuple[int, Piece]]:
        """Make the pieces of a partial, each with its shard; large arrays are views.

        Those without elements are left out.

        Args:
            partial: What is to be divided; its rows are in order of shard (`LocalSegment.seal`).
            first: The shard to begin with. If each host begins with another one, they do not all
                send to the same shard at the same time.
        """
        cuts = []
        for name, sums in sorted(partial.items(), key=lambda item: self.numbers[item[0]]):
            if isinstance(sums, SparsePartial):
                ends = _core.ends_of_shards(sums.indices, self.shards)
                flat, runs = sums.values, list(zip([0, *ends[:-1]], ends, strict=True))
            else:
                flat, runs = sums.value.reshape(-1), self.runs(name)
            cuts.append((self.numbers[name], sums, flat, runs))
        for number in range(self.shards):
            shard = (first + number) % self.shards
            table, rows, counts, values = [], [], [], []
            for member, sums, flat, runs in cuts:
                begin, end = runs[shard]
                if begin < end:
                    table.append((member, sums.count, sums.weight, end - begin))
                    values.append(flat[begin:end])
                    if isinstance(sums, SparsePartial):
                        rows.append(sums.indices[begin:end])
                        counts.append(sums.row_counts[begin:end])
            if table:
                columns = Rows.of(table, rows, counts), Values.of(values)
                yield shard, Piece(*columns, partial.count, partial.weight, partial.step)

    def rows_of(self, taken: GroupTaken) -> Rows:
        """Return which members and rows a shard has in its part of a round."""
        table, rows, counts = [], [], []
        for name, part in taken.items():
            length = len(part.indices) if isinstance(part, SparseTaken) else part.value.size
            table.append((self.numbers[name], part.count, part.weight, length))
            if isinstance(part, SparseTaken):
                rows.append(part.indices)
                counts.append(part.row_counts)
        return Rows.of(table, rows, counts)


def values_of(taken: GroupTaken) -> Values:
    """Return the values of each member in a shard's part of a round."""
    return Values.of(
        [part.values if isinstance(part, SparseTaken) else part.value for part in taken.values()]
    )


class Joining:
    """Puts a round together, of what each shard has of it, as it comes.

    First all shards say which rows they have, which is little. Then the place of each row is known,
    and the values of a shard are put there while those of others are on their way.

    Args:
        plan: Which part is where.
        opened: The round.
        rows: Of each shard that has something of it, its `Plan.rows_of`.
    """

    def __init__(self, plan: Plan, opened: Opened, rows: Mapping[int, Rows]) -> None:
        self._plan, self._opened, self._rows = plan, opened, rows
        self._totals = opened.totals()
        self._widths = plan.results.widths
        numbers = sorted(plan.numbers[name] for name in self._totals)
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
        self._values = self._make_room(numbers)

    def _make_room(self, numbers: list[int]) -> dict[int, npt.NDArray[Any]]:
        """Make the members' arrays: small ones in one block, which costs less than many."""
        form, room = self._plan.results, {}
        rows = {n: (own.stop - own.start,) for n, own in self._slices.items()}
        dims = {n: (*rows.get(n, ()), *form.dims[n]) for n in numbers}
        sizes = {n: math.prod(shape) * form.dtypes[n].itemsize for n, shape in dims.items()}
        small = _core.memory(sum(size + -size % 64 for size in sizes.values() if size < _LARGE))
        begin = 0
        for n, size in sizes.items():
            if size < _LARGE:
                memory = small[begin : begin + size]
                begin += size + -size % 64
            else:
                memory = _core.memory(size)
            room[n] = memory.view(form.dtypes[n]).reshape(dims[n])
        return room

    def add(self, shard: int, values: Values) -> None:
        """Put a shard's values where they belong."""
        table, form = self._rows[shard].table, self._plan.results
        parts = values.split((table[:, 3] * self._widths[table[:, 0]]).tolist())
        begin = 0
        for (number, _, _, length), part in zip(table.tolist(), parts, strict=True):
            whole = self._values[number]
            if not form.sparse[number]:
                first, end = self._plan.runs(form.names[number])[shard]
                whole.reshape(-1)[first:end] = part.view(whole.dtype)
            elif length:
                positions = self._positions[shard][begin : (begin := begin + length)]
                if part.size:
                    _core.put_rows(_as_bytes(whole), positions, part.reshape(length, -1))

    def taken(self) -> GroupTaken:
        """Return the round."""
        opened, form = self._opened, self._plan.results
        step, who = opened.step, opened.contributors
        taken: dict[str, SparseTaken | DenseTaken] = {}
        for name, (count, weight) in self._totals.items():
            number = self._plan.numbers[name]
            values = self._values[number]
            if not form.sparse[number]:
                taken[name] = DenseTaken(values, count, step, weight, who)
                continue
            rows = self._slices[number]
            first = (self._plan.members[name].shape or (None,))[0]
            shape = np.array([-1 if first is None else first, *values.shape[1:]], dtype=np.int64)
            own = self._row_numbers[rows], values, shape, self._row_counts[rows]
            taken[name] = SparseTaken(*own, count, step, weight, who)
        return GroupTaken(taken, opened.count, step, opened.weight, who)


def _as_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return values.reshape(len(values), -1).view(np.uint8)


def _is_sparse(spec: TensorSpec) -> bool:
    return isinstance(spec, IndexedSlicesSpec)
