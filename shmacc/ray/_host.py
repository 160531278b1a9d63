"""The actor of a node: its forwarder, and the shards that the owner has placed there.

Forwarder and shards share a process, so they die together, and the owner reaches all or none.
Calls for shards have threads of their own, so that they do not delay the forwarder's heartbeat.

What outlives the actor, such as the segment, is in `_memory.py`.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import ray

from shmacc._base.array_types import ValueArray
from shmacc._base.lineage import Copy, Lineage
from shmacc._multihost.columns import Bytes, Piece, Rows, keep_freed_memory
from shmacc._multihost.messages import BatchKey, Fence, Share
from shmacc._segment.stats import Stats
from shmacc.errors import DeadlineExceededError, FailedPreconditionError
from shmacc.ray._copy import HostCopy, Made
from shmacc.ray._forwarder import Incarnation, Looked, Shared
from shmacc.ray._head import shown
from shmacc.ray._memory import Memory
from shmacc.ray._parts import LOST, Config, check_version, find, remove_names
from shmacc.ray._shard import HostShards

CONCURRENCY = {"shards": 4}
"""Threads for the methods of shards; all other methods share `max_concurrency` threads."""

_AGAIN = 0.2  # seconds until the forwarder looks for an owner again
_COPY = 10.0  # seconds for the thread to copy the segment's content

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _of_shards(method: _Method) -> _Method:
    return cast("_Method", ray.method(concurrency_group="shards")(method))


class HostActor:
    """A group's actor on a node. The owner starts it, and replaces it when it ends."""

    def __init__(self, config: Config, host: str) -> None:
        keep_freed_memory()
        self._config = config
        self._shards = HostShards(config)
        self._shared = Shared(config, host, self._shards)
        self._memory: Memory | None = None
        self._turn = threading.Condition()  # guards the attributes below
        self._calls = 0
        self._work: Future[None] = Future()
        self._thread: threading.Thread | None = None

    def config(self) -> Config:
        return self._config

    # The forwarder

    def serve(self) -> None:
        """Make the segment and follow the owner, until `end`. A second call ends the first call.

        A call also returns when the owner knows a later actor of this node: it replaces this one.
        """
        with self._turn:
            self._calls += 1
            mine = self._calls
            self._turn.notify_all()
            if self._shared.stopped.is_set():  # before it has begun
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="shmacc forwarder"
                )
                self._thread.start()
            self._turn.wait_for(lambda: self._work.done() or self._calls != mine)
            if self._work.done():
                self._work.result()

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # noqa: BLE001  `serve` raises it to the owner
            self._work.set_exception(error)
        else:
            self._work.set_result(None)
        with self._turn:
            self._turn.notify_all()

    def _follow(self) -> None:
        """Follow one owner after the other, until stopped, or an owner knows a later actor."""
        check_version(self._config.version)
        self._memory = memory = Memory(self._config, self._shared.host, self._shared.store)
        while not self._shared.stopped.is_set():
            owner = find(self._config, "owner")
            if owner is not None:
                with contextlib.suppress(*LOST):  # the owner is lost: there will be another one
                    if not Incarnation(self._shared, owner, memory).run():
                        return
            self._shared.stopped.wait(_AGAIN)

    def copy(self) -> Looked:
        """Return a copy of the segment's content, and the fence that it belongs to."""
        asked: Future[Looked] = Future()
        self._shared.asked.put(asked)
        self._shared.woken.set()
        try:
            return asked.result(_COPY)
        except TimeoutError:
            raise DeadlineExceededError(
                f"The forwarder of node {shown(self._shared.host)} is busy"
            ) from None

    def stats(self) -> Stats | None:
        """Return the segment's counters; None: there is no segment yet."""
        segment = None if self._memory is None else self._memory.segment
        return segment.group.stats() if segment is not None and segment.exists else None

    def end(self, *, undo: bool = False) -> None:
        """Stop, and remove what the node has of the group (`Memory.end`)."""
        with self._turn:
            self._shared.stopped.set()
            thread = self._thread
        self._shared.woken.set()
        if thread is not None:
            thread.join(timeout=10)
        if self._memory is not None:
            self._memory.end(undo=undo)
        elif not undo:
            remove_names(self._config)  # an earlier actor of this node may have made them

    # Shards, and the copy of the parameters

    @property
    def _copy(self) -> HostCopy | None:
        return None if self._memory is None else self._memory.copy

    @_of_shards
    def made_since(self, lineage: Lineage) -> list[Made] | None:
        """Return the updates that this node's copy got after `lineage`; None: not all are kept."""
        return None if self._copy is None else self._copy.made_since(lineage)

    @_of_shards
    def state_of_copy(self) -> tuple[Copy, dict[str, ValueArray]]:
        """Return the whole contents of this node's copy of the parameters."""
        if self._copy is None or (found := self._copy.state()) is None:
            raise FailedPreconditionError(f"Node {self._shared.host} has no copy yet")
        return found

    @_of_shards
    def stage(self, shard: int, fence: Fence, key: BatchKey, piece: Piece) -> None:
        self._shards.of(shard).stage(fence, key, piece)

    @_of_shards
    def rows(self, shard: int, share: Share) -> Rows:
        """Return the numbers of the rows that a shard has in a round.

        `values` is a separate call: row numbers are small, and reach the chief while the values are
        still being copied.
        """
        return self._shards.of(shard).reduced(share).rows

    @_of_shards
    def values(self, shard: int, share: Share) -> Bytes:
        """Return the values that a shard has in a round, as a column."""
        return self._shards.of(shard).reduced(share).values
