"""A process killed while it sets the step has done all that belongs to that, or nothing."""

from __future__ import annotations

from typing import Any, Final

import pytest
from helpers.killing_lines import at_every_line
from helpers.killing_scenes import Record, Scene, array, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

pytestmark = pytest.mark.beyond_asan


def _seal(acc: Any) -> None:
    acc.apply_grad(*rows(1, 2))
    acc.take_partial(1, seal=True)


SCENES: Final = [
    Scene(
        "set_global_step",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(1, 2)),
        operation=lambda acc: acc.set_global_step(5),
        more=(2, 3),
    ),
    Scene(
        "advance_step, which drops the round",
        "float32",
        3,
        before=lambda acc: (acc.apply_grad(*rows(1, 2)), acc.apply_grad(*rows(2, 7))),
        operation=lambda acc: acc.advance_step(5),
        more=(2, 3),
    ),
    Scene(
        "dense: advance_step, which drops the round",
        "float64",
        0,
        before=lambda acc: acc.apply_grad(array()),
        operation=lambda acc: acc.advance_step(5),
    ),
    Scene(
        "unseal",
        "float32",
        3,
        before=_seal,
        operation=lambda acc: acc.unseal(),
        more=(2, 3),
    ),
]


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_line(scene: Scene, record_property: Record) -> None:
    at_every_line(scene, record_property)


@needs_ptrace
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: Scene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)
