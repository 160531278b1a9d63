"""In process pools, tasks get handles as arguments, and a pool may break."""

import concurrent.futures
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from helpers.support import LONG, START_METHODS, until

import shmacc
from shmacc import AccumulatorGroup, SharedArrays

pytestmark = pytest.mark.threads

TASKS, WIDTH = 12, 3
MEMBERS = {
    "rows": shmacc.IndexedSlicesSpec((None, WIDTH), "f8", reduction_type="SUM"),
    "all": shmacc.TensorSpec((WIDTH,), "f8", reduction_type="SUM"),
}


Model = tuple[AccumulatorGroup, SharedArrays]


@pytest.fixture
def model() -> Iterator[Model]:
    group = AccumulatorGroup(MEMBERS, "group", unlink_on_close=True)
    with group, SharedArrays({"all": np.arange(3.0)}, "params", unlink_on_close=True) as params:
        yield group, params


def _apply(group: AccumulatorGroup, params: SharedArrays, task: int) -> bool:
    gradient = {"rows": ([task], np.ones((1, WIDTH))), "all": params["all"] * task}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return group.apply(gradient, 0, contributor=task)


def _all_tasks_are_in(group: AccumulatorGroup) -> bool:
    with group.round(TASKS, timeout=LONG) as taken:
        assert taken.contributors.tolist() == list(range(TASKS))
        assert taken["rows"].indices.tolist() == list(range(TASKS))
        total = sum(range(TASKS))
        return bool(taken["all"].value.tolist() == [0.0, total, 2.0 * total])


@pytest.mark.parametrize("method", START_METHODS)
def test_handles_are_arguments_of_tasks(model: Model, method: str) -> None:
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = [pool.submit(_apply, *model, task) for task in range(TASKS)]
        assert all(future.result(LONG) for future in futures)
        assert _all_tasks_are_in(model[0])
        # A task's handle is closed when the task ends; a forked worker also has its parent's.
        until(lambda: model[0].stats().attached == 1 or method == "fork")


def _apply_and_die(group: AccumulatorGroup, params: SharedArrays, task: int) -> None:
    _apply(group, params, task)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_pool_that_breaks_loses_no_gradient(model: Model) -> None:
    context = multiprocessing.get_context("fork")
    with (
        concurrent.futures.ProcessPoolExecutor(2, context) as pool,
        pytest.raises(BrokenProcessPool),
    ):
        pool.submit(_apply_and_die, *model, 0).result(LONG)
    # Run all tasks again, since nobody knows which ones applied. Each contributor counts once.
    with concurrent.futures.ProcessPoolExecutor(2, context) as other:
        futures = [other.submit(_apply, *model, task) for task in range(TASKS)]
        assert all(future.result(LONG) for future in futures)
    assert _all_tasks_are_in(model[0])
