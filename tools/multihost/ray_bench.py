"""How long a round over hosts takes on Ray, beside the same transfers by bare Ray calls.

Nodes on this machine, with four gradients of rows of 64 float32 at each. A round is timed from when
all gradients have been applied until the chief has the mean; the bare calls send the same pieces
from one actor of each node to the shards, and the same mean from the shards to the chief. Then the
same round is timed to the end of its block, with and without an update of the parameters. All by
turns. Run by `make bench-ray`.
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
from collections import defaultdict
from collections.abc import Iterator
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

WIDTH, GRADIENTS = 64, 4
SPARSITY = 20  # the tables have this many times the rows of a gradient
ROUNDS = 10
_RATIOS = (
    ("means", "bare means"),
    ("update", "bare update"),
    ("round with update", "round without update"),
    ("round with update", "bare call to each node"),
)

_WORKERS = """
import sys
import numpy as np
import shmacc
group = shmacc.attach("bench", timeout=60)
random = np.random.default_rng(int(sys.argv[1]))
gradients = [
    {
        f"table {member}": (
            np.sort(random.choice(SPARSITY * ROWS, ROWS, replace=False)),
            np.ones((ROWS, WIDTH), np.float32),
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
    """A shard that adds nothing up: it receives pieces and returns a fixed mean. It has a table."""

    def __init__(self, mean: tuple[Any, ...], table_rows: int) -> None:
        self.mean = tuple(np.array(array) for array in mean)
        self.kept: list[Any] = []
        self.table, self.sums = np.zeros((2, table_rows, WIDTH), np.float32)

    def keep(self, piece: tuple[Any, ...]) -> None:
        """Receive a piece."""
        self.kept = [*self.kept[-1:], piece]

    def answer(self) -> None:
        """Return nothing, to measure the cost of a call."""

    def hand_out(self) -> tuple[Any, ...]:
        """Return the mean."""
        return self.mean

    def update(self, indices: Any, values: Any) -> None:
        """Update the table by Adagrad."""
        self.sums[indices] += values * values
        self.table[indices] -= 0.05 * values / np.sqrt(self.sums[indices] + 1e-7)


def main() -> None:
    """Measure on a cluster of this machine, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1, help="tables that the rows are of")
    parser.add_argument("--rows", type=int, default=50_000, help="of a gradient, in all tables")
    parser.add_argument("--nodes", type=int, default=2, help="hosts, each with a shard")
    given = parser.parse_args()
    os.chdir(tempfile.mkdtemp())  # Ray puts the current folder into its workers' path
    run = f"raybench{uuid.uuid4().hex[:6]}"
    cluster = Cluster()
    for number in range(given.nodes):
        cluster.add_node(
            num_cpus=1,
            node_ip_address=f"127.0.0.{number + 2}",
            object_store_memory=1 << 30,
            env_vars={"SHMACC_NAMESPACE": f"{run}{number}"},
        )
    os.environ["SHMACC_NAMESPACE"] = f"{run}0"  # the namespace of this process's node
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    try:
        measure(run, given.nodes, given.members, given.rows // given.members)
        announces()
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(run: str, nodes: int, members: int, rows: int) -> None:
    """Time rounds, bare calls and updates by turns."""
    tables = {
        f"table {number}": np.zeros((SPARSITY * rows, WIDTH), "f4") for number in range(members)
    }
    constants = rows, WIDTH, GRADIENTS, SPARSITY, members
    program = f"ROWS, WIDTH, GRADIENTS, SPARSITY, MEMBERS = {constants}{_WORKERS}"
    with (
        shmacc.ray.Parameters(
            tables, "bench table", optimizer=shmacc.optim.Adagrad(0.05), unlink_on_close=True
        ) as params,
        shmacc.ray.AccumulatorGroup(
            params.member_specs(sparse=list(tables)), "bench", shards=nodes, unlink_on_close=True
        ) as group,
    ):
        workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, str(host)],
                env={**os.environ, "SHMACC_NAMESPACE": f"{run}{host}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(nodes)
        ]
        senders: list[Any] = []
        keepers: list[Any] = []
        for number in range(2 * ROUNDS + 2):
            for worker in workers:
                print(params.step, file=worker.stdin, flush=True)
            for worker in workers:
                next(iter(worker.stdout or ()))
            time.sleep(0.2)  # lets the hosts report their counts
            taken = _block(params, group, nodes * GRADIENTS, updates=bool(number % 2))
            if not senders:
                senders, keepers, size = _bare(taken, nodes, members * rows)
            time.sleep(0.2)
            _bare_calls(taken, senders, keepers, updates=bool(number % 2))
        for worker in workers:
            worker.kill()
            worker.wait()
    out = sum(part.values.nbytes for part in taken.values()) / 1e6
    print(f"bytes: {size / 1e6:.1f} MB to the shards, {out:.1f} MB out")
    for name, turns in _timed.items():
        shown = " ".join(f"{seconds * 1e3:.1f}" for seconds in turns[1:])
        print(f"{name}: median {statistics.median(turns[1:]) * 1e3:.1f} ms, all {shown}")
    for one, other in _RATIOS:
        for what, noted in ("time", _timed), ("processor time of all processes", _busy):
            pairs = list(zip(noted[one][1:], noted[other][1:], strict=False))
            if pairs:
                ratio = statistics.median(first / second for first, second in pairs)
                print(f"{one} / {other}: {what} {ratio:.2f}")


def _block(params: Any, group: Any, required: int, *, updates: bool) -> Any:
    """Time a round, and return its means."""
    with _clock("round with update" if updates else "round without update"):
        start = time.perf_counter()
        with group.round(required, timeout=120) as taken:
            _timed["means"].append(time.perf_counter() - start)
            if updates:
                start = time.perf_counter()
                params.update(taken)
                _timed["update"].append(time.perf_counter() - start)
    return taken


def _bare_calls(taken: Any, senders: list[Any], keepers: list[Any], *, updates: bool) -> None:
    """Time a round's transfers made by bare Ray calls, and its update made by NumPy."""
    with _clock("bare means"):
        ray.get([sender.send.remote(keepers) for sender in senders])
        ray.get([keeper.hand_out.remote() for keeper in keepers])
    if updates:
        with _clock("bare call to each node"):
            ray.get([keeper.answer.remote() for keeper in keepers])
        values = np.concatenate([part.values for part in taken.values()])
        indices = np.arange(len(values))  # all members as one table
        with _clock("bare update"):
            put = ray.put(indices), ray.put(values)
            ray.get([keeper.update.remote(*put) for keeper in keepers])


_timed: dict[str, list[float]] = defaultdict(list)
_busy: dict[str, list[float]] = defaultdict(list)  # processor time of all processes


@contextlib.contextmanager
def _clock(name: str) -> Iterator[None]:
    busy, start = _processor_seconds(), time.perf_counter()
    yield
    _timed[name].append(time.perf_counter() - start)
    _busy[name].append(_processor_seconds() - busy)


def _processor_seconds() -> float:
    """Return the processor time of this process and its descendants, without other processes."""
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


def _bare(taken: Any, shards: int, rows: int) -> tuple[list[Any], list[Any], int]:
    """Make senders and keepers that send as many bytes as a round; return them and that number."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    size = 0
    senders = []
    for host, node in enumerate(nodes):
        random = np.random.default_rng(host)
        drawn = [random.choice(SPARSITY * rows, rows, replace=False) for _ in range(GRADIENTS)]
        piece = _piece(len(np.unique(np.concatenate(drawn))) // shards)
        size += shards * sum(array.nbytes for array in piece)
        senders.append(_actor(Sender, node, [piece] * shards))
    mean = _piece(sum(len(part.indices) for part in taken.values()) // shards)
    own = mean, SPARSITY * rows
    keepers = [_actor(Keeper, node, *own) for node in sorted(nodes)]  # where the group's shards are
    return senders, keepers, size


def _piece(rows: int) -> tuple[Any, ...]:
    """Return a piece with this many rows: indices, values, counts."""
    return np.zeros(rows, np.int64), np.ones((rows, WIDTH), np.float32), np.ones(rows, int)


def _actor(kind: type[Sender | Keeper], node: str, *given: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=there).remote(*given)


def announces() -> None:
    """Print how many reports one owner processes in a second."""
    members = {"m": shmacc.TensorSpec((), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "announces", shards=1, unlink_on_close=True) as group:
        owner: Any = find_actor(f"{group.shared_name}/owner")
        reports = [Report(f"host {i}", 1, i, None, 0, 0) for i in range(2000)]
        start = time.perf_counter()
        ray.get([owner.report.remote(report, -1) for report in reports])
        print(f"reports: {len(reports) / (time.perf_counter() - start):.0f} a second")


if __name__ == "__main__":
    main()
