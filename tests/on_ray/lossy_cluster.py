"""Rounds over nodes in network namespaces, with delay and loss between them.

test_clusters_of_their_own.py runs it as a program: a process can connect to Ray only once, and
this one does so from inside one. The program kills workers and the actors of nodes in mid-round,
cuts a node off for a while, and kills a node. It writes a line of JSON.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from on_ray.wires import Wires

if __name__ == "__main__":  # before Ray has any thread
    WIRES = Wires(3, delay=(0.005, 0.002), loss=0.01)

import ray
from on_ray.journals import Journals
from on_ray.nodes import Nodes, kill, wait_for
from on_ray.training import check_copies, parameters_of

import shmacc.ray
from shmacc.ray._parts import NAMESPACE

RANKS = 6
TIMING = shmacc.ray.Timing(lease=2.0, grace=1.0, expiry=10.0, chief_lease=10.0)


def owners_node() -> str:
    owner: Any = ray.get_actor("lossy/owner", namespace=NAMESPACE)
    return str(ray.get(owner.place.remote())[1])


def live(
    nodes: Nodes,
    group: shmacc.ray.AccumulatorGroup,
    params: shmacc.ray.Parameters,
    journals: Journals,
) -> dict[str, Any]:
    """Make rounds while parts fail; return the figures."""
    seconds = []

    def rounds(number: int, required: int = RANKS) -> None:
        for _ in range(number):
            began = time.monotonic()
            with group.round(required, timeout=120) as taken:
                journals.enter(taken, required, params.step)
                params.update(taken)
            seconds.append(time.monotonic() - began)

    times: dict[str, float] = {}
    began = time.monotonic()

    def passed(phase: str) -> None:
        times[phase] = round(time.monotonic() - began - sum(times.values()), 1)

    for rank in range(RANKS):
        journals.start(rank, rank % 3)
    rounds(5)
    passed("quiet")
    quiet = sorted(seconds)[len(seconds) // 2]
    assert journals.lost() == []
    for number in range(3):
        journals.kill(number)
        journals.start(number, number)
        rounds(3)
    assert journals.lost() == [], "neither workers nor packets cost a gradient"
    passed("workers")
    for number in (1, 2):
        kill(f"lossy/host {nodes.id(number)}")
        rounds(2)
    by_actors = len(journals.lost())
    passed("hosts' actors")
    assert nodes.wires is not None
    nodes.wires.cut(2)
    rounds(2, 4)  # the owner does not know yet that the node is lost
    wait_for(lambda: not group.hosts()[nodes.id(2)].alive)
    rounds(2, 4)  # its shard is on another node meanwhile
    passed("link cut")
    nodes.wires.mend(2)
    wait_for(lambda: group.hosts()[nodes.id(2)].alive)
    rounds(3)
    by_links = len(journals.lost()) - by_actors
    passed("link mended")
    nodes.wires.cut(1, 2)  # both reach the owner, and have shards
    rounds(2)
    between = seconds[-1]
    passed("nodes cut off from each other")
    nodes.wires.mend(1, 2)
    nodes.remove(2)
    for rank in (2, 5):
        journals.kill(rank)
        del journals.homes[rank]
    rounds(3, 4)
    check_copies(journals, params)
    passed("node")
    return {
        "seconds": times,
        "rounds": len(seconds),
        "gradients": len(journals.consumed),
        "lost to hosts' actors": by_actors,
        "lost to links": by_links,
        "lost to nodes": len(journals.lost()) - by_actors - by_links,
        "a round while two nodes are cut off from each other": round(between, 3),
        "median round without kills": round(quiet, 3),
        "packets, lost": nodes.wires.figures(),
        "counters": group.counters(),
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # Ray puts the current folder into its workers' path
    nodes = Nodes(WIRES)
    try:
        with (
            nodes.on(0),
            parameters_of("lossy") as params,
            shmacc.ray.AccumulatorGroup(
                params.member_specs(), "lossy", shards=3, timing=TIMING
            ) as group,
        ):
            copies = params.shared_name
            assert owners_node() == nodes.id(0), "no link between it and its chief"
            journals = Journals(nodes, "lossy", folder, group.global_step, copies=copies)
            try:
                figures = live(nodes, group, params, journals)
            finally:
                journals.end()
                group.unlink()
                params.unlink()
        sys.stdout.write(f"\n{json.dumps(figures)}\n")
        sys.stdout.flush()
    finally:
        left = nodes.left()
        nodes.end()
        for name in left:
            os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108  of the node that is gone
        assert all(f"{nodes.namespace(2)}:" in name for name in left), left


if __name__ == "__main__":
    main()
