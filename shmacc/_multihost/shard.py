"""A shard: it keeps pieces of hosts' batches until their round is over."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from shmacc._multihost.messages import BatchKey, Fence

_Piece = TypeVar("_Piece")


class ShardCore(Generic[_Piece]):
    """Keeps the last piece of each host, and hands out those that a chief names.

    Nothing here is ever the only copy of anything: the hosts have the rows until the round is
    consumed. So a shard that is restarted begins with nothing, and a chief that names a piece which
    is not there is told so.
    """

    def __init__(self) -> None:
        self.fence = Fence(-1, -1)  # the pieces' fence
        self._pieces: dict[str, tuple[BatchKey, _Piece]] = {}  # by host

    def __len__(self) -> int:
        return len(self._pieces)

    def stage(self, fence: Fence, key: BatchKey, piece: _Piece) -> bool:
        """Keep a piece; False: its fence is over, or a later piece of its host is here."""
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

    def latest(self, hosts: Iterable[str]) -> tuple[BatchKey, ...]:
        """Return the key of each host's last piece; nothing, unless all of them have one here."""
        own = [self._pieces.get(host) for host in hosts]
        return tuple(one[0] for one in own if one is not None) if all(own) else ()

    def pieces(self, fence: Fence, keys: tuple[BatchKey, ...]) -> list[_Piece] | None:
        """Return the pieces with these keys; None: some are missing."""
        if fence != self.fence:
            return None
        found = [self._pieces.get(key.host) for key in keys]
        here = [one[1] for one, key in zip(found, keys, strict=True) if one and one[0] == key]
        return here if len(here) == len(keys) else None
