"""A shard: it keeps pieces of hosts' batches until their round is over."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from shmacc._multihost.messages import BatchKey, Fence

_Piece = TypeVar("_Piece")


class ShardCore(Generic[_Piece]):
    """Keeps pieces, and hands out those that a chief names.

    Nothing here is ever the only copy of anything: the hosts have the rows until the round is
    consumed. So a shard that is restarted begins with nothing, and a chief that names a piece which
    is not there is told so.
    """

    _KEPT = 2  # of a host: the one that counts, and one that was staged and did not get to count

    def __init__(self) -> None:
        self._fence = Fence(-1, -1)
        self._pieces: dict[str, dict[BatchKey, _Piece]] = {}  # by host

    @property
    def fence(self) -> Fence:
        """That of the pieces."""
        return self._fence

    def __len__(self) -> int:
        return sum(len(own) for own in self._pieces.values())

    def stage(self, fence: Fence, key: BatchKey, piece: _Piece) -> bool:
        """Keep a piece; False if its fence is over."""
        if fence < self._fence:
            return False
        self.forget(fence)
        own = self._pieces.setdefault(key.host, {})
        own[key] = piece
        if len(own) > self._KEPT:
            del own[min(own)]
        return True

    def forget(self, before: Fence) -> None:
        """Drop the pieces of earlier fences."""
        if before > self._fence:
            self._fence = before
            self._pieces.clear()

    def missing(self, fence: Fence, keys: tuple[BatchKey, ...]) -> tuple[BatchKey, ...]:
        """Return those of these pieces that are not here."""
        if fence != self._fence:
            return keys
        return tuple(key for key in keys if key not in self._pieces.get(key.host, {}))

    def latest(self, hosts: Iterable[str]) -> tuple[BatchKey, ...]:
        """Return the last batch of each of these hosts, if all have staged one; else nothing."""
        own = [self._pieces.get(host) for host in hosts]
        return tuple(max(batches) for batches in own if batches) if all(own) else ()

    def pieces(self, keys: tuple[BatchKey, ...]) -> list[_Piece]:
        """Return pieces that are here."""
        return [self._pieces[key.host][key] for key in keys]
