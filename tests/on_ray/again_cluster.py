"""All processes of a cluster die, and it is started again with what its machines have in memory.

A program, run by test_clusters_of_their_own.py. One machine has an older copy of the parameters,
and the next chief runs on that machine; another machine has lost its memory.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.support import stopped
from on_ray.nodes import Nodes, pid_of, wait_for
from on_ray.replicated import Replicated

import shmacc.ray


def train(folder: Path) -> tuple[str, int]:
    """Train until machine 1 is behind; crash; return the run and the newest copy's update count."""
    nodes = Nodes()
    training = Replicated(nodes, "again", folder)
    with nodes.on(0):
        training.start_workers()
        training.start_chief(10**6)
        wait_for(lambda: training.step_on(0) >= 3, 120)
        training.move((1, 4), 0)
        pid = pid_of(f"again/host {nodes.id(1)}")
        assert pid is not None
        with stopped(pid):
            step = training.step_on(1)
            wait_for(lambda: training.step_on(0) >= step + 3, 60)
            nodes.crash()
            training.end_processes()
        old, new = (int(state["updates"][0]) for state in training.states((1, 0)))
        assert old < new
    for name in nodes.left():
        if f"{nodes.namespace(2)}:" in name:
            os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108
    return nodes.run, new


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # Ray puts the current folder into its workers' path
    run, updates = train(folder)
    nodes = Nodes(run=run)
    try:
        training = Replicated(nodes, "again", folder)
        with nodes.on(0):
            training.start_workers()
            training.start_chief(10**6, node=1)
            wait_for(lambda: training.step_on(2) >= updates + 3, 120)
            rounds = shmacc.ray.AccumulatorGroup.attach("again").counters()["rounds"]
            assert training.chief is not None
            training.chief.kill()
            training.train_until(training.step_on(0) + 5)
            assert training.check() >= updates + rounds + 5
            training.end()
    finally:
        nodes.end()
        left = nodes.left()
        for name in left:
            os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108
    assert left == []


if __name__ == "__main__":
    main()
