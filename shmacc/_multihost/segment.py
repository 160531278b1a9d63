"""A host's segment, as its forwarder uses it: the actions of forwarder.py on an ordinary group.

Holding it opens a round of the group: applies of its step are refused, and later ones wait. If the
forwarder dies, the round ends, and nothing is consumed.
"""

from dataclasses import dataclass
from typing import Self

from shmacc import _core
from shmacc._core import RoundResult
from shmacc._multihost.columns import Columns, Piece
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import Batch
from shmacc._multihost.pieces import Plan
from shmacc.errors import WorkerDiedError


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a held segment.

    Attributes:
        batch: The description that the owner gets.
        pieces: The piece for each shard; shards that get nothing are left out.
    """

    batch: Batch
    pieces: dict[int, Piece]

    @classmethod
    def of(cls, taken: RoundResult, names: list[str]) -> Self:
        """Make the content from a round that is divided among shards; `names` are its members."""
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
    """A group that a forwarder drives. Not for several threads at a time."""

    def __init__(self, group: HostGroup, plan: Plan) -> None:
        self.group = group
        self._ends = plan.ends
        self._names = list(group.members)
        self._handle = group.handle
        self._round = 0

    @property
    def is_held(self) -> bool:
        """Whether this object's round is open, so that the content does not change."""
        return self._round != 0

    def deaths(self) -> WorkerDiedError | None:
        """Return the error that a take would get for processes that are gone, each one once."""
        try:
            self._handle.check_departures()
        except WorkerDiedError as error:
            return error
        return None

    def hold(self) -> Content:
        """Open a round, unless one is open; return a copy of its content. Consumes nothing."""
        taken = RoundResult(advance=False, seal=False, ends=self._ends)
        if self._round:
            self._handle.look(taken, None)
        else:
            if self.group.stats().round_pid is not None:
                # A round of an earlier forwarder, stopped but alive: setting the step ends it.
                self._handle.set_step(self.group.global_step)
            self._handle.open_round(taken, 0, 0, None, raise_departures=False, caller=None)
            self._round = taken.serial
        return Content.of(taken, self._names)

    def release(self) -> None:
        """Give the round up, if it is open."""
        self._handle.give_up_round(self._round)
        self._round = 0

    def consume(self) -> None:
        """Consume the round, if it is still open: the step moves on by one."""
        step, self._round, serial = self.group.global_step + 1, 0, self._round
        if not self._handle.consume_round(serial):
            self.reset(step)

    def reset(self, step: int) -> None:
        """Empty the segment and set its step; an open round ends.

        A finished segment stays finished only if the step increases.
        """
        if step > self.group.global_step:
            self._handle.advance_step(step)
        else:
            _core.load([], [(self._handle, step, [], (0, 0, None, None))])
        self.release()

    def set_step(self, step: int) -> None:
        """Set the step; gradients stay; an open round ends."""
        self._handle.set_step(step)
        self.release()
