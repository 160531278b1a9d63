"""A process killed at any instruction of an operation has done all of it, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_scenes import GroupScene, Record, Scene, array, leave_new, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import at_every_instruction

from shmacc import NEVER_STALE, errors

pytestmark = pytest.mark.beyond_asan

MANY: Final = tuple(range(300))  # need more memory than is ever left to a later round for nothing
SMALL_ROUNDS: Final = 8  # after so many in a row memory is given back


def _add_too_much(acc: Any, *gradient: Any) -> None:
    with pytest.raises(errors.OutOfRangeError):
        acc.apply_grad(*gradient)


def _add_twice(acc: Any) -> None:
    acc.apply_grad(*rows(5, 2, 9))
    acc.apply_grad(*rows(5, 3))


def _take_too_much(acc: Any) -> None:
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


def _seal(acc: Any) -> None:
    acc.apply_grad(*rows(1, 2))
    acc.take_partial(1, seal=True)


PARTIAL: Final = SimpleNamespace(
    indices=[9, 2, 1],
    values=np.arange(9, dtype=np.float32).reshape(3, 3),
    shape=[-1, 3],
    row_counts=[3, 1, 2],
    count=3,
)

GIVING_BACK: Final = [
    GroupScene(
        "taking: memory of a larger round given back",
        "float64",
        64,
        before=_one_member_is_idle,
        operation=lambda acc: acc.take(1, timeout=0),
        more=(2, 5, 6),
    ),
    Scene(
        "making room: no room, but memory of a larger round is given back",
        "float64",
        64,
        before=_many_rows_and_then_few,
        operation=lambda acc: acc.apply_grad(*rows(2, 1, width=64), local_step=9),
        more=(2, 5, 6),
    ),
]

SCENES: Final = [
    *GIVING_BACK,
    Scene(
        "adding: first touch",
        "float32",
        3,
        before=leave_new,
        operation=lambda acc: acc.apply_grad(*rows(5, 2, 9, 2)),
        more=(2, 5, 6),
    ),
    Scene(
        "adding: in place, in several batches",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(20), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(20), width=64, seed=1)),
        more=(0, 7, 19, 30),
    ),
    # The journal still counts the rows that the last gradient saved.
    Scene(
        "adding: in place, after another in place",
        "float32",
        3,
        before=lambda acc: (acc.apply_grad(*rows(1, 5, 8)), acc.apply_grad(*rows(1, 5, 8, seed=1))),
        operation=lambda acc: acc.apply_grad(*rows(5, 9, seed=2)),
        more=(1, 5),
    ),
    Scene(
        "adding: old and new rows, in any order",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(0, 40, 2), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(19, 0, -1), 7, width=64)),
        more=(0, 7, 8, 30),
    ),
    Scene(
        "adding: complex numbers",
        "complex64",
        2,
        before=lambda acc: acc.apply_grad(*rows(3, 4, width=2)),
        operation=lambda acc: acc.apply_grad(*rows(5, 4, 3, width=2)),
        more=(4, 5),
    ),
    Scene(
        "adding: no rows at all",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(3, 4)),
        operation=lambda acc: acc.apply_grad(*rows()),
        more=(4,),
    ),
    Scene(
        "adding: a partial",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(1, 2, 3)),
        operation=lambda acc: acc.apply_partial(PARTIAL),
        more=(1, 9),
    ),
    Scene(
        "adding: a stale gradient",
        "float32",
        3,
        before=lambda acc: (acc.apply_grad(*rows(1, 2, 3)), acc.set_global_step(7)),
        operation=lambda acc: acc.apply_grad(*rows(3, 4), local_step=6),
        more=(1, 4),
    ),
    Scene(
        "adding: a sum that overflows half-way",
        "int64",
        2,
        before=lambda acc: acc.apply_grad([1, 2, 3, 4], np.full((4, 2), 2**62)),
        operation=lambda acc: _add_too_much(
            acc, [0, 1, 3, 5], [[1, 1], [2, 2], [3, 2**62], [4, 4]]
        ),
        more=(3, 5, 6),
    ),
    Scene(
        "adding: dense: the first",
        "float32",
        0,
        before=leave_new,
        operation=lambda acc: acc.apply_grad(array()),
    ),
    Scene(
        "adding: dense: another",
        "float64",
        0,
        before=lambda acc: acc.apply_grad(array()),
        operation=lambda acc: acc.apply_grad(array(seed=5), NEVER_STALE),
    ),
    Scene(
        "taking: sparse",
        "float32",
        3,
        before=_add_twice,
        operation=lambda acc: acc.take(2, timeout=0),
        more=(2, 5, 6),
    ),
    Scene(
        "taking: the end of a round",
        "float32",
        3,
        before=_add_twice,
        begin=_enter,
        operation=_leave,
        more=(2, 5, 6),
    ),
    Scene(
        "taking: the beginning of a round",
        "float32",
        3,
        before=_add_twice,
        operation=_give_up,
        more=(2, 5, 6),
    ),
    Scene(
        "taking: a partial, with a seal",
        "float32",
        3,
        before=_add_twice,
        operation=lambda acc: acc.take_partial(2, timeout=0, seal=True),
        more=(2, 5, 6),
    ),
    Scene(
        "taking: a partial of nothing",
        "float32",
        3,
        before=leave_new,
        operation=lambda acc: acc.take_partial(0, timeout=0),
        more=(2, 5),
    ),
    Scene(
        "taking: dense",
        "float64",
        0,
        before=lambda acc: (acc.apply_grad(array()), acc.apply_grad(array(3))),
        operation=lambda acc: acc.take(2, timeout=0),
    ),
    Scene(
        "taking: a result that does not fit",
        "int32",
        2,
        before=lambda acc: [acc.apply_grad([1, 2], [[1, 1], [2**31 - 1, 1]]) for _ in range(2)],
        operation=_take_too_much,
        more=(1, 3),
    ),
    Scene(
        # Buckets have ten places each, and few of these rows are in two gradients.
        "making room: the index, while old rows are added to",
        "float32",
        3,
        before=lambda acc: acc.apply_grad(*rows(*range(8))),
        operation=lambda acc: acc.apply_grad(*rows(*range(5, 25))),
        more=(0, 6, 20, 40),
    ),
    Scene(
        "making room: the index, after a round that left entries in it",
        "float32",
        3,
        before=_another_round_and_some,
        operation=lambda acc: acc.apply_grad(*rows(*range(25)), local_step=1),
        more=(0, 6, 20, 40),
    ),
    Scene(
        # Room is made by 64 KiB at least, which are 128 of these rows.
        "making room: the rows",
        "float64",
        64,
        before=lambda acc: acc.apply_grad(*rows(*range(130), width=64)),
        operation=lambda acc: acc.apply_grad(*rows(*range(128, 138), width=64)),
        more=(0, 130, 135),
    ),
    Scene(
        # The first gradient needs no undo log, the second one all at once.
        "making room: the undo log",
        "float32",
        8,
        before=lambda acc: acc.apply_grad(*rows(3, 4, 5, 6, width=8)),
        operation=lambda acc: acc.apply_grad(*rows(4, 6, width=8)),
        more=(3, 4),
    ),
    Scene(
        "making room: a round of another shape",
        "float32",
        5,
        before=lambda acc: _another_round(acc, *rows(*range(5), width=2)),
        operation=lambda acc: acc.apply_grad(*rows(1, 7, width=5), local_step=1),
        more=(1, 2),
    ),
    Scene(
        "making room: dense: a round of another shape",
        "float32",
        0,
        before=lambda acc: _another_round(acc, [1.0, 2.0]),
        operation=lambda acc: acc.apply_grad(np.arange(1000), NEVER_STALE),
    ),
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


@needs_ptrace
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: Scene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)


@pytest.mark.parametrize("scene", GIVING_BACK, ids=str)
def test_memory_is_given_back_in_that_scene(scene: Scene) -> None:
    before, after = scene.prepare(), scene.perform()
    assert sum(length for _, length in after.occupied) < sum(
        length for _, length in before.occupied
    )
