"""A host's segment, as its forwarder uses it: the actions of forwarder.py on an ordinary group.

To hold the segment is to open a round of the group: applies of the present step are refused, and
applies of later steps wait. If the forwarder dies, the round ends, and nothing is consumed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from shmacc import _core
from shmacc._accumulators import results, rounds
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.taken import GroupPartial
from shmacc._core import RoundResult
from shmacc._multihost.columns import Columns, Format, Piece, join
from shmacc._multihost.messages import Batch, Share
from shmacc._multihost.pieces import Plan
from shmacc.errors import FailedPreconditionError, WorkerDiedError


class HostGroup(AccumulatorGroup):
    """A host's group, with methods for its forwarder. Workers of the host see an ordinary group."""

    @property
    def handle(self) -> _core.Handle:
        """The extension's handle, with which the forwarder opens and consumes rounds."""
        return self._handle

    def look(self) -> GroupPartial:
        """Return a copy of the accumulated sums, and consume nothing."""
        return rounds.look(self._handle, self._partial, partial=True)

    @cached_property
    def _sums(self) -> Format:
        return Format(
            (spec.kind == "sparse", spec.shape or (), spec.dtype.partial)
            for spec in self._spec.members
        )

    def reduce(self, pieces: Iterable[Piece], share: Share) -> Columns:
        """Return the reduction of a round's pieces; add nothing to the group.

        Where the order of additions does not matter, the results equal one host's to the bit.
        This group has the members of `Plan.at_shard`. The share's count and weight include
        gradients without rows at this shard.

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


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a held segment."""

    batch: Batch  # what the owner gets
    pieces: dict[int, Piece]  # by shard; shards that get nothing are left out

    @classmethod
    def of(cls, taken: RoundResult, names: list[str]) -> Self:
        """Make the content from a round that is divided among shards; `names` lists its members."""
        columns = [Columns.of(shard) for shard in taken.columns()]
        pieces = {
            shard: Piece(own, taken.count, taken.weight, taken.step)
            for shard, own in enumerate(columns)
            if len(own.rows.parts)
        }
        members = {names[number]: (count, weight) for number, count, weight in taken.members()}
        who = frozenset(taken.contributors.tolist())
        return cls(Batch(taken.count, taken.weight, who, members, frozenset(pieces)), pieces)


class LocalSegment:
    """A group that a forwarder drives. Only one thread may use it at a time.

    If there is no group, `make` makes it when the segment first gets a step: workers must find no
    segment before the host has its copy of the parameters.
    """

    def __init__(
        self, group: HostGroup | None, plan: Plan, make: Callable[[], HostGroup] | None = None
    ) -> None:
        self._group = group
        self._make = make
        self._ends = plan.ends
        self._names = list(plan.members)
        self._round = 0

    @property
    def group(self) -> HostGroup:
        if self._group is None:
            raise FailedPreconditionError("This host has no segment yet: it gets its parameters")
        return self._group

    @property
    def exists(self) -> bool:
        return self._group is not None

    def make(self) -> None:
        if self._make is not None:
            self._group = self._make()

    def look(self) -> tuple[int, int, bool]:
        """Return step (-1: no group yet), number of gradients, and whether the run is finished."""
        if self._group is None:
            return -1, 0, False
        return self._group.global_step, self._group.num_accumulated(), not self._group.running

    @property
    def is_held(self) -> bool:
        """Whether this object's round is open, so that the content does not change."""
        return self._round != 0

    def deaths(self) -> WorkerDiedError | None:
        """Return the error that a take would raise for dead processes; each is reported once."""
        try:
            if self._group is not None:
                self.group.handle.check_departures()
        except WorkerDiedError as error:
            return error
        return None

    def hold(self) -> Content:
        """Open a round, or keep the open one; return a copy of its content. Consume nothing."""
        taken = RoundResult(advance=False, seal=False, ends=self._ends)
        if self._round:
            self.group.handle.look(taken, None)
        else:
            if self.group.stats().round_pid is not None:
                # An earlier forwarder, stopped but alive, has a round: setting the step ends it.
                self.group.handle.set_step(self.group.global_step)
            self.group.handle.open_round(taken, 0, 0, None, raise_departures=False, caller=None)
            self._round = taken.serial
        return Content.of(taken, self._names)

    def release(self) -> None:
        """Give the round up, if it is open."""
        if self._round:
            self.group.handle.give_up_round(self._round)
            self._round = 0

    def consume(self) -> None:
        """Consume the round; if it is over already, empty the segment. The step moves on by one."""
        step, self._round, serial = self.group.global_step + 1, 0, self._round
        if not self.group.handle.consume_round(serial):
            self.reset(step)

    def reset(self, step: int) -> None:
        """Empty the segment, set its step, and end an open round.

        A finished segment stays finished only if the step increases.
        """
        if self._group is None:
            self.make()
            if self.group.global_step == step:
                return
        if step > self.group.global_step:
            self.group.handle.advance_step(step)
        else:
            _core.load([], [(self.group.handle, step, [], (0, 0, None, None))])
        self.release()

    def set_step(self, step: int) -> None:
        """Set the step and end an open round; the segment keeps its gradients."""
        self.group.handle.set_step(step)
        self.release()
