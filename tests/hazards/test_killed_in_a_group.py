"""A group's operation that a death cuts short is done in all members, or in none.

At every instruction between the taking of the lock and the letting go of it; and whoever comes upon
what is left recovers it, and can go on with every member.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_scenes import GroupScene, Record, leave_new
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

from shmacc import AccumulatorGroup, IndexedSlicesSpec, TensorSpec, errors

pytestmark = pytest.mark.beyond_asan

OF: Final = GroupScene("", "float64", 3, leave_new, leave_new)


def _begun(acc: Any) -> bool:
    return bool(acc.apply(OF.gradient(1, 2, 3), 0, contributor=2))


def _overflow(acc: Any) -> None:
    gradient = OF.gradient(1, 2, 9, seed=5)
    gradient["wide"] = ([1, 9], np.full((2, 40), 2**62))
    with pytest.raises(errors.OutOfRangeError, match="'wide'"):
        acc.apply(gradient, 0)


def _partial() -> Any:
    specs = {
        "rows": IndexedSlicesSpec((None, 3), "float64"),
        "wide": IndexedSlicesSpec((None, 40), "float64"),
        "array": TensorSpec(None, "float64"),
    }
    with AccumulatorGroup(specs) as group:
        group.apply(OF.gradient(3, 4), 0, contributor=7)
        group.apply(OF.gradient(2, 9, seed=3), 0, contributor=6, weight=5)
        return group.take_partial(2)


def _again(acc: Any) -> None:
    assert acc.apply(OF.gradient(5, 6), 0, contributor=2)


_PARTIAL: Final = _partial()

SCENES: Final = [
    GroupScene(
        "first touch of all members",
        "float64",
        3,
        before=leave_new,
        operation=lambda acc: acc.apply(OF.gradient(5, 2), 0, contributor=4, weight=2),
        more=(2, 6),
    ),
    GroupScene(
        "old and new rows of all members",
        "float64",
        3,
        before=_begun,
        operation=lambda acc: acc.apply(OF.gradient(1, 2, 3, 4, seed=3), 0, contributor=4),
        more=(2, 4, 9),
    ),
    GroupScene(
        "some members, of a later round",
        "float32",
        3,
        before=lambda acc: (_begun(acc), acc.take(1), acc.apply(OF.gradient(3), 1)),
        operation=lambda acc: acc.apply({"wide": OF.gradient(1, 3)["wide"]}, 1),
        more=(1, 3),
    ),
    GroupScene(
        "no member",
        "float64",
        3,
        before=_begun,
        operation=lambda acc: acc.apply({}, 0, contributor=3),
        more=(1, 2),
    ),
    GroupScene(
        "a contributor that is in already",
        "float64",
        3,
        before=_begun,
        operation=_again,
        more=(1, 2),
    ),
    GroupScene(
        "a sum that overflows in the second member",
        "int64",
        3,
        before=lambda acc: acc.apply(
            OF.gradient(1, 2) | {"wide": ([1, 2], np.full((2, 40), 2**62))}, 0
        ),
        operation=_overflow,
        more=(2, 9),
    ),
    GroupScene(
        "a partial with contributors, into one of two lanes",
        "float64",
        3,
        before=lambda acc: acc.apply(OF.gradient(2, 3), 0, contributor=2),
        operation=lambda acc: acc.apply_partial(_PARTIAL),
        more=(2, 4),
        lanes=2,
    ),
    GroupScene(
        "a take of all members",
        "float64",
        3,
        before=lambda acc: (_begun(acc), acc.apply({"array": np.ones(100)}, 0)),
        operation=lambda acc: acc.take(2, timeout=0),
        more=(1, 9),
    ),
    GroupScene(
        "a new step with two lanes",
        "float64",
        3,
        before=lambda acc: (_begun(acc), acc.apply(OF.gradient(2, 8), 0, contributor=1)),
        operation=lambda acc: acc.advance_step(4),
        more=(1, 8),
        lanes=2,
    ),
]


@needs_ptrace
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: GroupScene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)
