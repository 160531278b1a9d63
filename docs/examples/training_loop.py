"""A training loop: four processes that share names fit a line, and a chief updates it in place."""

import multiprocessing

import numpy as np
import shmacc

WORKERS, STEPS, TRUTH, SGD = 4, 200, np.array([3.0, -1.0, 0.5]), shmacc.optim.SGD(0.1)
OURS = {"if_exists": "replace", "unlink_on_close": True}  # a run begins again, and leaves nothing


def work(rank):
    inputs = np.random.default_rng(rank).normal(size=(100, 3))  # this worker's data
    with shmacc.attach("line") as group, shmacc.Parameters.attach("line.params") as params:
        for step in group.steps(timeout=60, on_death="raise"):
            error = inputs @ params["weights"] - inputs @ TRUTH
            group.apply({"weights": inputs.T @ error / 100}, step, contributor=rank)


if __name__ == "__main__":
    params = shmacc.Parameters({"weights": np.zeros(3)}, "line.params", optimizer=SGD, **OURS)
    with params, shmacc.AccumulatorGroup(params.member_specs(), "line", **OURS) as group:
        context = multiprocessing.get_context("spawn")
        for rank in range(WORKERS):
            context.Process(target=work, args=(rank,)).start()
        for _ in range(STEPS):
            with group.round(WORKERS, timeout=60, on_death="raise") as taken:
                params.update(taken)
        group.finish()  # the workers' loops end, and so do they
        np.testing.assert_allclose(params["weights"], TRUTH, atol=1e-6)
