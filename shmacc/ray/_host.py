"""The actor of a node: its forwarder, and the shards that the owner has placed there.

They share a process, and so its death: the owner, which cannot reach one of them, reaches none.
Calls for shards have threads of their own, so they do not keep the forwarder from its heartbeat.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import ray

from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._multihost.packed import PackedArrays, PackedPiece, PackedRows
from shmacc._multihost.pieces import rows_of, values_of
from shmacc._records.stats import Stats
from shmacc._records.taken import GroupTaken
from shmacc.ray._forwarder import Forwarder
from shmacc.ray._incarnation import Copy
from shmacc.ray._parts import Config, Missing
from shmacc.ray._shard import HostShard

CONCURRENCY = {"shards": 4}
"""Threads for the methods of shards, with `max_concurrency` for all others."""

_Method = TypeVar("_Method", bound=Callable[..., Any])

_THREADS = 2  # for pieces of the node's own, and for reductions that nobody has asked for yet


def _of_shards(method: _Method) -> _Method:
    return cast("_Method", ray.method(concurrency_group="shards")(method))


class HostActor:
    """What a group has on a node; the owner makes it, has it serve, and makes another."""

    def __init__(self, config: Config, host: str) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(_THREADS, "shmacc shards")
        self._shards: dict[int, HostShard] = {}
        self._making = threading.Lock()  # of a shard
        self._forwarder = Forwarder(config, host, self)
        self._turn = threading.Condition()  # of what follows
        self._calls = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False

    def pid(self) -> int:
        """Return the process that it is."""
        return os.getpid()

    def config(self) -> Config:
        """Return what the group was made with."""
        return self._config

    # The forwarder

    def serve(self) -> None:
        """Make the segment and follow the owner, until `end`; another call ends this one's wait.

        Returns when this actor has ended its work: the owner knows of a later one of this node.

        Raises:
            Whatever making the segment, or following the owner, has raised.
        """
        with self._turn:
            self._calls += 1
            mine = self._calls
            self._turn.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="shmacc forwarder"
                )
                self._thread.start()
            self._turn.wait_for(lambda: self._ended or self._calls != mine)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._forwarder.run()
        except BaseException as error:  # noqa: BLE001  the owner's
            self._error = error
        finally:
            with self._turn:
                self._ended = True
                self._turn.notify_all()

    def copy(self) -> Copy:
        """See `Forwarder.copy`."""
        return self._forwarder.copy()

    def stats(self) -> Stats | None:
        """See `Forwarder.stats`."""
        return self._forwarder.stats()

    def end(self) -> None:
        """Stop, finish the segment, and remove its name: nobody will ever take of it."""
        self._forwarder.stop()
        with self._turn:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)
        self._forwarder.unlink()

    # What the forwarder needs of the shards here: at once, since its thread must not wait

    def keep(self, shard: int, fence: Fence, key: BatchKey, piece: PackedPiece) -> "Future[None]":
        """Keep a piece of the node's own."""
        return self._pool.submit(self.stage, shard, fence, key, piece)

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        for shard in list(self._shards.values()):
            self._pool.submit(shard.forget, before)

    # Shards

    @_of_shards
    def stage(self, shard: int, fence: Fence, key: BatchKey, piece: PackedPiece) -> None:
        """Keep a piece."""
        self._shard(shard).stage(fence, key, piece)

    @_of_shards
    def rows(self, shard: int, opened: Opened) -> PackedRows | Missing:
        """Return which rows a shard has in a round.

        In a call of their own, since they are little: they are with the chief before the values
        have been copied.
        """
        return self._of_round(shard, opened, lambda taken: PackedRows.of(rows_of(taken)))

    @_of_shards
    def values(self, shard: int, opened: Opened) -> PackedArrays | Missing:
        """Return the values that a shard has in a round."""
        return self._of_round(shard, opened, lambda taken: PackedArrays.of(values_of(taken)))

    @_of_shards
    def run(
        self, shard: int, opened: Opened, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any | Missing:
        """Return what a function makes of a shard's share of a round."""
        return self._of_round(shard, opened, lambda taken: function(taken, *args))

    def _of_round(
        self, shard: int, opened: Opened, function: Callable[[GroupTaken], Any]
    ) -> Any | Missing:
        return self._shard(shard).run(opened, function)

    def _shard(self, number: int) -> HostShard:
        with self._making:
            if number not in self._shards:
                self._shards[number] = HostShard(self._config, number, self._pool)
            return self._shards[number]
