"""The actor of the owner: its core, calls that wait for a change, and the care for the others."""

import asyncio
import contextlib
import logging
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
    Finished,
    Order,
    Report,
    Waiting,
)
from shmacc._multihost.owner import OwnerCore
from shmacc.ray._forwarder import ForwarderActor
from shmacc.ray._parts import LOST, NAMESPACE, Config, HostState, living_nodes
from shmacc.ray._shard import ShardActor

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_LOOK_FOR_NODES = 1.0
_AGAIN = 0.2  # until another forwarder is made, where one has ended
_AT_MOST = 30.0  # the same, if it ends again and again
_SERVED = 10.0  # one that has gone on for so long had started well

_logger = logging.getLogger("shmacc")


class OwnerActor:
    """The owner. Its methods run in one event loop, so the core needs no lock.

    The step is None of one that takes the place of another, which has died: it does not know it.
    Its term is the time: later than that of the one before it, which was dead by then.
    """

    def __init__(self, config: Config, step: int | None) -> None:
        self._config = config
        self._core = OwnerCore(time.time_ns() // 1_000_000, step, config.timing)
        self._changed = asyncio.Event()
        self._serial = self._core.serial  # when it was set last
        self._tasks: list[asyncio.Task[None]] = []
        self._places: PlacementGroup | None = None
        self._shards: list[Any] = []
        self._forwarders: dict[str, Any] = {}
        self._problems: dict[str, str] = {}  # from node to why its forwarder did not start

    async def config(self) -> Config:
        """Return what the group was made with."""
        return self._config

    async def place(self) -> tuple[Config, str]:
        """Return that and the node on which it is; the first call starts everything."""
        self._start()
        return self._config, ray.get_runtime_context().get_node_id()

    async def pid(self) -> int:
        """Return the process that the owner is."""
        return os.getpid()

    # Forwarders

    async def enrol(self, host: str) -> int:
        """See `OwnerCore.enrol`."""
        self._start()
        incarnation = self._core.enrol(host, time.monotonic())
        self._problems.pop(host, None)
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

    async def finish(self) -> None:
        """See `OwnerCore.finish`."""
        self._start()
        self._core.finish(time.monotonic())
        self._wake()

    async def running(self) -> bool:
        """Whether nobody has called `finish`."""
        return not self._core.finished

    async def cancel(self) -> None:
        """See `OwnerCore.cancel`."""
        self._core.cancel(time.monotonic())
        self._wake()

    async def wait_step(self, after: int, wait: float) -> int | Finished | None:
        """Return the step if it is past `after`, or is so within `wait` seconds; else None."""
        self._start()
        await self._park(wait, lambda: not (self._is_past(after) or self._core.finished))
        if self._is_past(after):
            return self._core.step
        return Finished() if self._core.finished else None

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
        for node, problem in self._problems.items():
            hosts[node] = HostState(alive=False, accumulated=0, problem=problem)
        return self._core.step, self._core.accumulated, hosts, asdict(self._core.counters)

    async def stop(self) -> None:
        """Start nothing again: the group is about to be removed."""
        for task in self._tasks:
            task.cancel()

    # What goes on all the time

    def _start(self) -> None:
        if not self._tasks:
            self._places = _make_places(self._config)
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
        kept: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                alive = await asyncio.to_thread(living_nodes, self._config.hosts)
                for node in alive - kept.keys():
                    kept[node] = asyncio.ensure_future(self._keep_forwarder(node))
                for node in kept.keys() - alive:
                    kept.pop(node).cancel()
                    self._forwarders.pop(node, None)
                    self._problems.pop(node, None)
                await asyncio.sleep(_LOOK_FOR_NODES)
        finally:
            for task in kept.values():
                task.cancel()

    async def _keep_forwarder(self, node: str) -> None:
        """Have a forwarder serve on a node; make another when it ends, ever more slowly."""
        pause = _AGAIN
        while True:
            began = time.monotonic()
            forwarder = self._forwarders[node] = self._make_forwarder(node)
            try:
                await forwarder.serve.remote()
            except LOST:  # its process has died, or it got no place since some node was not known
                pass
            except ray.exceptions.RayTaskError as error:
                self._problems[node] = f"{type(error.cause).__name__}: {error.cause}"
                _logger.warning("Node %s has no part in the group: %s", node, self._problems[node])
                ray.kill(forwarder)
            pause = _AGAIN if time.monotonic() - began > _SERVED else min(2 * pause, _AT_MOST)
            await asyncio.sleep(pause)

    def _make_shard(self, number: int) -> Any:
        where: Any = "SPREAD"
        if self._places is not None:
            where = PlacementGroupSchedulingStrategy(
                self._places, placement_group_bundle_index=number
            )
        made = self._options(
            ShardActor, f"shard {number}", scheduling_strategy=where, max_restarts=-1
        )
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


def _make_places(config: Config) -> "PlacementGroup | None":
    """Have Ray find a place for each shard, on as many nodes as it can; or find them again.

    Without that it starts each one anywhere: two of two on one node, behind one NIC. If a node
    dies, it finds other places for the shards that were there. A byte of memory is what each
    place is of, since there must be something. On chosen nodes alone Ray cannot do this.
    """
    if config.hosts is not None:
        return None
    with contextlib.suppress(ValueError):
        return places_of(config)
    return ray.util.placement_group(
        [{"memory": 1.0}] * config.shards,
        strategy="SPREAD",
        name=config.actor("places"),
        lifetime="detached",
    )


def places_of(config: Config) -> "PlacementGroup":
    """Return the places of the shards.

    Raises:
        ValueError: There are none.
    """
    return ray.util.get_placement_group(config.actor("places"))
