"""The forwarder of a node: its loop, which goes on with the next owner if its owner is lost.

One thread alone uses the segment and the core. It waits a moment for answers of the owner and of
shards, looks at the segment, and does what the core asks for. While nothing happens, it reads only
the count, which takes no lock, and pauses for a fiftieth of the idle time. So an idle node costs
little more than an idle Ray actor.
"""

import logging
import queue
import threading
import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from shmacc._accumulators.taken import GroupPartial
from shmacc._multihost import forwarder as act
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.messages import LAST_STEP, BatchKey, Fence, Order
from shmacc._multihost.segment import Content
from shmacc.errors import FailedPreconditionError
from shmacc.ray._memory import Memory, ObjectStore
from shmacc.ray._parts import DIED, LOST, Config, find
from shmacc.ray._shard import HostShards

_logger = logging.getLogger("shmacc")

_SHARE = 0.02  # the pause between two looks at the segment, as a share of the idle time
_SHORTEST, _LONGEST = 0.001, 0.1  # the bounds of that pause
_HELD = 0.02  # the pause while the segment is held: no gradient can come
_RESTING = 0.5  # after this idle time the loop reads only the count
_AGAIN = 0.2  # seconds until a failed call is repeated, or a piece for a lost shard sent again

Looked = tuple[Fence | None, GroupPartial]
"""The fence that a segment's content belongs to, and a copy of the content."""


@dataclass(frozen=True)
class Shared:
    """Objects that a forwarder's thread shares with the actor's other threads."""

    config: Config
    host: str  # the node
    here: HostShards  # the node's shards
    store: ObjectStore = field(default_factory=ObjectStore)
    asked: queue.SimpleQueue[Future[Looked]] = field(default_factory=queue.SimpleQueue)
    woken: threading.Event = field(default_factory=threading.Event)  # by an answer, or a question
    stopped: threading.Event = field(default_factory=threading.Event)  # the forwarder must end

    def wakes(self, future: Future[Any]) -> Future[Any]:
        """Wake the forwarder's thread when the answer comes, which costs less than polling."""
        future.add_done_callback(lambda _: self.woken.set())
        return future


