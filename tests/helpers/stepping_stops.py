"""Stops a process in the middle of an operation, while other processes go on."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.killing_images import Image
from helpers.killing_scenes import NAME, Scene, path, rows
from helpers.lock_holder import sleeps_in
from helpers.numpy_model import Array
from helpers.stepping_tracer import Traced
from helpers.stepping_walk import begun, stopped
from helpers.support import LONG, SOON, slept, until

import shmacc
from shmacc import NEVER_STALE, errors, inspection

# Seconds: longer than every interval of the waits in lock.hpp, wait_queue.hpp and operation.hpp.
LONGER: Final = 1.6

FIRST: Final = rows(*range(12), width=64)
SECOND: Final = rows(*range(6, 18), width=64)
THIRD: Final = rows(1, 2, width=64)

APPLYING: Final = Scene(
    "applying",
    "float64",
    64,
    before=lambda acc: acc.apply_grad(*FIRST),
    operation=lambda acc: acc.apply_grad(*SECOND),
    more=(1, 9, 30),
)
TAKING: Final = replace(APPLYING, name="taking", operation=lambda acc: acc.take(1, timeout=0))


@cache
def _middle(scene: Scene) -> tuple[Image, int]:
    """Return the segment before the operation, and half the operation's number of instructions."""
    image = scene.prepare()
    with begun(scene.act, {NAME: image}, NAME) as (child, steps):
        count = sum(1 for _ in steps)
        child.finish()
    os.unlink(path())  # noqa: PTH108
    return image, count // 2


def middle(scene: Scene) -> int:
    """Leave the segment as it is before the operation; return half the number of instructions."""
    image, step = _middle(scene)
    image.write(path())
    return step


@contextmanager
def stopped_half_way(scene: Scene) -> Iterator[Traced]:
    """Stop a process in the middle of the scene's operation; it owns the lock."""
    with stopped(scene.act, middle(scene)) as owner:
        assert inspection.describe(NAME).lock.held
        yield owner


def add(pipe: Pipe) -> None:
    acc: Any = shmacc.attach(NAME)
    with acc:
        pipe.say()
        assert acc.apply_grad(*THIRD, local_step=NEVER_STALE)


def take(number: int, pipe: Pipe) -> Any:
    """Take `number` gradients; wait for them up to LONG seconds."""
    acc: Any = shmacc.attach(NAME)
    with acc:
        pipe.say()
        return acc.take(number, timeout=LONG)


def take_in_vain(number: int, timeout: float, pipe: Pipe) -> None:
    """Take without success, and check that the take ends soon after its timeout."""
    acc: Any = shmacc.attach(NAME)
    with acc:
        pipe.say()
        began, start = time.monotonic(), slept()
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(number, timeout=timeout)
        assert timeout <= time.monotonic() - began
        assert slept() - start < timeout + SOON


@contextmanager
def others(*functions: tuple[Any, ...]) -> Iterator[list[Apart]]:
    with ExitStack() as stack:
        processes = [stack.enter_context(Apart(*function)) for function in functions]
        for process in processes:
            process.hear()
        yield processes


@contextmanager
def queued(*functions: tuple[Any, ...]) -> Iterator[list[Apart]]:
    """Start processes that take, and wait until they are in the queue in this order."""
    with ExitStack() as stack:
        processes: list[Apart] = []
        for function in functions:
            processes += stack.enter_context(others(function))
            until(lambda: sleeps_in(NAME, processes[-1].pid, "waits in the queue"))  # noqa: B023
        yield processes


def whole(*gradients: tuple[Array, Array]) -> Array:
    sums = np.zeros((64, 64))
    for indices, values in gradients:
        np.add.at(sums, indices, values)
    return sums


def taken(*takes: Any) -> Array:
    return whole(*((take.indices, take.values) for take in takes if take.count))


def what_is_left() -> Any:
    acc: Any = shmacc.attach(NAME)
    with acc:
        left = acc.take_partial(0, timeout=0)
        acc.unlink()
    return left
