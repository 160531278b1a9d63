"""The actor of a shard."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shmacc._group import AccumulatorGroup
from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._multihost.pieces import Handed, Plan, hand_out
from shmacc._multihost.shard import ShardCore
from shmacc._multihost.sums import Sums
from shmacc._records import GroupPartial, GroupTaken
from shmacc.errors import ShmaccError
from shmacc.ray._parts import Config, Missing


class ShardActor:
    """Keeps pieces and adds them up: one call at a time, and a thread that adds meanwhile.

    A host's piece is added while others are still on their way.

    Its group is private and checks whatever has arrived as gradients are checked: a piece that does
    not fit is an error of the round, and not of memory.
    """

    def __init__(self, config: Config, number: int) -> None:
        plan = Plan(config.members, config.shards)
        self._number = number
        self._core: ShardCore[GroupPartial] = ShardCore()
        group = AccumulatorGroup(plan.at_shard(number), reduction_type=config.reduction)
        group.unlink()  # nobody else needs its name, and so a death leaves nothing
        self._sums = Sums(group)
        self._adding = threading.Lock()  # guards the sums, and whose they are
        self._fence = Fence(-1, -1)
        self._thread = ThreadPoolExecutor(1, "shmacc shard")
        self._reduced: tuple[Opened, GroupTaken] | None = None

    def pid(self) -> int:
        """Return the process that the shard is."""
        return os.getpid()

    def stage(self, fence: Fence, key: BatchKey, piece: GroupPartial) -> None:
        """Keep a piece; it is added after this has been answered."""
        if self._core.stage(fence, key, piece):
            self._thread.submit(self._add, fence, key, piece)

    def _add(self, fence: Fence, key: BatchKey, piece: GroupPartial) -> None:
        with self._adding:
            self._begin(fence)
            if fence == self._fence:
                with contextlib.suppress(ShmaccError):  # of the round, if it is in one
                    self._sums.add(key, piece)

    def _begin(self, fence: Fence) -> None:
        """Drop what was added before the fence."""
        if fence > self._fence:
            self._fence = fence
            self._sums.forget()

    def reduced(self, opened: Opened) -> GroupTaken | Missing:
        """Return the reduction of this shard's part of a round."""
        keys = opened.of_shard(self._number)
        if missing := self._core.missing(opened.fence, keys):
            return Missing(missing)
        if self._reduced is None or not _is_same(self._reduced[0], opened):
            self._reduced = None  # two at a time might not fit
            pieces = dict(zip(keys, self._core.pieces(keys), strict=True))
            with self._adding:
                self._begin(opened.fence)
                self._reduced = opened, self._sums.reduced(pieces, opened)
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
        with self._adding:
            self._begin(before)
        if self._reduced is not None and self._reduced[0].fence < before:
            self._reduced = None


def _is_same(one: Opened, other: Opened) -> bool:
    keys = [member.key for member in one.members]
    return one.fence == other.fence and keys == [member.key for member in other.members]
