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

ROWS, WIDTH, GRADIENTS, HOSTS = 50_000, 64, 4, 2

_WORKERS = """
import sys
import numpy as np
import shmacc
group = shmacc.attach("bench", timeout=60)
seed, table = int(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(seed)
rows = ROWS // MEMBERS
gradients = [
    {
        f"table {member}": (
            np.sort(random.choice(table // MEMBERS, rows, replace=False)),
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--table", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--members", type=int, default=1, help="tables that the rows are of")
    parser.add_argument("--shards", type=int, default=2)
    options = parser.parse_args()
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
    os.environ["SHMACC_NAMESPACE"] = f"{run}0"  # that of this process's node
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    try:
        measure(run, options)
        announces()
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(run: str, options: argparse.Namespace) -> None:
    """Time rounds and bare calls by turns."""
    spec = shmacc.IndexedSlicesSpec((options.table // options.members, WIDTH), "float32")
    members = {f"table {member}": spec for member in range(options.members)}
    constants = f"ROWS, WIDTH, GRADIENTS, MEMBERS = {ROWS}, {WIDTH}, {GRADIENTS}, {options.members}"
    ours: list[float] = []
    bare: list[float] = []
    ours_busy: list[float] = []
    bare_busy: list[float] = []
    with shmacc.ray.AccumulatorGroup(
        members, "bench", shards=options.shards, unlink_on_close=True
    ) as group:
        workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", constants + _WORKERS, str(host), str(options.table)],
                env={**os.environ, "SHMACC_NAMESPACE": f"{run}{host}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(HOSTS)
        ]
        senders: list[Any] = []
        keepers: list[Any] = []
        for number in range(options.rounds + 1):
            for worker in workers:
                print(number, file=worker.stdin, flush=True)
            for worker in workers:
                next(iter(worker.stdout or ()))
            time.sleep(0.2)  # lets the hosts report their counts
            busy, start = _processor_seconds(), time.perf_counter()
            with group.round(HOSTS * GRADIENTS, timeout=120) as taken:
                ours.append(time.perf_counter() - start)
                ours_busy.append(_processor_seconds() - busy)
            if not senders:
                senders, keepers, size = _bare(taken, options)
            time.sleep(0.2)
            busy, start = _processor_seconds(), time.perf_counter()
            ray.get([sender.send.remote(keepers) for sender in senders])
            ray.get([keeper.hand_out.remote() for keeper in keepers])
            bare.append(time.perf_counter() - start)
            bare_busy.append(_processor_seconds() - busy)
        for worker in workers:
            worker.kill()
            worker.wait()
    out = sum(part.values.nbytes for part in taken.values()) / 1e6
    print(f"bytes: {size / 1e6:.0f} MB to the shards, {out:.0f} MB out")
    for name, times in ("round", ours[1:]), ("bare Ray calls", bare[1:]):
        print(f"{name}: median {statistics.median(times) * 1e3:.0f} ms, all {_shown(times)}")
    ratios = [one / other for one, other in zip(ours[1:], bare[1:], strict=True)]
    print(f"ratio: median {statistics.median(ratios):.2f}")
    busy_ours, busy_bare = statistics.median(ours_busy[1:]), statistics.median(bare_busy[1:])
    shown = f"{busy_ours * 1e3:.0f} and {busy_bare * 1e3:.0f} ms"
    print(f"processor time of all processes: {shown}, ratio {busy_ours / busy_bare:.2f}")


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


def _bare(taken: Any, options: argparse.Namespace) -> tuple[list[Any], list[Any], int]:
    """Make actors with the bytes that hosts and shards would send, in as few arrays as possible."""
    shards, table = options.shards, options.table
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    size = 0
    senders = []
    for host in range(HOSTS):
        random = np.random.default_rng(host)
        rows = [random.choice(table, ROWS, replace=False) for _ in range(GRADIENTS)]
        union = len(np.unique(np.concatenate(rows)))
        each = union // shards
        piece = (np.zeros(each, np.int64), np.ones((each, WIDTH), np.float32), np.ones(each, int))
        size += shards * sum(array.nbytes for array in piece)
        there = NodeAffinitySchedulingStrategy(nodes[host], soft=False)
        sender = ray.remote(Sender).options(num_cpus=0, scheduling_strategy=there)
        senders.append(sender.remote([piece] * shards))
    each = sum(len(part.indices) for part in taken.values()) // shards
    mean = (np.zeros(each, np.int64), np.ones((each, WIDTH), np.float32), np.ones(each, int))
    keepers = []
    for shard in range(shards):  # where the group's shards are
        there = NodeAffinitySchedulingStrategy(sorted(nodes)[shard % len(nodes)], soft=False)
        keeper = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=there)
        keepers.append(keeper.remote(mean))
    return senders, keepers, size


def announces() -> None:
    """Print how many reports one owner takes in a second."""
    members = {"m": shmacc.TensorSpec((), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "announces", shards=1, unlink_on_close=True) as group:
        owner: Any = find_actor(f"{group.shared_name}/owner")
        reports = [Report(f"host {i}", 1, i, None, 0, 0) for i in range(2000)]
        start = time.perf_counter()
        ray.get([owner.report.remote(report, -1) for report in reports])
        print(f"reports: {len(reports) / (time.perf_counter() - start):.0f} a second")


def _shown(times: list[float]) -> str:
    return " ".join(f"{seconds * 1e3:.0f}" for seconds in times)


if __name__ == "__main__":
    main()
