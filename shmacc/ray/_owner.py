"""The actor of the owner: its core, calls that wait for a change, and the care for the others."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from shmacc._multihost.messages import (
    Answer,
    BatchKey,
    Fence,
    Order,
    Report,
    Waiting,
)
from shmacc._multihost.owner import OwnerCore
from shmacc.ray._forwarder import ForwarderActor
from shmacc.ray._parts import NAMESPACE, Config, HostState, living_nodes, was_restarted
from shmacc.ray._shard import ShardActor

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_LOOK_FOR_NODES = 1.0


class OwnerActor:
    """The owner. Its methods run in one event loop, so the core needs no lock.

    An owner that Ray has started again does not know the step. Its term is the time: later than
    that of the one before it, which was dead by then.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        restarted = was_restarted()
        term = time.time_ns() // 1_000_000
        self._core = OwnerCore(term, None if restarted else 0, config.timing)
        self._changed = asyncio.Event()
        self._serial = self._core.serial  # when it was set last
        self._tasks: list[asyncio.Task[None]] = []
        self._places: PlacementGroup | None = None
        self._shards: list[Any] = []
        self._forwarders: dict[str, Any] = {}

    async def config(self) -> Config:
        """Return what the group was made with; the first call starts everything."""
        self._start()
        return self._config

    async def is_at_home(self) -> bool:
        """Whether it is on the node where it belongs."""
        return bool(ray.get_runtime_context().get_node_id() == self._config.home)

    async def pid(self) -> int:
        """Return the process that the owner is."""
        return os.getpid()

    # Forwarders

    async def enrol(self, host: str) -> int:
        """See `OwnerCore.enrol`."""
        self._start()
        incarnation = self._core.enrol(host, time.monotonic())
        self._wake()
        return incarnation

    async def report(self, report: Report, serial: int) -> Order:
        """Take a report in; return the order as soon as it is another one than that of `serial`."""
        self._start()
        self._core.report(report, time.monotonic())
        self._wake()

        timeout = self._config.timing.heartbeat * self._core.pace * 2
        await self._park(timeout, lambda: not self._core.has_news(report.host, serial))
        return self._core.order(report.host, report.incarnation)

    # Chiefs

    async def ask(self, ticket: str, required: int, wait: float, *, tell: bool) -> Answer:
        """See `OwnerCore.ask`; returns as soon as there is a result, or after `wait` seconds."""
        self._start()
        answer = self._core.ask(ticket, required, time.monotonic(), tell=tell)
        self._wake()
        if isinstance(answer, Waiting):
            await self._park(wait, lambda: isinstance(self._core.answer(ticket), Waiting))
        return self._core.answer(ticket)

    async def leave(self, ticket: str, *, consume: bool) -> bool:
        """See `OwnerCore.leave`."""
        consumed = self._core.leave(ticket, time.monotonic(), consume=consume)
        self._wake()
        return consumed

    async def missing(self, ticket: str, keys: tuple[BatchKey, ...]) -> None:
        """See `OwnerCore.missing`."""
        self._core.missing(ticket, keys, time.monotonic())
        self._wake()

    async def cancel(self) -> None:
        """See `OwnerCore.cancel`."""
        self._core.cancel(time.monotonic())
        self._wake()

    async def wait_step(self, after: int, wait: float) -> int | None:
        """Return the step if it is past `after`, or is so within `wait` seconds; else None."""
        self._start()
        await self._park(wait, lambda: not self._is_past(after))
        return self._core.step if self._is_past(after) else None

    def _is_past(self, after: int) -> bool:
        return self._core.is_ready and self._core.step > after

    async def forwarders(self) -> tuple[Fence, dict[str, Any]]:
        """Return the fence, and the forwarders of the hosts that are alive."""
        self._core.tick(time.monotonic())
        alive = {name for name, (lives, _) in self._core.hosts().items() if lives}
        return self._core.fence, {n: f for n, f in self._forwarders.items() if n in alive}

    async def set_global_step(self, step: int, request: str) -> int:
        """See `OwnerCore.set_global_step`."""
        self._start()
        before = self._core.set_global_step(step, request, time.monotonic())
        self._wake()
        return before

    async def advance_step(self, step: int) -> int:
        """See `OwnerCore.advance_step`."""
        self._start()
        dropped = self._core.advance_step(step, time.monotonic())
        self._wake()
        return dropped

    async def state(self) -> tuple[int, int, dict[str, HostState], dict[str, int]]:
        """Return the step, how many gradients there are, the hosts, and the counters."""
        self._start()
        self._core.tick(time.monotonic())
        hosts = {name: HostState(*state) for name, state in self._core.hosts().items()}
        return self._core.step, self._core.accumulated, hosts, asdict(self._core.counters)

    async def end(self) -> None:
        """Remove everything but this actor."""
        for task in self._tasks:
            task.cancel()
        calls = [forwarder.end.remote() for forwarder in self._forwarders.values()]
        await asyncio.gather(*calls, return_exceptions=True)
        for actor in [*self._forwarders.values(), *self._shards]:
            ray.kill(actor, no_restart=True)
        if self._places is not None:
            ray.util.remove_placement_group(self._places)

    # What goes on all the time

    def _start(self) -> None:
        if not self._tasks:
            self._places = self._make_places()
            self._shards = [self._make_shard(number) for number in range(self._config.shards)]
            self._tasks = [asyncio.ensure_future(self._tick()), asyncio.ensure_future(self._tend())]

    async def _tick(self) -> None:
        fence_step = self._core.fence
        while True:
            now = time.monotonic()
            self._core.tick(now)
            self._wake()
            if self._core.fence != fence_step:
                fence_step = self._core.fence
                for shard in self._shards:
                    shard.forget.remote(fence_step)
            await self._park(self._core.next_time(now) - now, lambda: True, once=True)

    async def _tend(self) -> None:
        """Give each node that is alive a forwarder, nodes that join later, too."""
        while True:
            alive = await asyncio.to_thread(living_nodes, self._config.hosts)
            heard = {name for name, (lives, _) in self._core.hosts().items() if lives}
            # Again, if it is silent: Ray gives up an actor whose node some other node has not heard
            # of yet, and then there is none; else this finds the one that there is.
            for node in sorted(alive - (self._forwarders.keys() & heard)):
                self._forwarders[node] = self._make_forwarder(node)
            for node in self._forwarders.keys() - alive:
                del self._forwarders[node]
            await asyncio.sleep(_LOOK_FOR_NODES)

    def _make_places(self) -> "PlacementGroup | None":
        """Have Ray find a place for each shard, on as many nodes as it can; or find them again.

        Without that it starts each one anywhere: two of two on one node, behind one NIC. If a node
        dies, it finds other places for the shards that were there. A byte of memory is what each
        place is of, since there must be something. On chosen nodes alone Ray cannot do this.
        """
        if self._config.hosts is not None:
            return None
        name = self._config.actor("places")
        with contextlib.suppress(ValueError):
            return ray.util.get_placement_group(name)
        places = [{"memory": 1.0}] * self._config.shards
        return ray.util.placement_group(places, strategy="SPREAD", name=name, lifetime="detached")

    def _make_shard(self, number: int) -> Any:
        where: Any = "SPREAD"
        if self._places is not None:
            where = PlacementGroupSchedulingStrategy(
                self._places, placement_group_bundle_index=number
            )
        made = self._options(ShardActor, f"shard {number}", scheduling_strategy=where)
        return made.remote(self._config, number)

    def _make_forwarder(self, node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        made = self._options(
            ForwarderActor, f"forwarder {node}", scheduling_strategy=there, max_concurrency=4
        )
        return made.remote(self._config, node)

    def _options(self, actor: type, part: str, **options: Any) -> Any:
        return ray.remote(actor).options(
            name=self._config.actor(part),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            **options,
        )

    # Calls that wait

    def _wake(self) -> None:
        """Let calls look again, if orders or answers have changed.

        A report that changes nothing wakes nobody: otherwise each one would cost as much as there
        are hosts, whose calls all wait here.
        """
        if self._serial != self._core.serial:
            self._serial = self._core.serial
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _park(
        self, seconds: float, unchanged: Callable[[], bool], *, once: bool = False
    ) -> None:
        end = time.monotonic() + seconds
        while unchanged() and (left := end - time.monotonic()) > 0:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                return
            if once:
                return
