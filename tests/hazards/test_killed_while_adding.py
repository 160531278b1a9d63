"""A process that is killed while it adds a gradient has added it wholly, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_lines import at_every_line
from helpers.killing_scenes import Record, Scene, array, leave_new, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

from shmacc import NEVER_STALE, errors

pytestmark = pytest.mark.beyond_asan


def _overflow(acc: Any, *gradient: Any) -> None:
    with pytest.raises(errors.OutOfRangeError):
        acc.apply_grad(*gradient)


PARTIAL: Final = SimpleNamespace(
    indices=[9, 2, 1],
    values=np.arange(9, dtype=np.float32).reshape(3, 3),
    shape=[-1, 3],
    row_counts=[3, 1, 2],
    count=3,
)

SCENES: Final = [
    Scene(
        "first touch",
        "float32",
        3,
        before=leave_new,
        operation=lambda acc: acc.apply_grad(*rows(5, 2, 9, 2)),
        more=(2, 5, 6),
    ),
    Scene(
        "in place, in several batches",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(20), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(20), width=64, seed=1)),
        more=(0, 7, 19, 30),
    ),
    Scene(
        "old and new rows, in any order",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(0, 40, 2), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(19, 0, -1), 7, width=64)),
        more=(0, 7, 8, 30),
    ),
    Scene(
        "complex numbers",
        "complex64",
        2,
        before=lambda acc: acc.apply_grad(*rows(3, 4, width=2)),
        operation=lambda acc: acc.apply_grad(*rows(5, 4, 3, width=2)),
        more=(4, 5),
    ),
    Scene(
        "no rows at all",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(3, 4)),
        operation=lambda acc: acc.apply_grad(*rows()),
        more=(4,),
    ),
    Scene(
        "a partial",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(1, 2, 3)),
        operation=lambda acc: acc.apply_partial(PARTIAL),
        more=(1, 9),
    ),
    Scene(
        "a stale gradient",
        "float32",
        3,
        before=lambda acc: (acc.apply_grad(*rows(1, 2, 3)), acc.set_global_step(7)),
        operation=lambda acc: acc.apply_grad(*rows(3, 4), local_step=6),
        more=(1, 4),
    ),
    Scene(
        "a sum that overflows half-way",
        "int64",
        2,
        before=lambda acc: acc.apply_grad([1, 2, 3, 4], np.full((4, 2), 2**62)),
        operation=lambda acc: _overflow(acc, [0, 1, 3, 5], [[1, 1], [2, 2], [3, 2**62], [4, 4]]),
        more=(3, 5, 6),
    ),
    Scene(
        "dense: the first",
        "float32",
        0,
        before=leave_new,
        operation=lambda acc: acc.apply_grad(array()),
    ),
    Scene(
        "dense: another",
        "float64",
        0,
        before=lambda acc: acc.apply_grad(array()),
        operation=lambda acc: acc.apply_grad(array(seed=5), NEVER_STALE),
    ),
]


# The lines of Python are the same for the others.
OTHER_LINES: Final = {
    "first touch",
    "old and new rows, in any order",
    "a partial",
    "dense: another",
}
BY_LINE: Final = [scene for scene in SCENES if scene.name in OTHER_LINES]


@pytest.mark.parametrize("scene", BY_LINE, ids=str)
def test_at_every_line(scene: Scene, record_property: Record) -> None:
    at_every_line(scene, record_property)


@needs_ptrace
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: Scene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)
