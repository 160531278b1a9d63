"""Where containers put a program: another user without a home, and 64 MiB of /dev/shm."""

from __future__ import annotations

import multiprocessing
import multiprocessing.popen_fork  # here, as another user may not be able to read the module's file
import os
from typing import Any, Final

import numpy as np
from helpers.apart import Apart, needs_own_shm, needs_root

import shmacc

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
