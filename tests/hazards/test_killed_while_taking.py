"""A process that is killed while it takes a round has taken all of it, or none."""

from __future__ import annotations

from typing import Any, Final

import pytest
from helpers.killing_lines import at_every_line
from helpers.killing_scenes import GroupScene, Record, Scene, array, leave_new, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

from shmacc import errors

pytestmark = pytest.mark.beyond_asan

MANY: Final = tuple(range(300))  # need more memory than is ever left to a later round for nothing
SMALL_ROUNDS: Final = 8  # after so many in a row memory is given back


def _add_twice(acc: Any) -> None:
    acc.apply_grad(*rows(5, 2, 9))
    acc.apply_grad(*rows(5, 3))


def _overflow(acc: Any) -> None:
    with pytest.raises(errors.OutOfRangeError):
        acc.take(1, timeout=0)


def _enter(acc: Any) -> Any:
    block = acc.round(2, timeout=0)
    block.__enter__()
    return block


def _leave(block: Any) -> None:
    block.__exit__(None, None, None)


def _give_up(acc: Any) -> None:
    with pytest.raises(ZeroDivisionError), acc.round(2, timeout=0):
        raise ZeroDivisionError


def _one_member_is_idle(acc: Any) -> None:
    acc.apply({"rows": rows(*MANY, width=64)}, 0)
    # A take looks for idle members in one of so many rounds.
    for step in range(2 * SMALL_ROUNDS - 1):
        acc.take(1)
        acc.apply({"array": array()[:100]}, step + 1)


GIVING_BACK: Final = GroupScene(
    "memory of a larger round given back",
    "float64",
    64,
    before=_one_member_is_idle,
    operation=lambda acc: acc.take(1, timeout=0),
    more=(2, 5, 6),
)

SCENES: Final = [
    Scene(
        "sparse",
        "float32",
        3,
        before=_add_twice,
        operation=lambda acc: acc.take(2, timeout=0),
        more=(2, 5, 6),
    ),
    Scene(
        "the end of a round",
        "float32",
        3,
        before=_add_twice,
        begin=_enter,
        operation=_leave,
        more=(2, 5, 6),
    ),
    Scene(
        "the beginning of a round",
        "float32",
        3,
        before=_add_twice,
        operation=_give_up,
        more=(2, 5, 6),
    ),
    Scene(
        "a partial, with a seal",
        "float32",
        3,
        before=_add_twice,
        operation=lambda acc: acc.take_partial(2, timeout=0, seal=True),
        more=(2, 5, 6),
    ),
    Scene(
        "a partial of nothing",
        "float32",
        3,
        before=leave_new,
        operation=lambda acc: acc.take_partial(0, timeout=0),
        more=(2, 5),
    ),
    Scene(
        "dense",
        "float64",
        0,
        before=lambda acc: (acc.apply_grad(array()), acc.apply_grad(array(3))),
        operation=lambda acc: acc.take(2, timeout=0),
    ),
    GIVING_BACK,
    Scene(
        "a result that does not fit",
        "int32",
        2,
        before=lambda acc: [acc.apply_grad([1, 2], [[1, 1], [2**31 - 1, 1]]) for _ in range(2)],
        operation=_overflow,
        more=(1, 3),
    ),
]


# The lines of Python are the same for the others.
@pytest.mark.parametrize("scene", SCENES[:4], ids=str)
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
