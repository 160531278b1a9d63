"""A training whose parameters have a copy on every node: chief and workers are processes.

Every gradient has whole numbers and depends on its worker alone. So, whatever dies, the parameters
equal those of one host after the same number of updates, to the bit.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from on_ray.nodes import Nodes

import shmacc
import shmacc.ray

PATIENCE = 180.0

CONTENTS = {
    "dense": np.arange(12, dtype=np.float32).reshape(4, 3),
    "sparse": np.ones((40, 5), np.float64),
    "table": shmacc.TableSpec((4,), initial=shmacc.init.Uniform(-1, 1, seed=3)),
}
OPTIMIZERS = {
    "dense": shmacc.optim.Adam(0.125),
    "sparse": shmacc.optim.SGD(0.5, momentum=0.9),
    "table": shmacc.optim.Adagrad(0.25),
}

_CHIEF = """
import sys, ray, shmacc, shmacc.ray
from on_ray.replicated import CONTENTS, OPTIMIZERS, TIMING
name, address, host, *numbers = sys.argv[1:]
steps, required = map(int, numbers)
ray.init(address=address, _node_ip_address=host, log_to_driver=False, configure_logging=False)
with (
    shmacc.ray.Parameters(CONTENTS, f"{name}.params", optimizer=OPTIMIZERS) as params,
    shmacc.ray.AccumulatorGroup(
        params.member_specs(sparse=["sparse"]), name, timing=TIMING
    ) as group,
):
    while params.step < steps:
        with group.round(required, timeout=120) as taken:
            params.update(taken)
    group.finish()
"""

_WORKER = """
import hashlib, sys, time
import shmacc
from on_ray.replicated import gradient
name, rank = sys.argv[1], int(sys.argv[2])
log = open(sys.argv[3], "a", 1)
params = shmacc.Parameters.attach(f"{name}.params", timeout=120)
group = shmacc.attach(name, timeout=120)
for step in group.steps(timeout=300):
    own, contents = params.snapshot()
    assert own <= step or group.wait_step(step, timeout=300) >= own, "the copy is first, but soon"
    table = contents["table"]
    parts = [contents["dense"], contents["sparse"], table.indices, table.values]
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    print(own, digest, file=log)
    group.apply(gradient(rank), step, contributor=rank)
"""

TIMING = shmacc.ray.Timing(lease=2.0, grace=0.5, chief_lease=4.0)


def gradient(rank: int) -> dict[str, Any]:
    """Return what a worker applies at every step."""
    rows = np.array([rank, 10 + rank, 30])
    return {
        "dense": np.full((4, 3), 1.0 + rank, np.float32),
        "sparse": (rows, np.full((3, 5), 2.0 * rank + 2.0)),
        "table": (rows * 1000, np.full((3, 4), 4.0 * rank + 4.0, np.float32)),
    }


def on_one_host(updates: int, ranks: int) -> dict[str, Any]:
    """Return the state of one host after `updates` updates."""
    with (
        shmacc.Parameters(CONTENTS, optimizer=OPTIMIZERS) as params,
        shmacc.AccumulatorGroup(params.member_specs(sparse=["sparse"])) as group,
    ):
        for step in range(updates):
            for rank in range(ranks):
                assert group.apply(gradient(rank), step, contributor=rank)
            with group.round(ranks) as taken:
                params.update(taken)
        return params.state()


class Replicated:
    """The training: a chief that is started again whenever it ends, and workers on nodes.

    A subclass may have other programs for chief and workers.
    """

    programs = _CHIEF, _WORKER

    def __init__(self, nodes: Nodes, name: str, folder: Path, ranks: int = 6) -> None:
        self.nodes, self.name, self.folder, self.ranks = nodes, name, folder, ranks
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.chief: subprocess.Popen[bytes] | None = None
        self.chiefs = 0

    def start_worker(self, rank: int, node: int) -> None:
        log = self.folder / f"{self.name}.{node}.{rank}"
        command = [sys.executable, "-P", "-c", self.programs[1], self.name, str(rank), str(log)]
        self.workers[rank] = subprocess.Popen(command, env=self._environment(node))

    def start_workers(self) -> None:
        for rank in range(self.ranks):
            self.start_worker(rank, rank % 3)

    def move(self, ranks: tuple[int, ...], node: int) -> None:
        """Start workers again on another node."""
        for rank in ranks:
            self.workers[rank].kill()
            self.workers[rank].wait()
            self.start_worker(rank, node)

    def start_chief(self, steps: int, node: int = 0) -> subprocess.Popen[bytes]:
        self.chiefs += 1
        place = self.nodes.cluster.address, self.nodes.address(node)
        numbers = *place, str(steps), str(self.ranks)
        command = [sys.executable, "-P", "-c", self.programs[0], self.name, *numbers]
        with (self.folder / f"{self.name}.chief").open("ab") as errors:
            self.chief = subprocess.Popen(command, env=self._environment(node), stderr=errors)
        return self.chief

    def _environment(self, node: int) -> dict[str, str]:
        return {**self.nodes.environment(node), "PYTHONPATH": ":".join(sys.path)}

    def train_until(self, steps: int) -> None:
        """Start chiefs, one after the other, until one of them has made all steps."""
        end = time.monotonic() + PATIENCE
        while True:
            chief = self.chief or self.start_chief(steps)
            code = chief.wait(max(1.0, end - time.monotonic()))
            if code == 0:
                return
            assert time.monotonic() < end, (self.folder / f"{self.name}.chief").read_text()
            self.start_chief(steps)

    def step_on(self, node: int) -> int:
        with (
            self.nodes.on(node),
            shmacc.Parameters.attach(f"{self.name}.params", timeout=60) as params,
        ):
            return params.step

    def states(self, nodes: Iterable[int] = range(3)) -> list[dict[str, Any]]:
        found = []
        for node in nodes:
            with self.nodes.on(node), shmacc.Parameters.attach(f"{self.name}.params") as params:
                found.append(params.state())
        return found

    def check(self, nodes: Iterable[int] = range(3)) -> int:
        """Compare all copies with the state of one host; return how many updates they have."""
        states = self.states(nodes)
        updates = int(states[0]["updates"][0])
        wanted = on_one_host(updates, self.ranks)
        for state in states:
            for key, values in wanted.items():
                if not key.endswith(("step", "last_steps")):  # void steps have no update
                    np.testing.assert_array_equal(state[key], values, err_msg=key)
        seen: dict[int, str] = {}
        for log in self.folder.glob(f"{self.name}.[0-9]*"):
            for line in log.read_text().splitlines():
                step, digest = line.split()
                assert seen.setdefault(int(step), digest) == digest, f"nodes differ at {step}"
        return updates

    def end_processes(self) -> None:
        for process in [*self.workers.values(), self.chief]:
            if process is not None:
                process.kill()
                process.wait()

    def end(self) -> None:
        self.end_processes()
        with self.nodes.on(0):
            with contextlib.suppress(shmacc.errors.NotFoundError):
                shmacc.ray.AccumulatorGroup.attach(self.name).unlink()
            nothing = contextlib.suppress(shmacc.errors.NotFoundError)
            with nothing, shmacc.ray.Parameters.attach(f"{self.name}.params") as params:
                params.unlink()
