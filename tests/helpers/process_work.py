"""Work of the process tests' children: functions that every start method can import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

if TYPE_CHECKING:
    from helpers.apart import Pipe
    from helpers.numpy_model import Array

# Rows that all gradients share. After them each gradient has one row of its own.
SHARED: Final = 50
WIDTH: Final = 3


def gradient(worker: int, number: int, each: int) -> tuple[Array, Array]:
    """Make a gradient of whole numbers, which any process can make again.

    Its rows below ``SHARED`` overlap with everybody's and repeat; its last row is its own identity.
    """
    rng = np.random.default_rng([worker, number])
    shared = rng.integers(0, SHARED, size=rng.integers(1, 12))
    indices = np.append(shared, SHARED + worker * each + number)
    values = rng.integers(-8, 9, size=(len(indices), WIDTH)).astype(np.float32)
    values[-1] = 1
    return indices, values


def attached(name: str) -> Any:
    """Attach to an accumulator of any kind; typed as Any, since the kind is not known."""
    return shmacc.attach(name)


def apply_all(name: str, worker: int, each: int) -> list[bool]:
    """Apply ``each`` gradients; return which were accepted."""
    with attached(name) as acc:
        gradients = (gradient(worker, number, each) for number in range(each))
        return [acc.apply_grad(*one, local_step=shmacc.NEVER_STALE) for one in gradients]


def apply_one(acc: Any, value: float, step: int = 0) -> bool:
    """Apply one scalar through a handle."""
    with acc:
        return bool(acc.apply_grad(value, step))


def open_and_apply(name: str, value: float) -> bool:
    """Create or attach, whoever comes first, and apply one scalar."""
    with ConditionalAccumulator(np.float64, (), name, reduction_type="SUM") as acc:
        return acc.apply_grad(value)


def open_otherwise(name: str) -> None:
    """Open a dense accumulator's name as a sparse one."""
    SparseConditionalAccumulator(np.float64, (), name).close()


def take_one(name: str, num_required: int, timeout: float) -> tuple[float, int, int]:
    """Wait in the queue once."""
    with attached(name) as acc:
        taken = acc.take(num_required, timeout=timeout)
        return taken.value.item(), taken.count, taken.step


def follow_steps(name: str, steps: int, timeout: float) -> list[int]:
    """Follow the chief as a worker does: one gradient a step."""
    seen = [-1]
    with attached(name) as acc:
        for _ in range(steps):
            seen.append(acc.wait_step(seen[-1], timeout=timeout))
            acc.apply_grad(1.0, local_step=seen[-1])
    return seen[1:]


def say_and_take(name: str, number: int, *, pipe: Pipe) -> int:
    """Say that it is about to take, and take; return how many gradients there were."""
    with shmacc.attach(name) as acc:
        pipe.say()
        return acc.take(number, timeout=LONG).count
