"""Workers of joblib and loky serve many calls, and get handles, arrays and closures."""

import joblib
import numpy as np
import pytest
from helpers.support import LONG, until
from joblib.externals.loky import get_reusable_executor

import shmacc


def _apply(acc: shmacc.ConditionalAccumulator, task: int, step: int) -> bool:
    return acc.apply_grad(np.full(3, task, np.float64), step, contributor=task)


# The backend that forks is left out: JAX, which other tests have loaded, has threads.
@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_handles_arrays_and_closures_can_be_passed_to_workers(backend: str) -> None:
    # Workers keep the environment, and so the namespace, of the test that they were started in.
    get_reusable_executor(max_workers=2).shutdown(wait=True)
    parallel = joblib.Parallel(n_jobs=2, backend=backend, max_nbytes="1M")
    with shmacc.ConditionalAccumulator("f8", (3,), "run", unlink_on_close=True) as acc:
        for step in range(2):  # the second call uses the first one's workers
            assert all(parallel(joblib.delayed(_apply)(acc, task, step) for task in range(6)))
            taken = acc.take(6, timeout=LONG)
            assert taken.value.tolist() == [2.5, 2.5, 2.5]
            assert taken.contributors.tolist() == list(range(6))
        until(lambda: acc.stats().attached == 1)

        def by_name() -> bool:
            with shmacc.ConditionalAccumulator.attach("run") as own:
                return own.apply_grad(np.ones(3), own.global_step)

        assert all(parallel(joblib.delayed(by_name)() for _ in range(4)))
        assert acc.take_grad(4, timeout=LONG).tolist() == [1, 1, 1]
    with shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((), "f8")}) as group:
        apply = joblib.delayed(lambda task: group.apply({"w": task}, 0))
        assert all(parallel(apply(task) for task in range(4)))
        assert group.take(4, timeout=LONG)["w"].value == 1.5
    gradient = np.ones(500_000)  # joblib writes it to a file, which each worker maps
    with shmacc.ConditionalAccumulator("f8", (500_000,), reduction_type="SUM") as acc:
        assert all(parallel(joblib.delayed(acc.apply_grad)(gradient) for _ in range(3)))
        assert (acc.take_grad(3, timeout=LONG) == 3).all()
    with shmacc.SharedArrays({"w": np.arange(8.0).reshape(4, 2)}) as params:
        read = joblib.delayed(lambda row: float(params["w"][row].sum()))
        assert parallel(read(row) for row in range(4)) == [1, 5, 9, 13]
