"""The actor of a forwarder: one on each node, with a thread that never stops.

The thread waits for answers of the owner and of shards for a moment, looks at the segment, and does
the core's actions: so everything that touches the segment or the core is in one thread. Looking
costs about a microsecond and takes no lock.

What it has done is counted in shared arrays of the node, ``<name>.forwarder``, which outlive it:
``shmacc-inspect show`` shows them.
"""

import contextlib
import logging
import os
import queue
import threading
import time
import zlib
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray

from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc._multihost import forwarder as act
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import BatchKey, Fence, Order
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import LocalSegment, describe
from shmacc._records.stats import Stats
from shmacc._records.taken import GroupPartial
from shmacc.errors import ShmaccError
from shmacc.ray._parts import LOST, Config, counters_of, find
from shmacc.ray._shipping import Shipping

_logger = logging.getLogger("shmacc")

_BUSY = 0.001  # how long the thread waits for answers between two looks at the segment
_IDLE = 0.02  # the same, if it is sealed, or nothing has changed for a while
_RESTING = 0.5  # after so long
_AGAIN = 0.2  # until a call that failed is tried again
_COPY = 10.0  # that the thread has for a copy of what the segment has

_COUNTERS = (
    "group",  # the number of the group that the segment is of
    "starts",  # of forwarders on this node
    "reports",  # to the owner
    "orders",  # of the owner
    "step",  # of the owner, by the last order
    "seals",  # of the segment, for a grant of the owner
    "batches",  # shipped
    "gradients",  # in these
    "bytes",  # in these
    "resent",  # pieces whose shard was lost meanwhile
    "rounds",  # that consumed what was shipped
    "resets",  # of the segment, whose gradients got into no round of this host's
    "deaths",  # of processes that had applied
    "refused",  # forwarders that were told of a later one, and ended
)


class _Asked(Future[tuple[Fence | None, GroupPartial]]):
    """A copy of what the segment has, and its fence: wanted by a chief."""


class ForwarderActor:
    """The forwarder of the node that it is on; the owner has it serve, and makes another."""

    def __init__(self, config: Config, host: str) -> None:
        self._config = config
        self._host = host
        self._group: HostGroup | None = None
        self._counters: SharedArrays | None = None
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._turn = threading.Condition()  # of what follows
        self._calls = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False

    def pid(self) -> int:
        """Return the process that the forwarder is."""
        return os.getpid()

    def config(self) -> Config:
        """Return what the group was made with."""
        return self._config

    def serve(self) -> None:
        """Make the segment and follow the owner, until `end`; another call ends this one's wait.

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

    def copy(self) -> tuple[Fence | None, GroupPartial]:
        """Return what the segment has, and to which fence it belongs.

        Raises:
            TimeoutError: The thread has not come to it.
        """
        asked = _Asked()
        self._asked.put(asked)
        return asked.result(_COPY)

    def stats(self) -> Stats | None:
        """Return the segment's counters; None: there is no segment yet."""
        return None if self._group is None else self._group.stats()

    def end(self) -> None:
        """Stop, finish the segment, and remove its name: nobody will ever take of it."""
        self._stop.set()
        with self._turn:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)
        if self._group is not None:
            self._group.finish()
        for kept in self._group, self._counters:
            if kept is not None:
                kept.unlink()
                kept.close()

    def _run(self) -> None:
        try:
            group, counters = self._make()
            while not self._stop.is_set():
                owner = find(self._config, "owner")
                shards = [find(self._config, f"shard {n}") for n in range(self._config.shards)]
                if owner is not None and None not in shards:
                    with contextlib.suppress(*LOST):  # there will be another one
                        _Loop(
                            self._config,
                            self._host,
                            owner,
                            shards,
                            group,
                            counters,
                            self._asked,
                            self._stop,
                        ).run()
                self._stop.wait(_AGAIN)
        except BaseException as error:
            _logger.exception("The forwarder of %r ends", self._host)
            self._error = error
        finally:
            with self._turn:
                self._ended = True
                self._turn.notify_all()

    def _make(self) -> tuple[HostGroup, SharedArrays]:
        """Make the segment, or go on with that of an earlier forwarder of the same group."""
        config = self._config
        options = dict(config.options)
        is_ours = self._has_segment()
        if is_ours:
            options["if_exists"] = "attach"
        self._group = HostGroup(
            config.members, config.name, reduction_type=config.reduction, **options
        )
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


