"""The rounds of the benchmarks do the same by both ways."""

from __future__ import annotations

import numpy as np
import torch

from shmacc_bench.parts.rounds import Job
from shmacc_bench.workload import Workload


def test_shmacc_and_torch_by_hand_train_the_same_table() -> None:
    job = Job(torch, Workload("sparse", 60, 3, table_rows=40, order="zipf"), 2)
    try:
        for _ in range(3):
            assert min(job.turn()) > 0
        ours = job.params["table"]
        assert not np.all(ours == 1)
        np.testing.assert_allclose(ours, job.weights.detach().numpy(), rtol=1e-5)
    finally:
        job.close()
