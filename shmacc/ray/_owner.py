"""The owner's actor: it serves calls to its core, and starts the actors of the nodes."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import ray

from shmacc._base.lineage import Copy
from shmacc._multihost.messages import Fence, Order, Report, Staging, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.rounds import TERM_BITS
from shmacc.errors import DeadlineExceededError, FailedPreconditionError
from shmacc.ray._head import kill, living_nodes, shown
from shmacc.ray._host import CONCURRENCY, HostActor
from shmacc.ray._parts import DIED, LOST, Config, HostState, State, make_actor, why_not

_LOOK_FOR_NODES = 2.0
_AGAIN = 0.2  # seconds until a host actor that has ended is started again
_AT_MOST = 30.0  # the longest such pause, if actors end again and again
_UNHEARD = 5.0  # seconds until an actor that does not answer a new owner is killed
_SERVED = 10.0  # if an actor has served this many seconds, the next pause is short again

_logger = logging.getLogger("shmacc")


class OwnerActor:
    """The owner. Its methods run in one event loop, so the core needs no lock.

    An owner that takes the place of a dead one does not know the step: `step` is None. With
    parameters it learns the step from the hosts. Its term is the present time, which is later than
    its predecessor's term if clocks agree, with random low bits.
    """

    def __init__(self, config: Config, step: int | None, home: str | None = None) -> None:
        self._config = config
        copies = config.copy is not None
        term = (time.time_ns() // 1_000_000 << TERM_BITS) + secrets.randbits(TERM_BITS)
        given = None if copies else step
        self._core = OwnerCore(
            term, given, config.timing, config.shards, copies=copies, home=home, shown=shown
        )
        self._actors: dict[str, Any] = {}  # by node; nobody else gets these handles
        self._unheard: dict[str, float] = {}  # nodes that must answer, and since when they do not
        self._changed = asyncio.Event()
        self._serial = self._core.serial  # the core's serial when `_changed` was last set
        self._tasks: list[asyncio.Task[None]] = []
        self._pool = ThreadPoolExecutor(thread_name_prefix="shmacc actors")  # makes actors
        self._problems: dict[str, str] = {}  # by node: why it cannot take part in the group
        self._since: dict[str, float] = {}  # when each node was first seen alive
        self._checked: dict[str, Copy | None] = {}  # the copies of nodes that can take part
        self._stopped = False
        self._begun = asyncio.Event()
        if step is None:
            self._begun.set()

    async def config(self) -> Config:
        return self._config

    async def place(self) -> tuple[Config, str]:
        """Return the config and the owner's node; the first call starts the owner's tasks."""
        self._start()
        return self._config, ray.get_runtime_context().get_node_id()

    # Forwarders

    async def enrol(self, host: str, copy: Copy | None) -> int:
        """Wait for `begin`, then enrol the forwarder: until then it changes nothing on its node."""
        self._start()
        self._checked[host] = copy
        await self._begun.wait()
        if self._stopped:
            raise FailedPreconditionError("The group is being removed")
        incarnation = self._core.enrol(host, time.monotonic())
        self._problems.pop(host, None)
        self._wake()
        return incarnation

    async def report(self, report: Report, serial: int) -> Order:
        """Process a report; return the host's order once it differs from order number `serial`."""
        self._core.report(report, time.monotonic())
        self._wake()
        if self._core.has_resigned:
            ray.actor.exit_actor()

        timeout = 2 * self._config.timing.quiet(self._core.pace)
        await self._park(timeout, lambda: not self._core.has_news(report.host, serial))
        return self._core.order(report.host, report.incarnation)

    # Chiefs

    async def do(self, method: str, *args: Any, wait: float = 0.0, **options: Any) -> Any:
        """Call a method of the core with the present time; wake calls that wait.

        If the answer says that the chief must wait, the method is called again at each change, for
        at most `wait` seconds. So `method` must do no harm if it is called more than once.
        """

        def answer() -> Any:
            found = getattr(self._core, method)(*args, now=time.monotonic(), **options)
            self._wake()
            return found

        found = answer()
        if wait and isinstance(found, Waiting | Staging | None):
            await self._park(wait, lambda: isinstance(answer(), Waiting | Staging | None))
            found = answer()
        return found

    async def checked(self) -> dict[str, Copy | None] | None:
        """Return the nodes that can take part, with their copies; None: the group has begun."""
        return None if self._begun.is_set() else self._checked

    async def begin(self) -> None:
        """Let forwarders enrol, since all nodes have been checked."""
        self._begun.set()

    async def running(self) -> bool:
        return not self._core.finished

    async def living(self) -> tuple[int | None, Fence, list[str]]:
        """Return the step, if it is known, the fence, and the names of the living hosts.

        It returns no handles of actors: a process that gets a new handle asks Ray's head about it
        inside `ray.get`, which then waits for the head without a timeout.
        """
        self._core.tick(time.monotonic())
        alive = [name for name, (lives, *_) in self._core.hosts().items() if lives]
        return self._step(), self._core.fence, alive

    async def lost(self) -> frozenset[str]:
        """Return the lost hosts, and the living nodes that have not reported within the lease."""
        now = time.monotonic()
        self._core.tick(now)
        unheard = self._since.keys() - self._core.hosts().keys()
        lease = self._config.timing.lease
        return self._core.lost | {node for node in unheard if now - self._since[node] > lease}

    async def state(self) -> State:
        """Return the step, the number of gradients, the hosts and the counters."""
        self._core.tick(time.monotonic())
        problems = self._core.problems()
        hosts = {
            name: HostState(lives, count, problems.get(name), step)
            for name, (lives, count, step) in self._core.hosts().items()
        }
        for node, problem in self._problems.items():
            hosts[node] = HostState(alive=False, accumulated=0, problem=problem)
        return self._step(), self._core.accumulated, hosts, asdict(self._core.counters)

    def _step(self) -> int | None:
        return self._core.step if self._core.is_ready else None

    async def stop(self) -> frozenset[str]:
        """Stop the tasks that restart actors, since the group is about to be removed.

        Returns:
            The nodes that take no part in the group, since their actors failed.
        """
        self._stopped = True
        self._begun.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._pool.shutdown)  # an actor made later would never end
        return frozenset(self._problems)

    # Background tasks

    def _start(self) -> None:
        if not self._tasks:
            going_on = [self._tick(), self._tend()]
            self._tasks = [asyncio.ensure_future(each) for each in going_on]

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            self._core.tick(now)
            self._wake()
            await self._next_change(self._core.next_time(now) - now)

    async def _tend(self) -> None:
        """Keep an actor running on each living node, including nodes that join later."""
        kept: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    alive = await asyncio.to_thread(living_nodes, self._config.hosts)
                except Exception:
                    _logger.exception("Ray does not say which nodes are alive")
                    alive = set(kept)
                self._core.list_hosts(frozenset(alive - self._problems.keys()), time.monotonic())
                self._wake()
                if self._begun.is_set():
                    self._end_unheard(time.monotonic())
                for node in alive - kept.keys():
                    self._since[node] = time.monotonic()
                    kept[node] = asyncio.ensure_future(self._keep(node))
                for node in kept.keys() - alive:
                    kept.pop(node).cancel()
                    self._core.gone.add(node)
                    for known in self._actors, self._problems, self._since:
                        known.pop(node, None)
                await asyncio.sleep(_LOOK_FOR_NODES)
        finally:
            for task in kept.values():
                task.cancel()

    def _end_unheard(self, now: float) -> None:
        """Kill actors that do not answer this new owner, which needs an answer of every node."""
        unanswered = self._core.unanswered()
        self._unheard = {node: self._unheard.get(node, now) for node in unanswered}
        for node, since in self._unheard.items():
            if now - since > _UNHEARD and node in self._actors:
                self._unheard[node] = now
                asyncio.ensure_future(asyncio.to_thread(kill, self._actors[node]))  # noqa: RUF006

    async def _keep(self, node: str) -> None:
        """Run the actor of a node. When it ends, start another, each time after a longer pause."""
        pause = _AGAIN
        while True:
            began, enrolled = time.monotonic(), True
            try:
                # In a thread: this needs an answer of Ray's head, which may be away.
                made = asyncio.get_running_loop().run_in_executor(self._pool, self._make, node)
                self._actors[node] = actor = await made
                await actor.serve.remote()
                await asyncio.to_thread(kill, actor)  # the owner knows a later actor of the node
            except ray.exceptions.RayTaskError as error:
                self._leave_out(node, f"{type(error.cause).__name__}: {error.cause}")
                await asyncio.to_thread(kill, actor)
            # The actor's process has died; or Ray has not placed the actor, as the node is unknown;
            # or Ray's head is away. ValueError: an actor of this name is just ending.
            except (*LOST, ValueError, DeadlineExceededError) as error:
                enrolled = node in self._checked or not isinstance(error, DIED)
            except Exception:
                _logger.exception("The actor of node %s is made again", shown(node))
            pause = _AGAIN if time.monotonic() - began > _SERVED else min(2 * pause, _AT_MOST)
            if not enrolled and (why := await asyncio.to_thread(why_not, node)):
                self._leave_out(node, why)
                pause = _AT_MOST  # Ray prints a page for each actor that dies there
            await asyncio.sleep(pause)

    def _leave_out(self, node: str, problem: str) -> None:
        self._problems[node] = problem
        _logger.warning("Node %s has no part in the group: %s", shown(node), problem)

    def _make(self, node: str) -> Any:
        """Make the actor of a node, or find the actor that an earlier owner has made there."""
        kind = ray.remote(concurrency_groups=CONCURRENCY)(HostActor)
        given = self._config.actor(f"host {node}"), node, self._config, node
        return make_actor(kind, *given, max_concurrency=4)  # `serve` takes one of the four

    # Calls that wait

    def _wake(self) -> None:
        """Wake the waiting calls, if orders or answers have changed.

        A call of every host waits here: so a report that changes nothing must not wake them.
        """
        if self._serial != self._core.serial:
            self._serial = self._core.serial
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _park(self, seconds: float, unchanged: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while unchanged() and (left := end - time.monotonic()) > 0:
            await self._next_change(left)

    async def _next_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
