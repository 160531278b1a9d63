"""A group on one of many hosts, with what the protocol needs besides the public methods."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np

from shmacc import _core
from shmacc._accumulators import results, rounds
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.taken import DenseTaken, GroupPartial, GroupTaken, SparseTaken
from shmacc._multihost.columns import Columns, Format, Piece, join
from shmacc._multihost.messages import Share


class HostGroup(AccumulatorGroup):
    """A group that the processes of its host see as an ordinary one."""

    @property
    def handle(self) -> _core.Handle:
        """The extension's handle, from which rounds are made."""
        return self._handle

    def look(self) -> GroupPartial:
        """Return a copy of the accumulated sums; consumes nothing."""
        return rounds.look(self._handle, self._partial, partial=True)

    @cached_property
    def _sums(self) -> Format:
        return Format.of(
            (spec.kind == "sparse", spec.shape or (), spec.dtype.partial)
            for spec in self._spec.members
        )

    @cached_property
    def _results(self) -> Format:
        return replace(self._sums, dtypes=tuple(spec.dtype.numpy for spec in self._spec.members))

    def reduce(self, pieces: Iterable[Piece], share: Share) -> Columns:
        """Return the reduction of a round's pieces; nothing is added to the group.

        Results equal those of one host to the bit where the order of additions does not matter.

        Args:
            pieces: This shard's pieces of the round. This group has the members of `Plan.at_shard`.
            share: The shard's share. Its counts include gradients that have nothing at this shard.

        Raises:
            OutOfRangeError: An integer result does not fit its dtype.
            InvalidArgumentError: A piece does not fit the group.
        """
        given = [(*piece.columns.arrays(), piece.count, piece.weight) for piece in pieces]
        reduced = Columns.of(self._handle.reduce(given, share.count, share.weight))
        if all(spec.dtype.sums_as_is for spec in self._spec.members):
            return reduced
        parts = zip(reduced.rows.parts[:, 0].tolist(), self._sums.split(reduced), strict=True)
        members = self._spec.members
        values = [results.to_dtype(members[number].dtype, part) for number, part in parts]
        return Columns(reduced.rows, join(values))

    def taken(self, reduced: Columns, share: Share) -> GroupTaken:
        """Return a reduction as a take would return it; the arrays share the reduction's memory."""
        rows, who, end = reduced.rows, np.empty(0, np.int64), 0
        taken: dict[str, SparseTaken | DenseTaken] = {}
        for (number, count, weight, length), values in zip(
            rows.parts.tolist(), self._results.split(reduced), strict=True
        ):
            spec = self._spec.members[number]
            if spec.kind == "dense":
                taken[spec.name] = DenseTaken(values, count, share.step, weight, who)
                continue
            own = slice(end, end := end + length)
            first = (spec.shape or (None,))[0]
            shape = np.array([-1 if first is None else first, *values.shape[1:]], np.int64)
            arrays = rows.numbers[own], values, shape, rows.counts[own]
            taken[spec.name] = SparseTaken(*arrays, count, share.step, weight, who)
        return GroupTaken(taken, share.count, share.step, share.weight, who)
