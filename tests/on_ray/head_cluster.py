"""Rounds go on while Ray's head is killed and started again.

test_clusters_of_their_own.py runs it as a program with its own cluster, whose head stores its
state. It writes a line of JSON.
"""

import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from on_ray.journals import MEMBERS
from on_ray.nodes import Nodes, pid_of, wait_for
from on_ray.training import Training, parameters_of

import shmacc.ray
from shmacc.errors import DeadlineExceededError

HOMES = {rank: rank % 3 for rank in range(6)}
TIMING = shmacc.ray.Timing(lease=2.0, grace=0.5, chief_lease=10.0)
SECONDS = 1.5


def ends_late(call: Any) -> float:
    """Let a call end by its timeout of SECONDS; return how many seconds late it was."""
    began = time.monotonic()
    try:
        call()
    except DeadlineExceededError:
        return round(time.monotonic() - began - SECONDS, 1)
    raise AssertionError("it did not need the head")


def rounds(training: Training, number: int, required: int) -> float:
    longest = 0.0
    for _ in range(number):
        before, began = training.happened["rounds"], time.monotonic()
        training.round(required)
        longest = max(longest, time.monotonic() - began)
        assert training.happened["rounds"] == before + 1
    return round(longest, 1)


def live(nodes: Nodes, training: Training) -> dict[str, Any]:
    """Take the head away twice; return the figures."""
    found: dict[str, Any] = {"all there": rounds(training, 10, 6)}
    group = training.group
    beside = shmacc.ray.AccumulatorGroup(MEMBERS, "beside", unlink_on_close=True)
    host = pid_of(f"head/host {nodes.id(1)}")
    assert host is not None
    with nodes.headless():
        found["head away"] = rounds(training, 10, 6)
        os.kill(host, signal.SIGKILL)
        found["a node's actor killed meanwhile"] = rounds(training, 10, 4)
        assert len(group.stats(timeout=10)) == 2
        # This process has not looked up the actors of the group "beside" yet. Ray finds the actors
        # that it has looked up before even without its head.
        found["attach late"] = ends_late(
            lambda: shmacc.ray.AccumulatorGroup.attach("beside", timeout=SECONDS)
        )
        for call in beside.stats, beside.snapshot, beside.contributors:
            found[f"{call.__name__} late"] = ends_late(partial(call, timeout=SECONDS))
    wait_for(lambda: group.hosts()[nodes.id(1)].alive)
    beside.close()
    found["all there again"] = rounds(training, 10, 6)
    found["lost"] = len(training.journals.lost())
    owner = pid_of("head/owner")
    assert owner is not None
    with nodes.headless():
        os.kill(owner, signal.SIGKILL)
        found["take late"] = ends_late(lambda: group.take(6, timeout=SECONDS))
        found["step late"] = ends_late(lambda: group.wait_step(0, timeout=SECONDS))
    training.round_of_all()  # the new owner has learnt the step
    late = nodes.add()
    wait_for(lambda: late_is_there(group, nodes.id(late)))
    rounds(training, 3, 6)
    return found


def late_is_there(group: shmacc.ray.AccumulatorGroup, node: str) -> bool:
    """Return whether a node that joined late takes part."""
    hosts = group.hosts()
    return node in hosts and hosts[node].alive


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # Ray puts the current folder into its workers' path
    (folder / "storage").mkdir()
    nodes = Nodes(storage=folder / "storage")
    try:
        with nodes.on(0):
            params = parameters_of("head")
            members = params.member_specs()
            training = Training(nodes, "head", members, HOMES, 4, folder / "head", TIMING, params)
            try:
                figures = live(nodes, training)
            finally:
                training.end()
        left = nodes.left()
        assert left == [], left
    finally:
        nodes.end()
    sys.stdout.write(f"\n{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
