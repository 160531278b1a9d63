"""Where containers put a program: another user without a home, and 64 MiB of /dev/shm."""

from __future__ import annotations

import multiprocessing
import multiprocessing.popen_fork  # here, as another user may not be able to read the module's file
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, needs_own_shm, needs_root
from helpers.support import SHM_DIRECTORY

import shmacc
from shmacc import errors, testing

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY: Final = 65534
DOCKER: Final = 64 << 20  # bytes of /dev/shm, unless told otherwise
WORKERS, STEPS = 2, 3


def _work(rank: int, name: str) -> None:
    with shmacc.AccumulatorGroup.attach(name) as group, shmacc.SharedArrays.attach("p") as params:
        for step in range(STEPS):
            group.apply({"w": params["w"] + rank}, step, contributor=rank)
            group.wait_step(step, timeout=60)


def _train() -> list[float]:
    os.chdir("/")
    for variable in ("HOME", "USER", "LOGNAME", "TMPDIR"):
        os.environ.pop(variable, None)
    members = {"w": shmacc.TensorSpec((2,), "f8")}
    group = shmacc.AccumulatorGroup(members, "g", unlink_on_close=True)
    with group, shmacc.SharedArrays({"w": np.zeros(2)}, "p", unlink_on_close=True) as params:
        context: Any = multiprocessing.get_context("fork")
        crew = [context.Process(target=_work, args=(rank, "g")) for rank in range(WORKERS)]
        for process in crew:
            process.start()
        for _ in range(STEPS):
            with group.round(WORKERS, timeout=60) as taken:
                params["w"] += taken["w"].value
        for process in crew:
            process.join()
            assert process.exitcode == 0
        return [float(number) for number in params["w"]]


@needs_root
def test_training_as_nobody() -> None:
    # By fork, since the interpreter itself may be where only its own user can read it.
    assert Apart(_train, uid=NOBODY).result() == [3.5, 3.5]


@needs_own_shm
def test_training_in_a_containers_memory() -> None:
    assert Apart(_train, shm=DOCKER).result() == [3.5, 3.5]


def _too_large_arrays() -> None:
    shmacc.SharedArrays({"emb": shmacc.TensorSpec((1_000_000, 32), "f4")}, "p")


def _too_large_sum() -> None:
    with shmacc.ConditionalAccumulator("f4", (32_000_000,), "g", unlink_on_close=True) as acc:
        acc.apply_grad(np.zeros(32_000_000, np.float32))


def _too_many_rows() -> None:
    rows = np.arange(1_000_000)
    with shmacc.SparseConditionalAccumulator("f4", (None, 32), "g", unlink_on_close=True) as acc:
        try:
            acc.apply_grad(rows, np.zeros((1_000_000, 32), np.float32))
        finally:  # nothing was added, and what fits goes on
            assert acc.num_accumulated() == 0
            assert acc.apply_grad(rows[:1000], np.zeros((1000, 32), np.float32))
            assert len(acc.take(1).indices) == 1000


def _message(use: Callable[[], None], namespace: str) -> str:
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        use()
    assert testing.leaked_names(namespace) == ()
    return str(caught.value)


@needs_own_shm
@pytest.mark.parametrize("use", [_too_large_arrays, _too_large_sum, _too_many_rows])
def test_a_model_that_does_not_fit_is_told_what_to_do(
    use: Callable[[], None], namespace: str
) -> None:
    message = Apart(_message, use, namespace, shm=DOCKER).result()
    for words in (SHM_DIRECTORY, "needed", "free", "--shm-size"):
        assert words in message, message


def _the_documented_size_is_enough() -> int:
    """The formula of docs/sizing.md for a sparse accumulator, in a /dev/shm of just that."""
    rows, width, batch, gradients = 100_000, 16, 10_000, 20
    needed = int(1.5 * rows * (width * 4 + 32) + 1.1 * batch * (width * 4 + 16)) + (1 << 20)
    available = os.statvfs(SHM_DIRECTORY)
    assert available.f_bavail * available.f_frsize >= needed > available.f_blocks * 4096 * 0.3
    with shmacc.SparseConditionalAccumulator("f4", (None, width), "g", unlink_on_close=True) as acc:
        for number in range(gradients):
            start = number * batch % rows
            indices = np.arange(start, start + batch)
            assert acc.apply_grad(indices, np.ones((batch, width), np.float32))
        return len(acc.take(gradients).indices)


@needs_own_shm
def test_the_documented_size_is_enough() -> None:
    assert Apart(_the_documented_size_is_enough, shm=DOCKER // 4).result() == 100_000
