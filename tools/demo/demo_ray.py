"""The demo over several hosts: a Ray cluster of three nodes on this machine. See ``--help``.

Each node has an address and a namespace of names in shared memory of its own, so no segment of one
is seen on another. On each node a worker process attaches to the node's segments (it is
demo_ray_worker.py, which does not import Ray). This process is the chief. It updates the parameters
with NumPy, since `shmacc.Parameters` are of one host, and publishes the rows that have changed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112  busy machines
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import numpy as np

from demo import curve, show
from shmacc import IndexedSlicesSpec, TensorSpec
from shmacc_demo.model import SQUARES, TABLES, Arrays, Plan, read, start, update
from shmacc_demo.training import train

HOSTS = 3
WORKER = Path(__file__).with_name("demo_ray_worker.py").resolve()


def main(arguments: list[str] | None = None) -> int:
    """Learn word vectors on three hosts, and once more on one, and compare."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, default=HOSTS, help="processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of training (%(default)s)")
    asked = parser.parse_args(arguments)
    plan = Plan(workers=asked.workers, steps=asked.steps)
    words, text = read(None)
    print(f"{len(text['stream']):,} words of text, {len(words):,} different ones")
    began = time.monotonic()
    one, report = train(plan, text, show)
    print(f"\none host    {time.monotonic() - began:5.1f} s  {curve(one['figures'])}")
    with ExitStack() as stack:
        environments = start_cluster(stack)
        began = time.monotonic()
        many, report = lead(plan, text, environments)
        seconds = time.monotonic() - began
    print(f"{HOSTS} hosts     {seconds:5.1f} s  {curve(many['figures'])}\n")
    for step in sorted({*range(0, plan.steps, max(1, plan.steps // 5)), plan.steps - 1}):
        losses = [each["figures"][step, 0] / each["figures"][step, 1] for each in (one, many)]
        print(f"  step {step:4}: loss {losses[0]:.6f} on one host, {losses[1]:.6f} on {HOSTS}")
    # The gradients are multiples of 2**-30, whose sums float64 holds exactly in any order.
    for name in (*TABLES, "figures"):
        if not np.array_equal(one[name], many[name]):
            apart = np.abs(one[name] - many[name]).max()
            raise RuntimeError(f"{name!r} differs from that of one host by up to {apart}")
    print(f"Losses and vectors are those of one host, to the bit.\n{report}")
    return 0


def start_cluster(stack: ExitStack) -> list[dict[str, str]]:
    """Start the nodes and connect to the first; return the environments of processes on them."""
    import ray  # not in the processes of the run on one host, which import this module
    from ray.cluster_utils import Cluster

    stack.callback(os.chdir, os.getcwd())  # noqa: PTH109
    # Ray puts the current folder into its workers' path, and in the checkout that is the bare tree.
    os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))
    run = f"demo{os.getpid()}{uuid.uuid4().hex[:6]}"
    environments = [{**os.environ, "SHMACC_NAMESPACE": f"{run}n{node}"} for node in range(HOSTS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster()
        stack.callback(cluster.shutdown)
        for number, environment in enumerate(environments):
            options: dict[str, Any] = {"include_dashboard": False} if number == 0 else {}
            cluster.add_node(
                num_cpus=1,
                node_ip_address=f"127.0.0.{number + 2}",
                object_store_memory=150 << 20,
                env_vars={"SHMACC_NAMESPACE": environment["SHMACC_NAMESPACE"]},
                **options,
            )
        ray.init(
            address=cluster.address,
            _node_ip_address="127.0.0.2",
            log_to_driver=False,
            logging_level="warning",
        )
        stack.callback(ray.shutdown)
    before = os.environ.get("SHMACC_NAMESPACE")
    os.environ["SHMACC_NAMESPACE"] = environments[0]["SHMACC_NAMESPACE"]
    stack.callback(_restore, before)
    return environments


def _restore(namespace: str | None) -> None:
    del os.environ["SHMACC_NAMESPACE"]
    if namespace is not None:
        os.environ["SHMACC_NAMESPACE"] = namespace


def lead(plan: Plan, text: Arrays, environments: list[dict[str, str]]) -> tuple[Arrays, str]:
    """Start workers on all nodes, be their chief, and return the last state and the figures."""
    import shmacc.ray  # as in start_cluster

    words, name = len(text["counts"]), "demo"
    tables = start(words, plan)
    squares = {table: np.full_like(values, SQUARES) for table, values in tables.items()}
    members = {
        "inputs": IndexedSlicesSpec((words, plan.width), "float64"),
        "outputs": IndexedSlicesSpec((words, plan.width), "float64"),
        "bias": IndexedSlicesSpec((words,), "float64"),
        "figures": TensorSpec((2,), "float64", reduction_type="SUM"),
    }
    figures, sent = np.zeros((plan.steps, 2)), 0
    with ExitStack() as stack:
        shared = shmacc.ray.PublishedArrays(
            {**tables, **text}, f"{name}.arrays", unlink_on_close=True
        )
        stack.enter_context(shared)
        group = shmacc.ray.AccumulatorGroup(
            members, name, reduction_type="CMEAN", unlink_on_close=True
        )
        stack.enter_context(group)
        for rank in range(plan.workers):
            command = [WORKER, name, rank, plan.workers, plan.steps]
            worker = subprocess.Popen(
                [sys.executable, *map(str, command)], env=environments[rank % len(environments)]
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        for step in range(plan.steps):
            with group.round(plan.workers, timeout=120) as taken:
                part: Any = taken  # of the kinds that `members` says
                means = {table: (part[table].indices, part[table].values) for table in TABLES}
                update(shared, squares, means, plan.rate_at(step))
                shared.publish({table: rows for table, (rows, _) in means.items()})
                figures[step] = part["figures"].value
                sent += sum(len(rows) for rows, _ in means.values())
            show(plan, step + 1, {"figures": figures}, f"{HOSTS} hosts")
        counters = group.counters()
        tables = {table: shared[table].copy() for table in TABLES}
    report = (
        f"{counters['gradients']:,} gradients in {counters['rounds']:,} rounds; {sent:,} rows of "
        f"parameters were published to each of {HOSTS - 1} other hosts"
    )
    return {**tables, "figures": figures}, report


if __name__ == "__main__":
    sys.exit(main())
