"""Shards in the actor of their node: they keep pieces, and add them up when a chief asks."""

import contextlib
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from shmacc._multihost.columns import Columns, Piece
from shmacc._multihost.messages import BatchKey, Fence, Share
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import HostGroup
from shmacc._multihost.shard import ShardCore
from shmacc.errors import InvalidArgumentError, OutOfRangeError
from shmacc.ray._parts import Config, IncompleteError

_THREADS = 2  # they keep the node's own pieces, and reduce pieces before a chief asks


class HostShards:
    """The shards of a node, by number.

    `keep` and `forget` return at once, since the thread of the node's forwarder must not wait.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(_THREADS, "shmacc shards")
        self._shards: dict[int, HostShard] = {}
        self._making = threading.Lock()  # guards the making of a shard

    def of(self, number: int) -> "HostShard":
        with self._making:
            if number not in self._shards:
                self._shards[number] = HostShard(self._config, number, self._pool)
            return self._shards[number]

    def keep(self, shard: int, fence: Fence, key: BatchKey, piece: Piece) -> Future[None]:
        return self._pool.submit(lambda: self.of(shard).stage(fence, key, piece))

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        for shard in list(self._shards.values()):
            self._pool.submit(shard.forget, before)


class HostShard:
    """Keeps pieces until a chief asks for the reduction of a round. It handles one call at a time.

    Pieces stay where Ray has put them. The shard has a private group, which stays empty and checks
    pieces like gradients: a piece that does not fit is an error of the round, and corrupts no
    memory.

    Once all hosts of the last round have sent new pieces, the shard reduces them, before the chief
    asks. If the chief then asks for a different share, since hosts have come or gone, the shard
    reduces the pieces again. It keeps one reduction at most, until the reduction's fence is over.
    """

    def __init__(self, config: Config, number: int, pool: Executor) -> None:
        self._pool = pool
        self._lock = threading.Lock()  # guards the attributes below
        self._core: ShardCore[Piece] = ShardCore()
        members = Plan(config.members, config.shards).at_shard(number)
        self._group = HostGroup(members, reduction_type=config.reduction)
        self._group.unlink()  # no other process needs the name; so a death leaves no name behind
        self._hosts: tuple[str, ...] = ()  # the last round's hosts, if each had a piece here
        self._reduced: tuple[Share, Columns] | None = None

    def stage(self, fence: Fence, key: BatchKey, piece: Piece) -> None:
        with self._lock:
            if self._core.stage(fence, key, piece) and self._core.latest(self._hosts):
                self._pool.submit(self._reduce_ahead)  # in a thread: the host waits for this call

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        with self._lock:
            self._core.forget(before)
            if self._reduced is not None and self._reduced[0].fence < before:
                self._reduced = None

    def reduced(self, share: Share) -> Columns:
        """Return the reduction of this shard's share of a round.

        Raises:
            IncompleteError: Some of its pieces are not here.
        """
        with self._lock:
            return self._found(share)

    def _found(self, share: Share) -> Columns:
        pieces = self._core.pieces(share.fence, share.keys)
        if pieces is not None:
            is_all = share.keys and share == self._all_of(share.keys, pieces)
            self._hosts = tuple(key.host for key in share.keys) if is_all else ()
        elif self._reduced is None or self._reduced[0] != share:
            raise IncompleteError
        return self._reduce(share, pieces or [])

    def _reduce_ahead(self) -> None:
        """Reduce the pieces that the next round will probably have."""
        with self._lock:
            found = self._core.latest(self._hosts)
            # Keep a reduction that a chief has asked for: it may ask again.
            has_asked = self._reduced is not None and self._reduced[0].fence == self._core.fence
            if found and not has_asked:
                keys, pieces = tuple(found), list(found.values())
                with contextlib.suppress(InvalidArgumentError, OutOfRangeError):  # rounds raise it
                    self._reduce(self._all_of(keys, pieces), pieces)

    def _all_of(self, keys: tuple[BatchKey, ...], pieces: list[Piece]) -> Share:
        """Return the share that a round of exactly these pieces has."""
        count, weight = sum(p.count for p in pieces), sum(p.weight for p in pieces)
        return Share(self._core.fence, keys, count, weight, pieces[0].step)

    def _reduce(self, share: Share, pieces: list[Piece]) -> Columns:
        if self._reduced is None or self._reduced[0] != share:
            self._reduced = None  # first, since memory might not suffice for two
            self._reduced = share, self._group.reduce(pieces, share)
        return self._reduced[1]
