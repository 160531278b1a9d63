"""The end of a run reaches the workers of all hosts, and all calls that wait at the owner."""

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from on_ray.nodes import Nodes

import shmacc
import shmacc.ray
from shmacc.errors import FinishedError

MEMBERS = {"m": shmacc.TensorSpec((2,), "float64", reduction_type="SUM")}
HOSTS = 3

_WORKER = """
import sys
import shmacc
group = shmacc.attach("run", timeout=60)
steps = []
for step in group.steps(timeout=600):
    steps.append(step)
    group.apply({"m": [1.0, step]}, step, contributor=int(sys.argv[1]))
assert "ray" not in sys.modules
print(*steps)
"""


class Run:
    """A group with a worker on each host."""

    def __init__(self, nodes: Nodes) -> None:
        self.group = shmacc.ray.AccumulatorGroup(MEMBERS, "run", unlink_on_close=True)
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, str(node)],
                env=nodes.environment(node),
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in range(HOSTS)
        ]

    def rounds(self, steps: range) -> None:
        for step in steps:
            part: Any = self.group.take(HOSTS, timeout=60)["m"]
            assert part.value.tolist() == [HOSTS, HOSTS * step]

    def workers_end(self) -> None:
        """Check that the workers end by themselves, with success."""
        for worker in self.workers:
            assert worker.wait(timeout=60) == 0
            assert worker.stdout is not None
            assert worker.stdout.readline().split()[0] == "0"

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        self.group.close()


@pytest.fixture
def run(nodes: Nodes) -> Any:
    made = Run(nodes)
    try:
        yield made
    finally:
        made.end()


def test_finish_ends_workers_chiefs_and_waits(run: Run) -> None:
    run.rounds(range(4))
    other = shmacc.ray.AccumulatorGroup.attach("run")
    ends: list[str] = []

    def wait(call: Any) -> None:
        try:
            call()
        except FinishedError:
            ends.append("finished")

    calls = (
        lambda: other.take(HOSTS + 1, timeout=100),
        lambda: other.wait_step(10**6, timeout=100),
    )
    threads = [threading.Thread(target=wait, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    assert run.group.running
    run.group.finish()
    assert not run.group.running
    run.workers_end()
    for thread in threads:
        thread.join(60)
    assert ends == ["finished", "finished"]
    step = run.group.global_step
    with pytest.raises(FinishedError):
        run.group.take(1, timeout=60)
    with pytest.raises(FinishedError):
        run.group.wait_step(step, timeout=60)
    assert run.group.wait_step(step - 1, timeout=60) == step, "what has moved on is served first"
    assert list(run.group.steps()) == []
    run.group.finish()


def test_a_chief_that_closes_its_group_finishes_the_workers_run(run: Run) -> None:
    seen: list[int] = []
    for step in run.group.steps(timeout=60):
        seen.append(step)
        run.group.take(HOSTS, timeout=60)
        if step == 2:
            run.group.close()
            break
    assert seen == [0, 1, 2]
    run.workers_end()


def test_a_worker_ends_the_run_of_all_hosts(run: Run, nodes: Nodes) -> None:
    run.rounds(range(2))
    with nodes.on(1), shmacc.AccumulatorGroup.attach("run") as local:
        local.finish()
        assert not local.apply({"m": np.zeros(2)}, local.global_step)
    run.workers_end()
    with pytest.raises(FinishedError):
        run.group.take(HOSTS, timeout=60)