class Incarnation:
    """One incarnation of a forwarder: it enrols with one owner, and also follows later owners."""

    def __init__(self, shared: Shared, owner: Any, memory: Memory) -> None:
        config, self._host = shared.config, shared.host
        self._shared, self._config = shared, config
        self._counters, self._woken = memory.counters, shared.woken
        self._segment, self._copy = memory.segment, memory.copy
        self._heartbeat = config.timing.heartbeat
        self._around_at = 0.0  # when `_look_around` is due
        self._owner: Any = owner  # None: it has died, and no chief has made another one
        look = None if self._copy is None else self._copy.look()
        self._incarnation: int = ray.get(owner.enrol.remote(self._host, look))
        self._peers: dict[str, Any] = {}  # actors of other nodes
        kept = int(self._counters["promise"]), int(self._counters["copies"])
        self._core = ForwarderCore(self._host, self._incarnation, config.timing, look, *kept)
        self._serial = -1
        self._fence: Fence | None = None  # the fence of the last order
        self._polls: list[Future[Order]] = []  # calls to the owner without an answer yet
        self._poll_from = 0.0
        self._held: Content | None = None
        self._shipping: _Shipping | None = None

    def run(self) -> bool:
        """Follow the owner until stopped; return False if the owner knows a later incarnation."""
        try:
            changed = due = time.monotonic()
            seen: object = None
            count, answered = -1, False
            while not self._shared.stopped.is_set():
                now = time.monotonic()
                before, count = count, self._segment.look()[1]
                quiet, held = now - changed, self._segment.is_held
                pause = _HELD if held else min(max(_SHORTEST, quiet * _SHARE), _LONGEST)
                resting = held or quiet >= _RESTING
                # Nothing has changed: do no more than read the count, until a report is due.
                if resting and count == before and now < due and not answered:
                    answered = self._wait(min(pause, due - now))
                    continue
                self._look_around(now)
                self._answer()
                if self._copy is not None:
                    self._copy.work(self._core, self._woken)
                self._look()  # right before `_act`: an action on older facts could undo a finish
                if not self._act():
                    return False
                self._talk(now)
                state = (count, self._serial, self._shipping is None)
                if state != seen:
                    seen, changed = state, now
                due = now if self._shipping else min(self._core.report_due(now), self._around_at)
                answered = self._wait(pause)
            return True
        finally:
            if self._copy is not None:
                self._copy.rest(self._core)
            self._segment.release()

    def _look(self) -> None:
        step, count, finished = self._segment.look()
        if self._core.is_passed_by(step):
            self._segment.reset(min(step + 1, LAST_STEP))
            step, count, finished = self._segment.look()
        self._core.observe(step, count, finished=finished)

    def _look_around(self, now: float) -> None:
        """Check for deaths, removed names, and how much of /dev/shm Ray's objects need.

        This happens once a heartbeat only, since it makes a system call per attached process.
        """
        if now >= self._around_at:
            self._around_at = now + self._heartbeat
            if self._copy is not None:
                self._copy.look_around(self._core)
            if self._segment.exists:
                group = self._segment.group
                if group.handle.unlinked:
                    what = "the name of its segment was removed: no process can attach to it"
                    if group.stats().attached == 1:  # only this one; the next actor makes a segment
                        raise FailedPreconditionError(what)
                    self._core.nameless = f"{what} until those that have it attached have ended"
                group.handle.keep_free(self._shared.store.room())
            if (found := self._segment.deaths()) is not None:
                pids = found.pids or ()
                self._count("deaths", len(pids))
                self._core.died(pids, found.contributors or (), found.reasons or ())

    def _answer(self) -> None:
        """Answer calls of `HostActor.copy` with a copy of the segment's content."""
        while not self._shared.asked.empty():
            asked = self._shared.asked.get()
            try:
                asked.set_result((self._core.fence, self._segment.group.look()))
            except Exception as error:  # noqa: BLE001  the caller's
                asked.set_exception(error)

    def _count(self, what: str, number: int = 1) -> None:
        """Add to a counter of ``shmacc-inspect show``; a death here loses `number` at most."""
        self._counters[what][...] += number

    def _act(self) -> bool:  # noqa: C901  one case for each action
        """Do the actions that the core asks for; return False if this incarnation must end."""
        core, segment = self._core, self._segment
        while (action := core.next_action()) is not None:
            match action:
                case act.Do.HOLD, _:
                    began = time.monotonic()
                    self._held = segment.hold()
                    core.held(self._held.batch, began)
                    if self._copy is not None:  # a process may have restored the copy before
                        self._copy.look_around(core)
                    self._count("seals")
                case act.Do.SHIP, grant:
                    if self._shipping is None or self._shipping.key.grant != grant:
                        self._ship(grant)
                    return True
                case act.Do.RELEASE, _:
                    segment.release()
                case act.Do.CONSUME, _:
                    segment.consume()
                    self._count("rounds")
                case act.Do.RESET, step:
                    segment.reset(step)
                    self._count("resets")
                case act.Do.SET_STEP, step:
                    segment.set_step(step)
                case act.Do.FINISH, _:
                    segment.group.finish()
                case act.Do.STOP, _:
                    self._count("refused")
                    return False
            if action[0] is not act.Do.HOLD:
                core.done(action[0])
            self._look()
        return True

    def _ship(self, grant: int) -> None:
        fence = self._core.fence
        if self._held is None or fence is None:
            return
        key, hosts = BatchKey(self._host, self._incarnation, grant), self._core.shard_hosts
        self._shipping = _Shipping(self._shared, self._peers, fence, key, hosts, self._held)
        self._held = None
        self._shipped()

    def _shipped(self) -> None:
        """Tell the core which pieces have not arrived; send pieces for lost shards again."""
        shipping = self._shipping
        if shipping is None:
            return
        is_done = shipping.is_done()
        self._core.shipped(shipping.key.grant, shipping.unreached)
        if is_done:
            self._shipping = None
            self._count("batches")
            self._count("gradients", shipping.gradients)
            self._count("bytes", shipping.bytes)
            self._count("resent", shipping.resent)

    def _talk(self, now: float) -> None:
        """Send a report if one is due, or if no call waits at the owner for the next order."""
        if self._owner is None:
            if now >= self._poll_from:
                self._owner, self._poll_from = find(self._config, "owner"), now + _AGAIN
            return
        listens = self._polls or self._core.has_answer_to_come or now < self._poll_from
        if self._core.report_due(now) <= now or not listens:
            self._count("reports")
            call = self._owner.report.remote(self._core.report(now), self._serial).future()
            self._polls.append(self._shared.wakes(call))

    def _wait(self, seconds: float) -> bool:
        """Wait for answers and questions, handle the answers; return whether something came."""
        if woken := self._woken.wait(seconds):
            self._woken.clear()  # only if woken: what comes after a timeout must end the next wait
        for call in [call for call in self._polls if call.done()]:
            self._polls.remove(call)
            self._heard(call)
        self._shipped()
        return woken

    def _heard(self, call: Future[Order]) -> None:
        try:
            order = call.result()
        except LOST as error:
            if isinstance(error, DIED):
                self._owner = None
            self._poll_from = time.monotonic() + _AGAIN
            return
        if not self._core.may_follow(order):
            self._poll_from = time.monotonic() + _AGAIN
            return
        if order.term > self._counters["promise"]:
            self._counters["promise"][...] = order.term  # before the core reports it to the owner
        self._core.receive(order)
        if self._core.copies != self._counters["copies"]:
            self._counters["copies"][...] = self._core.copies
        self._serial = order.serial
        if order.ready and order.fence != self._fence:
            self._fence = order.fence
            self._shared.here.forget(order.fence)
        self._count("orders")
        self._counters["step"][...] = order.step


