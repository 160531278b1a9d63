"""The actor of a shard."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import ray

from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._multihost.pieces import Plan, ShardRows, rows_of, values_of
from shmacc._multihost.shard import ShardCore
from shmacc._multihost.share import Share
from shmacc._records.taken import GroupPartial, GroupTaken
from shmacc.errors import InvalidArgumentError, OutOfRangeError
from shmacc.ray._parts import Config, Missing


class ShardActor:
    """Keeps pieces until a chief asks for the reduction of a round. One call at a time.

    Pieces are read where Ray has put them. Its group, which is private and stays empty, checks
    whatever has arrived as gradients are checked: a piece that does not fit is an error of the
    round, and not of memory.

    Once all hosts of the last round have sent their pieces it reduces them, while these hosts tell
    the owner, and the owner the chief. What the chief then asks for is compared with that: if
    hosts have come or gone, it is reduced once more. At most one reduction is kept, until its
    fence is over.
    """

    def __init__(self, config: Config, number: int) -> None:
        plan = Plan(config.members, config.shards)
        self._number = number
        self._core: ShardCore[GroupPartial] = ShardCore()
        self._group = HostGroup(plan.at_shard(number), reduction_type=config.reduction)
        self._group.unlink()  # nobody else needs its name, and so a death leaves nothing
        self._hosts: tuple[str, ...] = ()  # in the last round, if all of it is in their pieces
        self._reduced: tuple[Share, GroupTaken] | None = None
        self._myself = ray.get_runtime_context().current_actor

    def node(self) -> str:
        """Return the node that it is on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def until_it_ends(self) -> None:
        """Wait for ever, in a thread of its own: the caller hears of the end of the process."""
        threading.Event().wait()

    def pid(self) -> int:
        """Return the process that the shard is."""
        return os.getpid()

    def stage(self, fence: Fence, key: BatchKey, piece: GroupPartial) -> None:
        """Keep a piece."""
        if self._core.stage(fence, key, piece) and self._core.latest(self._hosts):
            # In a call of its own: the host waits for the end of this one.
            self._myself.reduce_ahead.remote()

    def reduce_ahead(self) -> None:
        """Reduce what the next round will probably be."""
        keys = self._core.latest(self._hosts)
        # What a chief has asked for stays: its block may be open.
        if keys and (self._reduced is None or self._reduced[0].fence != self._core.fence):
            with contextlib.suppress(InvalidArgumentError, OutOfRangeError):  # the round's
                self._reduce(self._all_of(keys))

    def _all_of(self, keys: tuple[BatchKey, ...]) -> Share:
        """Return the share of a round that has nothing but these pieces."""
        pieces = self._core.pieces(keys)
        count, weight = sum(p.count for p in pieces), sum(p.weight for p in pieces)
        return Share(self._core.fence, keys, count, weight, pieces[0].step)

    def _reduce(self, share: Share) -> GroupTaken:
        if self._reduced is None or self._reduced[0] != share:
            self._reduced = None  # two at a time might not fit
            self._reduced = share, self._group.reduce(self._core.pieces(share.keys), share)
        return self._reduced[1]

    def reduced(self, opened: Opened) -> GroupTaken | Missing:
        """Return the reduction of this shard's share of a round."""
        share = Share.of(opened, self._number)
        if missing := self._core.missing(opened.fence, share.keys):
            return Missing(missing)
        is_all = share.keys and share == self._all_of(share.keys)
        self._hosts = tuple(dict.fromkeys(key.host for key in share.keys)) if is_all else ()
        return self._reduce(share)

    def rows(self, opened: Opened) -> dict[str, ShardRows] | Missing:
        """Return which rows this shard has in a round.

        In a call of their own, since they are little: they are with the chief before the values
        have been copied.
        """
        taken = self.reduced(opened)
        return taken if isinstance(taken, Missing) else rows_of(taken)

    def values(self, opened: Opened) -> dict[str, npt.NDArray[Any]] | Missing:
        """Return the values that this shard has in a round."""
        taken = self.reduced(opened)
        return taken if isinstance(taken, Missing) else values_of(taken)

    def run(
        self, opened: Opened, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any | Missing:
        """Return what a function makes of this shard's share of a round."""
        taken = self.reduced(opened)
        return taken if isinstance(taken, Missing) else function(taken, *args)

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        self._core.forget(before)
        if self._reduced is not None and self._reduced[0].fence < before:
            self._reduced = None
