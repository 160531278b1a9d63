"""How a host's sums are divided among shards, and what these make of them put together.

Rows go to the shard that their number hashes to: rows that are used often tend to have low numbers,
so a division into ranges would send most bytes to the first shard. A dense member is cut into as
many runs of elements as there are shards; a small one goes to one shard, by the hash of its name.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc._arguments import describe_shape
from shmacc._multihost.messages import Opened
from shmacc._records import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    SparsePartial,
    SparseTaken,
)
from shmacc._spec import IndexedSlicesSpec, TensorSpec
from shmacc.errors import InvalidArgumentError

_SMALL = 1 << 14  # elements of a dense member that are not worth a message to each shard
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
        self.members = dict(members)
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
        """Make the pieces of a partial, each with its shard, one after the other.

        So the first one can be on its way while the next one is copied. Those without elements are
        left out.

        Args:
            partial: What is to be divided.
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
        if self.shards == 1:
            return lambda _: _part(sums, slice(None)) if len(sums.indices) else None
        shards = shard_of(sums.indices, self.shards)
        order = np.argsort(shards, kind="stable")
        ends = np.searchsorted(shards[order], np.arange(self.shards + 1))

        def of_shard(shard: int) -> SparsePartial | None:
            rows = order[ends[shard] : ends[shard + 1]]
            return _part(sums, rows) if len(rows) else None

        return of_shard

    def _runs(self, name: str, sums: DensePartial) -> Callable[[int], DensePartial | None]:
        flat, runs = sums.value.reshape(-1), self.runs(name)

        def of_shard(shard: int) -> DensePartial | None:
            first, end = runs[shard]
            if end == first:
                return None
            return DensePartial(flat[first:end], sums.count, sums.step, sums.weight)

        return of_shard

    def join(self, parts: Sequence[GroupTaken], opened: Opened) -> GroupTaken:
        """Return the round, of what each shard has of it."""
        taken: dict[str, SparseTaken | DenseTaken] = {}
        who = opened.contributors
        for name, (count, weight) in opened.totals().items():
            found = [part.get(name) for part in parts]
            if _is_sparse(self.members[name]):
                taken[name] = self._sparse(name, found, count, weight, opened.step, who)
            else:
                taken[name] = self._dense(name, found, count, weight, opened.step, who)
        return GroupTaken(taken, opened.count, opened.step, opened.weight, who)

    def _sparse(
        self,
        name: str,
        parts: Sequence[SparseTaken | None],
        count: int,
        weight: int,
        step: int,
        who: npt.NDArray[np.int64],
    ) -> SparseTaken:
        spec = self.members[name]
        first, dims = (spec.shape or (None,))[0], self._dims[name]
        none = np.empty(0, np.int64)
        found = [part for part in parts if part is not None]
        indices = np.concatenate([none, *(part.indices for part in found)])
        order = np.argsort(indices, kind="stable")  # merges: each part is sorted
        counts = np.concatenate([none, *(part.row_counts for part in found)])
        values = np.empty((len(indices), *dims), spec.dtype)
        to = np.empty_like(order)
        to[order] = np.arange(len(order))
        rows, begin = _as_items(values), 0
        for part in found:
            end = begin + len(part.indices)
            rows[to[begin:end]] = _as_items(part.values)
            begin = end
        shape = np.array([-1 if first is None else first, *dims], dtype=np.int64)
        return SparseTaken(
            indices[order],
            values,
            shape,
            counts[order],
            count,
            step,
            weight,
            who,
        )

    def _dense(
        self,
        name: str,
        parts: Sequence[DenseTaken | None],
        count: int,
        weight: int,
        step: int,
        who: npt.NDArray[np.int64],
    ) -> DenseTaken:
        value = np.empty(self._dims[name], self.members[name].dtype)
        flat = value.reshape(-1)
        for part, (first, end) in zip(parts, self.runs(name), strict=True):
            if part is not None and end > first:
                flat[first:end] = part.value
        return DenseTaken(value, count, step, weight, who)


def bytes_of(partial: GroupPartial) -> int:
    """Return how many bytes the arrays of a partial have."""
    return sum(
        sums.values.nbytes + sums.indices.nbytes + sums.row_counts.nbytes
        if isinstance(sums, SparsePartial)
        else sums.value.nbytes
        for sums in partial.values()
    )


def shard_of(rows: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.uint16]:
    """Return which shard each row is at; of 16 bits, since such are sorted in linear time."""
    mixed = (rows.view(np.uint64) * _GOLDEN) >> np.uint64(32)
    return (mixed % np.uint64(shards)).astype(np.uint16)


def _as_items(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return each row as one item, if it has bytes: items are copied faster than rows."""
    size = values[:1].nbytes
    if size == 0:
        return values
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return flat.view(np.dtype((np.void, size))).reshape(-1)


def _is_sparse(spec: TensorSpec) -> bool:
    return isinstance(spec, IndexedSlicesSpec)


def _part(sums: SparsePartial, rows: Any) -> SparsePartial:
    return SparsePartial(
        sums.indices[rows],
        sums.values[rows] if isinstance(rows, slice) else np.take(sums.values, rows, axis=0),
        sums.shape,
        sums.row_counts[rows],
        sums.count,
        sums.step,
        sums.weight,
    )
