"""A process that is killed while it makes room for more rows leaves the rows that there were."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_lines import at_every_line
from helpers.killing_scenes import Record, Scene, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

from shmacc import NEVER_STALE

pytestmark = pytest.mark.beyond_asan


def _another_round(acc: Any, *gradient: Any) -> None:
    acc.apply_grad(*gradient)
    acc.take(1)


def _another_round_and_some(acc: Any) -> None:
    _another_round(acc, *rows(*range(8)))
    acc.apply_grad(*rows(1, 2), local_step=1)


def _many_rows_and_then_few(acc: Any) -> None:
    acc.apply_grad(*rows(*range(300), width=64))
    for step in range(8):  # after so many small rounds in a row memory is given back
        acc.take(1)
        acc.apply_grad(*rows(4, 1, width=64), local_step=step + 1)
    acc.take(1)


GIVING_BACK: Final = Scene(
    "no room, but memory of a larger round is given back",
    "float64",
    64,
    before=_many_rows_and_then_few,
    operation=lambda acc: acc.apply_grad(*rows(2, 1, width=64), local_step=9),
    more=(2, 5, 6),
)

SCENES: Final = [
    Scene(
        # Buckets have ten places each, and few of these rows are in two gradients.
        "the index, while old rows are added to",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(*range(8))),
        operation=lambda acc: acc.apply_grad(*rows(*range(5, 25))),
        more=(0, 6, 20, 40),
    ),
    Scene(
        "the index, after a round that left entries in it",
        "float32",
        3,
        before=_another_round_and_some,
        operation=lambda acc: acc.apply_grad(*rows(*range(25)), local_step=1),
        more=(0, 6, 20, 40),
    ),
    Scene(
        # Room is made by 64 KiB at least, which are 128 of these rows.
        "the rows",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(130), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(128, 138), width=64)),
        more=(0, 130, 135),
    ),
    Scene(
        # The first gradient needs no undo log, the second one all at once.
        "the undo log",
        "float32",
        8,
        before=lambda acc: acc.apply_grad(*rows(3, 4, 5, 6, width=8)),
        operation=lambda acc: acc.apply_grad(*rows(4, 6, width=8)),
        more=(3, 4),
    ),
    Scene(
        "a round of another shape",
        "float32",
        5,
        before=lambda acc: _another_round(acc, *rows(*range(5), width=2)),
        operation=lambda acc: acc.apply_grad(*rows(1, 7, width=5), local_step=1),
        more=(1, 2),
    ),
    Scene(
        "dense: a round of another shape",
        "float32",
        0,
        before=lambda acc: _another_round(acc, [1.0, 2.0]),
        operation=lambda acc: acc.apply_grad(np.arange(1000), NEVER_STALE),
    ),
    GIVING_BACK,
]


@pytest.mark.parametrize("scene", SCENES[:1], ids=str)
def test_at_every_line(scene: Scene, record_property: Record) -> None:
    at_every_line(scene, record_property)


@needs_ptrace
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: Scene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)


def test_memory_is_given_back_in_that_scene() -> None:
    before, after = GIVING_BACK.prepare(), GIVING_BACK.perform()
    assert sum(length for _, length in after.occupied) < sum(
        length for _, length in before.occupied
    )
