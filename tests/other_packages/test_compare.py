"""The comparison with torch: all ways train alike, and shmacc's way survives each death."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from helpers.apart import Apart
from other_packages.torch_training import CONTEXT, start_server

from shmacc_bench import processes
from shmacc_bench.parts.rounds import Job
from shmacc_bench.workload import Workload

if TYPE_CHECKING:
    from shmacc_bench.compare.training import Run

TARGET = 0.3  # a third of what is to be learnt
WAYS = ("shmacc_synchronous", "shmacc_asynchronous", "hogwild", "ddp", "queues")


def train_all() -> tuple[float, dict[str, Run], list[Run]]:
    """Return an untrained model's loss, each way's run, and one run for each death."""
    # Forks of this process have torch already.
    processes.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment,misc]
    torch.set_num_threads(1)
    from shmacc_bench.compare.model import Task
    from shmacc_bench.compare.restarted import CHIEF
    from shmacc_bench.compare.training import train

    deaths = [train(WAYS[0], target=TARGET, victim=victim) for victim in (1, CHIEF)]
    return Task().judge(Task().model()), {way: train(way, target=TARGET) for way in WAYS}, deaths


def losses_of(run: Run) -> dict[int, float]:
    return {step: loss for _, step, loss in run.losses}


@pytest.mark.timeout(400)
def test_all_ways_train_alike_and_shmaccs_survives_each_death() -> None:
    start_server()
    with Apart(train_all, method="forkserver") as child:
        untrained, runs, deaths = child.result(380)
    assert [run.stopped for run in (*runs.values(), *deaths)] == [None] * 7
    for run in runs.values():
        assert run.losses[-1][2] <= TARGET < untrained
    all_steps = losses_of(runs["shmacc_synchronous"])
    for way in ("ddp", "queues"):
        assert losses_of(runs[way]) == pytest.approx(all_steps, rel=1e-5), way
    for run in deaths:
        assert run.killed is not None
        assert not run.began_again
        seen = losses_of(run)
        assert seen == pytest.approx({step: all_steps[step] for step in seen}, rel=1e-5)
        # A chief that dies between an update and its evaluation leaves the evaluation out.
        assert len(all_steps) - len(seen) <= 1
        assert max(seen) == max(all_steps)


def test_rounds_of_shmacc_and_torch_train_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server()
    monkeypatch.setattr(processes, "CONTEXT", CONTEXT)
    job = Job(Workload("sparse", 60, 3, table_rows=40, order="zipf"), 2)
    try:
        for _ in range(3):
            assert min(job.turn()) > 0
        ours = job.params["table"]
        assert not np.all(ours == 1)
        np.testing.assert_allclose(ours, job.weights.detach().numpy(), rtol=1e-5)
    finally:
        job.close()
