"""How a host's sums are divided among shards, and what these make of them put together.

Rows go to the shard that their number hashes to: rows that are used often tend to have low numbers,
so a division into ranges would send most bytes to the first shard. A dense member is cut into as
many runs of elements as there are shards; a small one goes to one shard, by the hash of its name.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._gradients.arguments import describe_shape
from shmacc._gradients.spec import IndexedSlicesSpec, TensorSpec
from shmacc._multihost.messages import Opened
from shmacc._records.array_types import IndexArray
from shmacc._records.taken import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    SparsePartial,
    SparseTaken,
)
from shmacc.errors import InvalidArgumentError

_SMALL = 1 << 14  # elements of a dense member that are not worth a message to each shard


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
        self.shards = shards
        self._dims: dict[str, tuple[int, ...]] = {}  # of a row, or of a whole dense member
        for name, spec in members.items():
            dims = spec.shape[1:] if spec.shape and _is_sparse(spec) else spec.shape
            self._dims[name] = tuple(dim for dim in dims or () if dim is not None)
            if dims is None or len(self._dims[name]) < len(dims):
                raise InvalidArgumentError(
                    f"Member {name!r} of a group over several hosts needs a shape whose dimensions "
                    "are known (of a sparse one all but the first), but was declared as "
                    f"{describe_shape(spec.shape)}"
                )

    def runs(self, name: str) -> list[tuple[int, int]]:
        """Return which run of a dense member's elements each shard has."""
        size = math.prod(self._dims[name])
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

    def split(self, partial: GroupPartial, first: int = 0) -> Iterator[tuple[int, GroupPartial]]:
        """Make the pieces of a partial, each with its shard: views, nothing is copied.

        Those without elements are left out.

        Args:
            partial: What is to be divided; its rows are in order of shard (`LocalSegment.seal`).
            first: The shard to begin with. If each host begins with another one, they do not all
                send to the same shard at the same time.
        """
        cuts = {
            name: self._rows(sums) if _is_sparse(self.members[name]) else self._runs(name, sums)
            for name, sums in partial.items()
        }
        for number in range(self.shards):
            shard = (first + number) % self.shards
            found = {name: cut(shard) for name, cut in cuts.items()}
            parts = {name: part for name, part in found.items() if part is not None}
            if parts:
                yield shard, GroupPartial(parts, partial.count, partial.step, partial.weight)

    def _rows(self, sums: SparsePartial) -> Callable[[int], SparsePartial | None]:
        ends = _core.ends_of_shards(sums.indices, self.shards)

        def of_shard(shard: int) -> SparsePartial | None:
            rows = slice(ends[shard - 1] if shard else 0, ends[shard])
            if rows.start == rows.stop:
                return None
            return SparsePartial(
                sums.indices[rows],
                sums.values[rows],
                sums.shape,
                sums.row_counts[rows],
                sums.count,
                sums.step,
                sums.weight,
            )

        return of_shard

    def _runs(self, name: str, sums: DensePartial) -> Callable[[int], DensePartial | None]:
        flat, runs = sums.value.reshape(-1), self.runs(name)

        def of_shard(shard: int) -> DensePartial | None:
            first, end = runs[shard]
            if end == first:
                return None
            return DensePartial(flat[first:end], sums.count, sums.step, sums.weight)

        return of_shard

    def dims(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of a row of a sparse member, or of a dense one."""
        return self._dims[name]


def rows_of(taken: GroupTaken) -> dict[str, IndexArray]:
    """Return which rows a shard has in its part of a round, of each sparse member.

    Shape ``(2, n)``: their numbers, ascending, and their counts.
    """
    return {
        name: np.stack((part.indices, part.row_counts))
        for name, part in taken.items()
        if isinstance(part, SparseTaken)
    }


def values_of(taken: GroupTaken) -> dict[str, npt.NDArray[Any]]:
    """Return the values of each member in a shard's part of a round."""
    return {
        name: part.values if isinstance(part, SparseTaken) else part.value
        for name, part in taken.items()
    }


class Joining:
    """Puts a round together, of what each shard has of it, as it comes.

    First all shards say which rows they have, which is little. Then the place of each row is known,
    and the values of a shard are put there while those of others are on their way.

    Args:
        plan: Which part is where.
        opened: The round.
        rows: Of each shard that has something of it, its `rows_of`.
    """

    def __init__(
        self, plan: Plan, opened: Opened, rows: Mapping[int, Mapping[str, IndexArray]]
    ) -> None:
        self._plan = plan
        self._opened = opened
        self._totals = opened.totals()
        self._rows: dict[str, IndexArray] = {}  # of all shards
        self._positions: dict[tuple[str, int], IndexArray] = {}  # of a shard's rows among them
        self._values: dict[str, npt.NDArray[Any]] = {}
        for name in self._totals:
            spec, dims = plan.members[name], plan.dims(name)
            if _is_sparse(spec):
                found = {shard: of[name] for shard, of in rows.items() if name in of}
                dims = (self._place(name, found), *dims)
            memory = _core.memory(math.prod(dims) * spec.dtype.itemsize)
            self._values[name] = memory.view(spec.dtype).reshape(dims)

    def _place(self, name: str, found: Mapping[int, IndexArray]) -> int:
        """Find the positions of a member's rows; return how many there are."""
        rows = np.concatenate([np.empty((2, 0), np.int64), *found.values()], axis=1)
        positions = _core.find_positions(rows[0])
        begin = 0
        for shard, of in found.items():
            end = begin + of.shape[1]
            self._positions[name, shard] = positions[begin:end]
            begin = end
        self._rows[name] = np.empty_like(rows)
        self._rows[name][:, positions] = rows
        return len(positions)

    def add(self, shard: int, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a shard's values where they belong."""
        for name, part in values.items():
            whole = self._values[name]
            if (positions := self._positions.get((name, shard))) is not None:
                if whole.nbytes and len(positions):
                    part_rows = part.reshape(len(positions), -1)
                    _core.put_rows(_as_bytes(whole), positions, _as_bytes(part_rows))
            else:
                first, end = self._plan.runs(name)[shard]
                whole.reshape(-1)[first:end] = part

    def taken(self) -> GroupTaken:
        """Return the round."""
        opened = self._opened
        step, who = opened.step, opened.contributors
        taken: dict[str, SparseTaken | DenseTaken] = {}
        for name, (count, weight) in self._totals.items():
            spec, values = self._plan.members[name], self._values[name]
            if (rows := self._rows.get(name)) is None:
                taken[name] = DenseTaken(values, count, step, weight, who)
                continue
            first = (spec.shape or (None,))[0]
            shape = np.array([-1 if first is None else first, *values.shape[1:]], dtype=np.int64)
            taken[name] = SparseTaken(rows[0], values, shape, rows[1], count, step, weight, who)
        return GroupTaken(taken, opened.count, step, opened.weight, who)


def bytes_of(partial: GroupPartial) -> int:
    """Return how many bytes the arrays of a partial have."""
    return sum(
        sums.values.nbytes + sums.indices.nbytes + sums.row_counts.nbytes
        if isinstance(sums, SparsePartial)
        else sums.value.nbytes
        for sums in partial.values()
    )


def _as_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return values.reshape(len(values), -1).view(np.uint8)


def _is_sparse(spec: TensorSpec) -> bool:
    return isinstance(spec, IndexedSlicesSpec)
