"""The actor of a node: its forwarder, and the shards that the owner has placed there.

They share a process, so they die together: an owner that cannot reach one of them reaches none.
Calls for shards have threads of their own, so they do not keep the forwarder from its heartbeat.

What forwarders have done on the node is counted in shared arrays, ``<name>.forwarder``, which
outlive them: ``shmacc-inspect show`` shows them.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import ray

from shmacc._multihost.columns import Bytes, Piece, Rows, keep_freed_memory
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import BatchKey, Fence, Opened
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import LocalSegment
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.stats import Stats
from shmacc.errors import DeadlineExceededError, InvalidArgumentError, ShmaccError
from shmacc.ray._forwarder import Copy, Incarnation, Shared
from shmacc.ray._parts import LOST, Config, Missing, counters_of, find
from shmacc.ray._shard import HostShard

CONCURRENCY = {"shards": 4}
"""Threads for the methods of shards; all other methods share `max_concurrency` threads."""

_THREADS = 2  # for the node's own pieces, and for reductions that a chief will probably ask for
_AGAIN = 0.2  # seconds until the forwarder looks for an owner again
_COPY = 10.0  # seconds for the thread to copy the segment's content

_COUNTERS = (
    "group",  # the number of the segment's group
    "starts",  # forwarders started on this node
    "reports",  # sent to the owner
    "orders",  # received from the owner
    "step",  # the owner's step in the last order
    "seals",  # how often the segment was sealed for a grant
    "batches",  # batches shipped
    "gradients",  # in these batches
    "bytes",  # in these batches
    "resent",  # pieces sent again, since their shard was lost
    "rounds",  # rounds that consumed these batches
    "resets",  # how often the segment was emptied without a round of this host
    "deaths",  # workers that died or failed
    "refused",  # forwarders that were told of a later one, and ended
)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _of_shards(method: _Method) -> _Method:
    return cast("_Method", ray.method(concurrency_group="shards")(method))


class HostActor:
    """A group's actor on a node. The owner starts it, and starts another when it ends."""

    def __init__(self, config: Config, host: str) -> None:
        keep_freed_memory()
        self._config = config
        self._shared = Shared(config, host, self)
        self._group: HostGroup | None = None
        self._counters: SharedArrays | None = None
        self._pool = ThreadPoolExecutor(_THREADS, "shmacc shards")
        self._shards: dict[int, HostShard] = {}
        self._making = threading.Lock()  # guards the making of a shard
        self._turn = threading.Condition()  # guards the attributes below
        self._calls = 0
        self._work: Future[None] = Future()
        self._thread: threading.Thread | None = None

    def pid(self) -> int:
        return os.getpid()

    def config(self) -> Config:
        return self._config

    # The forwarder

    def serve(self) -> None:
        """Make the segment and follow the owner, until `end`; a second call ends the first one.

        Also returns when the owner knows of a later actor of this node: this one's work is over.

        Raises:
            Whatever making the segment, or following the owner, has raised.
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
        except BaseException as error:  # noqa: BLE001  the owner's
            self._work.set_exception(error)
        else:
            self._work.set_result(None)
        with self._turn:
            self._turn.notify_all()

    def _follow(self) -> None:
        """Follow one owner after the other, until it is stopped, or a later actor is known."""
        group, counters = self._make()
        while not self._shared.stopped.is_set():
            owner = find(self._config, "owner")
            if owner is not None:
                with contextlib.suppress(*LOST):  # the owner is lost: there will be another one
                    if not Incarnation(self._shared, owner, group, counters).run():
                        return
            self._shared.stopped.wait(_AGAIN)

    def _make(self) -> tuple[HostGroup, SharedArrays]:
        """Make the segment, or go on with that of an earlier forwarder of the same group."""
        config = self._config
        options = dict(config.options)
        is_ours = self._has_segment()
        if is_ours:
            options["if_exists"] = "attach"
        group = HostGroup(config.members, config.name, reduction_type=config.reduction, **options)
        if list(group.members) != list(config.members):  # pieces have members by number
            raise InvalidArgumentError(
                f"The segment {config.name!r} that is there has its members in another order, "
                f"{list(group.members)}: remove it, or use if_exists='replace'"
            )
        self._group = group
        if not is_ours and not self._group.running:  # an earlier run finished it
            segment = LocalSegment(self._group, Plan(config.members, config.shards))
            segment.reset(self._group.global_step)
        self._group.handle.keep_free(self._shared.store.room())  # there may be no owner for long
        self._counters = SharedArrays(
            dict.fromkeys(_COUNTERS, np.int64(0)),
            counters_of(config.name),
            mode=options["mode"],
            owners=options["owners"],
            if_exists="attach" if is_ours else "replace",
        )
        self._counters["starts"][...] += 1
        self._counters["group"][...] = config.number  # last: now the segment is this group's
        return self._group, self._counters

    def _has_segment(self) -> bool:
        try:
            with SharedArrays.attach(counters_of(self._config.name)) as found:
                return int(found["group"]) == self._config.number
        except (ShmaccError, KeyError):
            return False

    def copy(self) -> Copy:
        """Return a copy of the segment's content, and the fence that it belongs to.

        Raises:
            DeadlineExceededError: The forwarder is busy.
        """
        asked: Future[Copy] = Future()
        self._shared.asked.put(asked)
        self._shared.woken.set()
        try:
            return asked.result(_COPY)
        except TimeoutError:
            raise DeadlineExceededError(
                f"The forwarder of node {self._shared.host} is busy"
            ) from None

    def stats(self) -> Stats | None:
        """Return the segment's counters; None: there is no segment yet."""
        return None if self._group is None else self._group.stats()

    def end(self) -> None:
        """Stop, finish the segment, and remove its name: nobody will ever take from it."""
        with self._turn:
            self._shared.stopped.set()
            thread = self._thread
        self._shared.woken.set()
        if thread is not None:
            thread.join(timeout=10)
        if self._group is not None:
            self._group.finish()
        for kept in self._group, self._counters:
            if kept is not None:
                kept.unlink()
                kept.close()

    # The forwarder's calls to shards here: they return at once, since its thread must not wait

    def keep(self, shard: int, fence: Fence, key: BatchKey, piece: Piece) -> "Future[None]":
        return self._pool.submit(self.stage, shard, fence, key, piece)

    def forget(self, before: Fence) -> None:
        """Free the memory of rounds that are over."""
        for shard in list(self._shards.values()):
            self._pool.submit(shard.forget, before)

    # Shards

    @_of_shards
    def stage(self, shard: int, fence: Fence, key: BatchKey, piece: Piece) -> None:
        self._shard(shard).stage(fence, key, piece)

    @_of_shards
    def rows(self, shard: int, opened: Opened) -> Rows | Missing:
        """Return which rows a shard has in a round.

        They have a call of their own: they are small, and so reach the chief before the values have
        been copied.
        """
        reduced = self._shard(shard).reduced(opened)
        return reduced if isinstance(reduced, Missing) else reduced.rows

    @_of_shards
    def values(self, shard: int, opened: Opened) -> Bytes | Missing:
        """Return the values that a shard has in a round, as a column."""
        reduced = self._shard(shard).reduced(opened)
        return reduced if isinstance(reduced, Missing) else reduced.values

    @_of_shards
    def run(
        self, shard: int, opened: Opened, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any | Missing:
        """Return what a function returns for a shard's share of a round."""
        return self._shard(shard).run(opened, function, args)

    def _shard(self, number: int) -> HostShard:
        with self._making:
            if number not in self._shards:
                self._shards[number] = HostShard(self._config, number, self._pool)
            return self._shards[number]
