"""A shard: it keeps pieces of hosts' batches until their round is over."""

from collections.abc import Collection
from typing import Generic, TypeVar

from shmacc._multihost.messages import BatchKey, Fence

_Piece = TypeVar("_Piece")


class ShardCore(Generic[_Piece]):
    """Keeps the last piece of each host, and returns the pieces that a chief names.

    The pieces are copies: the hosts keep the rows until the round is consumed. So a restarted shard
    begins empty, and a chief that names a missing piece is told that it is missing.
    """

    def __init__(self) -> None:
        self.fence = Fence(-1, -1)  # the pieces' fence
        self._pieces: dict[str, tuple[BatchKey, _Piece]] = {}  # by host

    def __len__(self) -> int:
        return len(self._pieces)

    def stage(self, fence: Fence, key: BatchKey, piece: _Piece) -> bool:
        """Keep a piece; return False if its fence is over, or a later piece of its host is here."""
        if fence < self.fence:
            return False
        self.forget(fence)
        if key.host in self._pieces and self._pieces[key.host][0] > key:
            return False
        self._pieces[key.host] = key, piece
        return True

    def forget(self, before: Fence) -> None:
        """Drop the pieces of earlier fences."""
        if before > self.fence:
            self.fence = before
            self._pieces.clear()

    def latest(self, hosts: Collection[str]) -> dict[BatchKey, _Piece]:
        """Return these hosts' last pieces; if any host has no piece here, return nothing."""
        own = dict(self._pieces[host] for host in hosts if host in self._pieces)
        return own if len(own) == len(hosts) else {}

    def pieces(self, fence: Fence, keys: tuple[BatchKey, ...]) -> list[_Piece] | None:
        """Return the pieces with these keys; None: some are missing."""
        found = self.latest([key.host for key in keys])
        return list(found.values()) if fence == self.fence and tuple(found) == keys else None
