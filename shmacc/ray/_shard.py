"""The actor of a shard."""

import os
from collections.abc import Callable
from typing import Any

from shmacc._group import AccumulatorGroup
from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._multihost.pieces import Handed, Plan, hand_out
from shmacc._multihost.shard import ShardCore
from shmacc._multihost.sums import reduced
from shmacc._records import GroupPartial, GroupTaken
from shmacc.ray._parts import Config, Missing


class ShardActor:
    """Keeps pieces until a chief asks for the reduction of a round. One call at a time.

    Pieces are read where Ray has put them. Its group, which is private and stays empty, checks
    whatever has arrived as gradients are checked: a piece that does not fit is an error of the
    round, and not of memory.
    """

    def __init__(self, config: Config, number: int) -> None:
        plan = Plan(config.members, config.shards)
        self._number = number
        self._core: ShardCore[GroupPartial] = ShardCore()
        self._group = AccumulatorGroup(plan.at_shard(number), reduction_type=config.reduction)
        self._group.unlink()  # nobody else needs its name, and so a death leaves nothing
        self._reduced: tuple[Opened, GroupTaken] | None = None

    def pid(self) -> int:
        """Return the process that the shard is."""
        return os.getpid()

    def stage(self, fence: Fence, key: BatchKey, piece: GroupPartial) -> None:
        """Keep a piece."""
        self._core.stage(fence, key, piece)

    def reduced(self, opened: Opened) -> GroupTaken | Missing:
        """Return the reduction of this shard's part of a round."""
        keys = opened.of_shard(self._number)
        if missing := self._core.missing(opened.fence, keys):
            return Missing(missing)
        if self._reduced is None or not _is_same(self._reduced[0], opened):
            self._reduced = None  # two at a time might not fit
            self._reduced = opened, reduced(self._group, self._core.pieces(keys), opened)
        return self._reduced[1]

    def hand_out(self, opened: Opened) -> Handed | tuple[Missing, None]:
        """Return this shard's part of a round: its rows, and the values.

        As two results of Ray's: a chief can have the first one before the second one has come.
        """
        taken = self.reduced(opened)
        return (taken, None) if isinstance(taken, Missing) else hand_out(taken)

    def run(
        self, opened: Opened, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any | Missing:
        """Return what a function makes of this shard's part of a round."""
        taken = self.reduced(opened)
        return taken if isinstance(taken, Missing) else function(taken, *args)

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        self._core.forget(before)
        if self._reduced is not None and self._reduced[0].fence < before:
            self._reduced = None


def _is_same(one: Opened, other: Opened) -> bool:
    keys = [member.key for member in one.members]
    return one.fence == other.fence and keys == [member.key for member in other.members]
