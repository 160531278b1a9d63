"""A Ray cluster of several nodes on one machine: an address and a namespace of names for each."""

import contextlib
import os
import re
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112  busy machines
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

from collections.abc import Iterator

import ray
from helpers.support import stopped
from on_ray.wires import Wires
from ray._private.node import Node
from ray.cluster_utils import Cluster

from shmacc.ray._parts import find_actor

_STORE = 150 << 20


class Nodes:
    """A cluster whose nodes do not see each other's segments.

    `wires` gives each node a network namespace; without it nodes are at 127.0.0.2, 127.0.0.3, ...
    Without `storage` Ray's head cannot be restarted. With `run`, the memory of that run is kept.
    """

    def __init__(
        self, wires: Wires | None = None, storage: Path | None = None, run: str | None = None
    ) -> None:
        self.wires, self.storage = wires, storage
        if storage is not None:
            os.environ["RAY_gcs_storage"] = "rocksdb"  # noqa: SIM112  Ray's spelling
            os.environ["RAY_gcs_storage_path"] = str(storage)  # noqa: SIM112
        self.run = run or f"ray{os.getpid()}{uuid.uuid4().hex[:6]}"
        self.nodes: list[Node] = []
        self.cluster = Cluster()
        for _ in range(3):
            self.add()
        ray.init(
            address=self.cluster.address, _node_ip_address=self.address(0), log_to_driver=False
        )

    def address(self, number: int) -> str:
        if self.wires is None:
            return f"127.0.0.{number + 2}"
        return self.wires.address(self.wires.wire(number))

    def namespace(self, number: int) -> str:
        return f"{self.run}n{number}"

    @contextlib.contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Let this process find the segments of a node."""
        before = os.environ.get("SHMACC_NAMESPACE")
        os.environ["SHMACC_NAMESPACE"] = self.namespace(number)
        try:
            yield
        finally:
            del os.environ["SHMACC_NAMESPACE"]
            if before is not None:
                os.environ["SHMACC_NAMESPACE"] = before

    def environment(self, number: int) -> dict[str, str]:
        return {**os.environ, "SHMACC_NAMESPACE": self.namespace(number)}

    def add(self) -> int:
        number = len(self.nodes)
        self.nodes.append(self._start(number))
        return number

    def _start(self, number: int) -> Node:
        options: dict[str, Any] = {"include_dashboard": False} if number == 0 else {}
        wires = self.wires
        with contextlib.nullcontext() if wires is None else wires.inside(wires.wire(number)):
            return self.cluster.add_node(
                num_cpus=2,
                node_ip_address=self.address(number),
                object_store_memory=_STORE,
                env_vars={"SHMACC_NAMESPACE": self.namespace(number)},
                **options,
            )

    def remove(self, number: int) -> None:
        """Let a machine die: kill all its processes, and remove what it had in memory."""
        self._end(number, ())
        self._lose_memory(number)

    @contextlib.contextmanager
    def gone(self, number: int, *workers: int) -> Iterator[None]:
        """Let a machine die, but not its `workers`; after the block another machine replaces it."""
        with self.without_ray(number, *workers):
            self._lose_memory(number)
            yield

    def _lose_memory(self, number: int) -> None:
        for name in self.left():
            if re.search(rf"{self.namespace(number)}[.:]", name):
                os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108

    @contextlib.contextmanager
    def without_ray(self, number: int, *workers: int) -> Iterator[None]:
        """Let Ray end on a machine and start again there: memory and workers stay."""
        self._end(number, workers)
        try:
            yield
        finally:
            self.nodes[number] = self._start(number)

    def _end(self, number: int, workers: tuple[int, ...]) -> None:
        """Kill all processes but `workers`, also those of Ray that would outlive its raylet."""
        self.cluster.remove_node(self.nodes[number], allow_graceful=False)
        for process in set(self._processes(number)) - set(workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait_for(lambda: set(self._processes(number)) <= set(workers))

    @contextlib.contextmanager
    def headless(self) -> Iterator[None]:
        """Kill the server of Ray's head for the block, and start it again afterwards."""
        assert self.storage is not None
        self.nodes[0].kill_gcs_server()
        try:
            yield
        finally:
            self.nodes[0].start_gcs_server()

    @contextlib.contextmanager
    def frozen(self, number: int) -> Iterator[None]:
        """Stop all processes of a machine in the block, workers too."""
        with stopped(*self._processes(number)):
            yield

    def crash(self) -> None:
        """Kill all processes of all machines, Ray's and others; what is in memory stays."""
        ray.shutdown()
        processes = [each for n in range(len(self.nodes)) for each in self._processes(n)]
        self.cluster.shutdown()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _processes(self, number: int) -> list[int]:
        variable = rf"SHMACC_NAMESPACE={self.namespace(number)}[.\0]".encode()  # or of its runs
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended
                if re.search(variable, environment.read_bytes()):
                    found.append(int(environment.parent.name))
        return found

    def id(self, number: int) -> str:
        return str(self.nodes[number].node_id)

    def shown(self, *numbers: int) -> str:
        """Return a pattern for the names of these nodes in messages."""
        ids = sorted(map(self.id, numbers))
        return re.escape(", ".join(f"{socket.gethostname()} ({each[:8]})" for each in ids))

    def left(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if self.run in name]  # noqa: PTH208, S108

    def end(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def pid_of(part: str) -> int | None:
    """Return the pid of an actor; None while the actor is started again."""
    try:
        actor = find_actor(part)
        if actor is None:
            return None
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10))
    except ray.exceptions.RayError:
        return None


def kill(part: str) -> None:
    """Kill an actor's process; Ray may start the actor again."""
    pid = pid_of(part)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
