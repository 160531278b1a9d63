"""How long a round over two hosts takes on Ray, beside the same transfers by bare Ray calls.

Two nodes on this machine, four gradients of 50,000 rows of 64 float32 at each. A round is timed
from when all gradients have been applied until the chief has the mean; the bare calls send the same
pieces from two actors to the shards, and the same mean from the shards to the chief. Both by turns.
Run by `make bench-ray`.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112  busy machines

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import shmacc
import shmacc.ray
from shmacc._multihost.messages import Report
from shmacc.ray._parts import find_actor

ROWS, WIDTH, GRADIENTS, HOSTS, SHARDS = 50_000, 64, 4, 2, 2
TABLE = 1_000_000  # rows of all members
ROUNDS = 10

_WORKERS = """
import sys
import numpy as np
import shmacc
group = shmacc.attach("bench", timeout=60)
random = np.random.default_rng(int(sys.argv[1]))
rows = ROWS // MEMBERS
gradients = [
    {
        f"table {member}": (
            np.sort(random.choice(TABLE // MEMBERS, rows, replace=False)),
            np.ones((rows, WIDTH), np.float32),
        )
        for member in range(MEMBERS)
    }
    for _ in range(GRADIENTS)
]
for line in sys.stdin:
    step = group.wait_step(int(line) - 1, timeout=60)
    for gradient in gradients:
        assert group.apply(gradient, step)
    print("applied", flush=True)
"""


class Sender:
    """Sends arrays to shards, as a forwarder would."""

    def __init__(self, pieces: list[tuple[Any, ...]]) -> None:
        self.pieces = [tuple(np.array(array) for array in piece) for piece in pieces]

    def send(self, shards: list[Any]) -> None:
        """Send each shard its piece."""
        calls = [shard.keep.remote(p) for shard, p in zip(shards, self.pieces, strict=True)]
        ray.get(calls)


class Keeper:
    """Takes arrays and returns others, like a shard that adds nothing up."""

    def __init__(self, mean: tuple[Any, ...]) -> None:
        self.mean = tuple(np.array(array) for array in mean)
        self.kept: list[Any] = []

    def keep(self, piece: tuple[Any, ...]) -> None:
        """Take a piece."""
        self.kept = [*self.kept[-1:], piece]

    def hand_out(self) -> tuple[Any, ...]:
        """Return the mean."""
        return self.mean


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1, help="tables that the rows are of")
    number_of_members = parser.parse_args().members
    os.chdir(tempfile.mkdtemp())  # Ray puts the current folder into its workers' path
    run = f"raybench{uuid.uuid4().hex[:6]}"
    cluster = Cluster()
    for number in range(HOSTS):
        cluster.add_node(
            num_cpus=1,
            node_ip_address=f"127.0.0.{number + 2}",
            object_store_memory=1 << 30,
            env_vars={"SHMACC_NAMESPACE": f"{run}{number}"},
        )
    os.environ["SHMACC_NAMESPACE"] = f"{run}0"  # the namespace of this process's node
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    try:
        measure(run, number_of_members)
        announces()
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(run: str, number_of_members: int) -> None:
    """Time rounds and bare calls by turns."""
    spec = shmacc.IndexedSlicesSpec((TABLE // number_of_members, WIDTH), "float32")
    members = {f"table {member}": spec for member in range(number_of_members)}
    constants = ROWS, WIDTH, GRADIENTS, TABLE, number_of_members
    program = f"ROWS, WIDTH, GRADIENTS, TABLE, MEMBERS = {constants}{_WORKERS}"
    ours: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    with shmacc.ray.AccumulatorGroup(
        members, "bench", shards=SHARDS, unlink_on_close=True
    ) as group:
        workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, str(host)],
                env={**os.environ, "SHMACC_NAMESPACE": f"{run}{host}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(HOSTS)
        ]
        senders: list[Any] = []
        keepers: list[Any] = []
        for number in range(ROUNDS + 1):
            for worker in workers:
                print(number, file=worker.stdin, flush=True)
            for worker in workers:
                next(iter(worker.stdout or ()))
            time.sleep(0.2)  # lets the hosts report their counts
            busy, start = _processor_seconds(), time.perf_counter()
            with group.round(HOSTS * GRADIENTS, timeout=120) as taken:
                ours.append((time.perf_counter() - start, _processor_seconds() - busy))
            if not senders:
                senders, keepers, size = _bare(taken)
            time.sleep(0.2)
            busy, start = _processor_seconds(), time.perf_counter()
            ray.get([sender.send.remote(keepers) for sender in senders])
            ray.get([keeper.hand_out.remote() for keeper in keepers])
            bare.append((time.perf_counter() - start, _processor_seconds() - busy))
        for worker in workers:
            worker.kill()
            worker.wait()
    out = sum(part.values.nbytes for part in taken.values()) / 1e6
    print(f"bytes: {size / 1e6:.0f} MB to the shards, {out:.0f} MB out")
    for name, turns in ("round", ours[1:]), ("bare Ray calls", bare[1:]):
        times = [seconds * 1e3 for seconds, _ in turns]
        shown = " ".join(f"{each:.0f}" for each in times)
        print(f"{name}: median {statistics.median(times):.0f} ms, all {shown}")
    for side, what in enumerate(("time", "processor time of all processes")):
        ratios = [one[side] / other[side] for one, other in zip(ours[1:], bare[1:], strict=True)]
        print(f"{what}: median ratio {statistics.median(ratios):.2f}")


def _processor_seconds() -> float:
    """Return the processor time of this process and its descendants; other load adds nothing."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid > 1

    return sum(number for pid, number in ticks.items() if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


def _bare(taken: Any) -> tuple[list[Any], list[Any], int]:
    """Make actors with the bytes that hosts and shards would send, in as few arrays as possible."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    size = 0
    senders = []
    for host, node in enumerate(nodes):
        random = np.random.default_rng(host)
        rows = [random.choice(TABLE, ROWS, replace=False) for _ in range(GRADIENTS)]
        piece = _piece(len(np.unique(np.concatenate(rows))))
        size += SHARDS * sum(array.nbytes for array in piece)
        senders.append(_actor(Sender, node, [piece] * SHARDS))
    mean = _piece(sum(len(part.indices) for part in taken.values()))
    keepers = [_actor(Keeper, node, mean) for node in sorted(nodes)]  # where the group's shards are
    return senders, keepers, size


def _piece(rows: int) -> tuple[Any, ...]:
    """Return a shard's part of these rows: indices, values, counts."""
    each = rows // SHARDS
    return np.zeros(each, np.int64), np.ones((each, WIDTH), np.float32), np.ones(each, int)


def _actor(kind: type[Sender | Keeper], node: str, arrays: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=there).remote(arrays)


def announces() -> None:
    """Print how many reports one owner takes in a second."""
    members = {"m": shmacc.TensorSpec((), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "announces", shards=1, unlink_on_close=True) as group:
        owner: Any = find_actor(f"{group.shared_name}/owner")
        reports = [Report(f"host {i}", 1, i, None, 0, 0) for i in range(2000)]
        start = time.perf_counter()
        ray.get([owner.report.remote(report, -1) for report in reports])
        print(f"reports: {len(reports) / (time.perf_counter() - start):.0f} a second")


if __name__ == "__main__":
    main()