class _Loop:
    """One incarnation of the forwarder."""

    def __init__(
        self,
        config: Config,
        host: str,
        owner: Any,
        shards: list[Any],
        group: HostGroup,
        counters: SharedArrays,
        asked: queue.SimpleQueue[_Asked],
        stop: threading.Event,
    ) -> None:
        self._host, self._group, self._stop = host, group, stop
        self._config, self._plan = config, Plan(group.members, config.shards)
        self._counters, self._asked = counters, asked
        self._heartbeat = config.timing.heartbeat
        self._deaths_at = 0.0  # when they are looked for next
        self._owner: Any = owner  # None: it has died, and no chief has made another one
        self._incarnation: int = ray.get(owner.enrol.remote(host))
        self._shards = shards
        token = group.handle.config()["token"]  # a number of the segment's own
        self._core = ForwarderCore(host, self._incarnation, config.timing, token)
        self._segment = LocalSegment(group, config.shards)
        self._fence = Fence(0, 0)
        self._serial = -1
        self._woken = threading.Event()  # by an answer
        self._polls: list[Future[Order]] = []  # calls of the owner that have not been answered
        self._poll_from = 0.0
        self._sealed: GroupPartial | None = None
        self._shipping: Shipping | None = None

    def run(self) -> None:
        """Go on until it is stopped, or the owner knows a later incarnation."""
        try:
            changed = time.monotonic()
            seen: object = None
            while not self._stop.is_set():
                now = time.monotonic()
                self._look()
                self._look_for_deaths(now)
                self._answer()
                alive = self._act()
                if not alive:
                    return
                self._talk(now)
                state = (self._group.num_accumulated(), self._serial, self._shipping is None)
                if state != seen:
                    seen, changed = state, now
                resting = self._segment.is_sealed or now - changed >= _RESTING
                self._wait(_IDLE if resting else _BUSY)
        finally:
            self._segment.release()

    def _look(self) -> None:
        group = self._group
        self._core.observe(
            group.global_step,
            group.num_accumulated(),
            self._segment.dropped(),
            finished=not group.running,
        )

    def _look_for_deaths(self, now: float) -> None:
        """Look now and then: it takes a system call for each process that is attached."""
        if now >= self._deaths_at:
            self._deaths_at = now + self._heartbeat
            if (found := self._segment.deaths()) is not None:
                pids = found.pids or ()
                self._count("deaths", len(pids))
                self._core.died(pids, found.contributors or (), found.reasons or ())

    def _answer(self) -> None:
        """Give chiefs their copies."""
        while not self._asked.empty():
            asked = self._asked.get()
            try:
                asked.set_result((self._core.fence, self._segment.copy()))
            except Exception as error:  # noqa: BLE001  the caller's
                asked.set_exception(error)

    def _count(self, what: str, number: int = 1) -> None:
        """Count, for those who look; a death costs the count at most the last number."""
        self._counters[what][...] += number

    def _act(self) -> bool:  # noqa: C901  one case for each action
        """Do all that is to be done; False: this incarnation must end."""
        core, segment = self._core, self._segment
        while (action := core.next_action()) is not None:
            match action:
                case act.Seal():
                    began = time.monotonic()
                    self._sealed = segment.seal()
                    core.sealed(describe(self._sealed), began)
                    self._count("seals")
                case act.Ship(seq):
                    if self._shipping is None or self._shipping.seq != seq:
                        self._ship(seq)
                    return True
                case act.Release():
                    segment.release()
                    core.released()
                case act.Consume():
                    segment.consume()
                    core.moved()
                    self._count("rounds")
                case act.Reset(step):
                    segment.reset(step)
                    core.moved()
                    self._count("resets")
                case act.SetStep(step):
                    segment.set_step(step)
                    core.step_set()
                case act.Finish():
                    self._group.finish()
                    core.finished()
                case act.Stop():
                    self._count("refused")
                    return False
            self._look()
        return True

    def _ship(self, seq: int) -> None:
        fence = self._core.fence
        if self._sealed is None or fence is None:
            return
        key = BatchKey(self._host, self._incarnation, seq)
        first = zlib.crc32(self._host.encode()) % len(self._shards)
        pieces = self._plan.split(self._sealed, first)
        self._shipping = Shipping(seq, fence, key, pieces, self._stage, self._lost_shard)
        self._sealed = None
        self._shipped()

    def _stage(self, shard: int, *piece: Any) -> "Future[None] | None":
        """Send a shard a piece; None: there is no such shard now."""
        if self._shards[shard] is None:
            self._shards[shard] = find(self._config, f"shard {shard}")
        actor = self._shards[shard]
        return None if actor is None else self._call(actor.stage, *piece)

    def _lost_shard(self, shard: int) -> None:
        self._shards[shard] = None

    def _shipped(self) -> None:
        """Take note of pieces that have arrived; send those again that have not."""
        shipping = self._shipping
        if shipping is not None and shipping.is_done():
            self._core.shipped(shipping.seq, shipping.shards)
            self._shipping = None
            self._count("batches")
            self._count("gradients", shipping.gradients)
            self._count("bytes", shipping.bytes)
            self._count("resent", shipping.resent)

    def _talk(self, now: float) -> None:
        """Report, if it is time; have a call at the owner that waits for a new order."""
        if self._owner is None:
            if now >= self._poll_from:
                self._owner, self._poll_from = find(self._config, "owner"), now + _AGAIN
            return
        listens = self._polls or self._core.has_answer_to_come or now < self._poll_from
        if self._core.report_due(now) <= now or not listens:
            self._count("reports")
            self._polls.append(self._call(self._owner.report, self._core.report(now), self._serial))

    def _call(self, method: Any, *args: Any) -> "Future[Any]":
        """Call an actor; the answer wakes the thread, which costs less than to ask Ray for it."""
        future: Future[Any] = method.remote(*args).future()
        future.add_done_callback(lambda _: self._woken.set())
        return future

    def _wait(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()
        for call in [call for call in self._polls if call.done()]:
            self._polls.remove(call)
            self._heard(call)
        self._shipped()

    def _heard(self, call: "Future[Order]") -> None:
        try:
            order = call.result()
        except LOST as error:
            if isinstance(error, ray.exceptions.ActorDiedError):
                self._owner = None
            self._poll_from = time.monotonic() + _AGAIN
            return
        self._core.receive(order)
        self._serial = order.serial
        self._count("orders")
        self._counters["step"][...] = order.step
