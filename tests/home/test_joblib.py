"""joblib and its loky workers, which serve call after call, and are sent closures."""

from __future__ import annotations

import joblib
import numpy as np
import pytest
from helpers.support import LONG, until
from joblib.externals.loky import get_reusable_executor

import shmacc


@pytest.fixture(autouse=True)
def _fresh_workers() -> None:
    """Workers keep the environment, and so the namespace, of the test that they were started in."""
    get_reusable_executor(max_workers=2).shutdown(wait=True)


def _apply(acc: shmacc.ConditionalAccumulator, task: int, step: int) -> bool:
    return acc.apply_grad(np.full(3, task, np.float64), step, contributor=task)


# Not its backend that forks: JAX, which other tests have loaded here, has threads.
@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_handles_are_arguments(backend: str) -> None:
    with shmacc.ConditionalAccumulator("f8", (3,)) as acc:
        for step in range(2):  # the second call has the workers of the first one
            parallel = joblib.Parallel(n_jobs=2, backend=backend)
            assert all(parallel(joblib.delayed(_apply)(acc, task, step) for task in range(6)))
            taken = acc.take(6, timeout=LONG)
            assert taken.value.tolist() == [2.5, 2.5, 2.5]
            assert taken.contributors.tolist() == list(range(6))
        until(lambda: acc.stats().attached == 1)


def test_closures_carry_handles() -> None:
    with shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((), "f8")}) as group:
        apply = joblib.delayed(lambda task: group.apply({"w": task}, 0))
        tasks = (apply(task) for task in range(4))
        assert joblib.Parallel(n_jobs=2)(tasks) == [True] * 4
        assert group.take(4, timeout=LONG)["w"].value == 1.5


def test_large_arrays_come_as_maps_of_files() -> None:
    gradient = np.ones(500_000)  # joblib writes it to a file, and each worker maps that
    with shmacc.ConditionalAccumulator("f8", (500_000,), reduction_type="SUM") as acc:
        tasks = (joblib.delayed(acc.apply_grad)(gradient) for _ in range(3))
        assert all(joblib.Parallel(n_jobs=2, max_nbytes="1M")(tasks))
        assert (acc.take_grad(3, timeout=LONG) == 3).all()


def _read(params: shmacc.SharedArrays, row: int) -> float:
    return float(params["w"][row].sum())


def test_shared_arrays_are_arguments() -> None:
    with shmacc.SharedArrays({"w": np.arange(8.0).reshape(4, 2)}) as params:
        tasks = (joblib.delayed(_read)(params, row) for row in range(4))
        assert joblib.Parallel(n_jobs=2)(tasks) == [1, 5, 9, 13]


def test_workers_attach_by_name() -> None:
    def work() -> int:
        with shmacc.ConditionalAccumulator.attach("run") as acc:
            acc.apply_grad(2.0)
            return acc.global_step

    with shmacc.ConditionalAccumulator("f8", (), "run", unlink_on_close=True) as acc:
        assert joblib.Parallel(n_jobs=2)(joblib.delayed(work)() for _ in range(4)) == [0] * 4
        assert acc.take_grad(4, timeout=LONG) == 2.0