class _Shipping:
    """A batch on its way to the shards: a piece is sent again and again until it has arrived."""

    def __init__(
        self,
        shared: Shared,
        peers: dict[str, Any],  # the actors of other nodes, as far as they are known
        fence: Fence,
        key: BatchKey,
        hosts: tuple[str, ...],  # of each shard
        held: Content,
    ) -> None:
        self.key = key
        self.gradients = held.batch.count
        self.bytes = sum(piece.columns.nbytes for piece in held.pieces.values())
        self.resent = 0
        self._shared, self._peers, self._fence, self._hosts = shared, peers, fence, hosts
        self._left = dict(held.pieces)
        self._calls: dict[Future[None], int] = {}
        self._again: list[tuple[float, int]] = []
        self._refused: set[int] = set()  # shards that could not keep their pieces
        # Begin with a shard chosen by the host's name, so that not all hosts begin with the same.
        first = zlib.crc32(key.host.encode()) % len(hosts)
        for shard in sorted(self._left, key=lambda shard: (shard - first) % len(hosts)):
            self._send(shard)

    @property
    def unreached(self) -> frozenset[str]:
        """The nodes of shards whose pieces have not arrived."""
        return frozenset(self._hosts[shard] for shard in self._left)

    def is_done(self) -> bool:
        """Whether all pieces have arrived; sends a piece again if its shard was lost."""
        for call in [call for call in self._calls if call.done()]:
            shard = self._calls.pop(call)
            try:
                call.result()
                del self._left[shard]
            except Exception as error:  # noqa: BLE001  the shard's, on this node or on another
                if not isinstance(error, LOST) and shard not in self._refused:
                    self._refused.add(shard)
                    why = getattr(error, "cause", error)
                    _logger.warning("Shard %d does not keep its piece: %s", shard, why)
                self._peers.pop(self._hosts[shard], None)
                self._again.append((time.monotonic() + _AGAIN, shard))
        for due in [due for due in self._again if due[0] <= time.monotonic()]:
            self._again.remove(due)
            self.resent += 1
            self._send(due[1])
        return not self._left

    def _send(self, shard: int) -> None:
        place, given = self._hosts[shard], (shard, self._fence, self.key, self._left[shard])
        if place == self.key.host:
            call = self._shared.here.keep(*given)
        else:
            actor = self._peers.get(place) or find(self._shared.config, f"host {place}")
            if actor is None:  # the owner will make another actor
                self._again.append((time.monotonic() + _AGAIN, shard))
                return
            self._peers[place] = actor
            call = actor.stage.remote(*given).future()
        self._calls[self._shared.wakes(call)] = shard
