"""A training loop: four processes that share names fit a line, and a chief updates it in place."""

import multiprocessing

import numpy as np
import shmacc

WORKERS, STEPS, TRUTH = 4, 200, np.array([3.0, -1.0, 0.5])


def work(rank):
    inputs = np.random.default_rng(rank).normal(size=(100, 3))  # this worker's data
    with shmacc.attach("line") as group, shmacc.SharedArrays.attach("line.params") as params:
        for step in group.steps(timeout=60):
            error = inputs @ params["weights"] - inputs @ TRUTH
            group.apply({"weights": inputs.T @ error / 100}, step, contributor=rank)


if __name__ == "__main__":
    members = {"weights": shmacc.TensorSpec((3,), "float64")}
    params = shmacc.SharedArrays({"weights": np.zeros(3)}, "line.params", unlink_on_close=True)
    with params, shmacc.AccumulatorGroup(members, "line", unlink_on_close=True) as group:
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            workers = pool.map_async(work, range(WORKERS))
            for _ in range(STEPS):
                with group.round(WORKERS, timeout=60) as taken:
                    params["weights"] -= 0.1 * taken["weights"].value
            group.finish()
            workers.get(timeout=60)
        np.testing.assert_allclose(params["weights"], TRUTH, atol=1e-6)
