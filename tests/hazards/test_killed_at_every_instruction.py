"""A process killed at any instruction of an operation has done all of it, or nothing.

In a group that means in all members, or in none.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_deeds import SCENE as ONE_MORE
from helpers.killing_scenes import NAME, GroupScene, Record, Scene, array, leave_new, path, rows
from helpers.stepping_tracer import Mark, needs_ptrace
from helpers.stepping_walk import at_every_instruction, judge, walk
from helpers.support import EVERY_INSTANT

import shmacc
from shmacc import NEVER_STALE, AccumulatorGroup, _core, errors
from shmacc._base import names

pytestmark = pytest.mark.beyond_asan

MANY: Final = tuple(range(300))  # rows; they need more memory than a later round may keep unused
SMALL_ROUNDS: Final = 8  # after this many small rounds in a row, memory is given back
OF: Final = GroupScene("", "float64", 3, leave_new, leave_new)
FULL: Final = 2**62
# A dtype, and the numbers in each row (0: dense).
F0, F3, D0, D3, D64 = (
    ("float32", 0), ("float32", 3), ("float64", 0), ("float64", 3), ("float64", 64),
)  # fmt: skip


def applies(*indices: int, width: int = 3, seed: int = 0, step: int = 0) -> Callable[[Any], object]:
    return lambda acc: acc.apply_grad(*rows(*indices, width=width, seed=seed), local_step=step)


def applies_all(*indices: int, seed: int = 0, **more: Any) -> Callable[[Any], object]:
    """Return a function that applies these rows to all members."""
    return lambda acc: acc.apply(OF.gradient(*indices, seed=seed), 0, **more)


def after(*operations: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a function that makes all the calls in turn."""
    return lambda acc: [operation(acc) for operation in operations]


def takes(number: int = 1) -> Callable[[Any], object]:
    return lambda acc: acc.take(number, timeout=0)


def _overflow(acc: Any) -> None:
    gradient = OF.gradient(1, 2, 9, seed=5) | {"wide": ([1, 9], np.full((2, 40), FULL))}
    with pytest.raises(errors.OutOfRangeError, match="'wide'"):
        acc.apply(gradient, 0)


ADD_TWICE: Final = after(applies(5, 2, 9), applies(5, 3))


def _enter(acc: Any) -> Any:
    block = acc.round(2, timeout=0)
    block.__enter__()
    return block


def _give_up(acc: Any) -> None:
    with pytest.raises(ZeroDivisionError), acc.round(2, timeout=0):
        raise ZeroDivisionError


def _one_member_is_idle(acc: Any) -> None:
    acc.apply({"rows": rows(*MANY, width=64)}, 0)
    # A take looks for idle members only once in SMALL_ROUNDS rounds.
    for step in range(2 * SMALL_ROUNDS - 1):
        acc.take(1)
        acc.apply({"array": array()[:100]}, step + 1)


def _many_rows_and_then_few(acc: Any) -> None:
    acc.apply_grad(*rows(*MANY, width=64))
    for step in range(SMALL_ROUNDS):
        acc.take(1)
        acc.apply_grad(*rows(4, 1, width=64), local_step=step + 1)
    acc.take(1)


def _partial() -> Any:
    with AccumulatorGroup(OF.specs()) as group:
        group.apply(OF.gradient(3, 4), 0, contributor=7)
        group.apply(OF.gradient(2, 9, seed=3), 0, contributor=6, weight=5)
        return group.take_partial(2)


PARTIAL: Final = SimpleNamespace(
    indices=[9, 2, 1],
    values=np.arange(9, dtype=np.float32).reshape(3, 3),
    shape=[-1, 3],
    row_counts=[3, 1, 2],
    count=3,
)
OF_A_GROUP: Final = _partial()

GIVING_BACK: Final = [
    GroupScene("taking: memory of a larger round given back", *D64, _one_member_is_idle, takes(),
        (2, 5, 6)),
    Scene("making room: no room, but memory of a larger round is given back", *D64,
        _many_rows_and_then_few, applies(2, 1, width=64, step=9), (2, 5, 6)),
]  # fmt: skip

SCENES: Final = [
    *GIVING_BACK,
    Scene("adding: first touch", *F3, leave_new, applies(5, 2, 9, 2), (2, 5, 6)),
    Scene("adding: in place, in several batches", *D64, applies(*range(20), width=64),
        applies(*range(20), width=64, seed=1), (0, 7, 19, 30)),
    # The journal still counts the rows that the last gradient saved.
    Scene("adding: in place, after another in place", *F3,
        after(applies(1, 5, 8), applies(1, 5, 8, seed=1)), applies(5, 9, seed=2), (1, 5)),
    Scene("adding: old and new rows, in any order", *D64, applies(*range(0, 40, 2), width=64),
        applies(*range(19, 0, -1), 7, width=64), (0, 7, 8, 30)),
    Scene("adding: no rows at all", "complex64", 2, applies(3, 4, width=2), applies(width=2), (4,)),
    Scene("adding: a partial", *F3, applies(1, 2, 3), lambda acc: acc.apply_partial(PARTIAL),
        (1, 9)),
    Scene("adding: a stale gradient", *F3,
        after(applies(1, 2, 3), lambda acc: acc.set_global_step(7)), applies(3, 4, step=6), (1, 4)),
    Scene("adding: dense", *F0, leave_new, lambda acc: acc.apply_grad(array())),
    Scene("adding: dense: another", *D0, lambda acc: acc.apply_grad(array()),
        lambda acc: acc.apply_grad(array(seed=5), NEVER_STALE)),
    Scene("taking: sparse", *F3, ADD_TWICE, takes(2), (2, 5, 6)),
    Scene("taking: the end of a round", *F3, ADD_TWICE,
        lambda block: block.__exit__(None, None, None), (2, 5, 6), begin=_enter),
    Scene("taking: the beginning of a round", *F3, ADD_TWICE, _give_up, (2, 5, 6)),
    Scene("taking: a partial, with a seal", *F3, ADD_TWICE,
        lambda acc: acc.take_partial(2, timeout=0, seal=True), (2, 5, 6)),
    Scene("taking: a partial of nothing", *F3, leave_new,
        lambda acc: acc.take_partial(0, timeout=0), (2, 5)),
    Scene("taking: dense", *D0, lambda acc: (acc.apply_grad(array()), acc.apply_grad(array(3))),
        takes(2)),
    # Buckets have ten places each, and few of these rows are in two gradients.
    Scene("making room: the index, while old rows are added to", *F3, applies(*range(8)),
        applies(*range(5, 25)), (0, 6, 20, 40)),
    Scene("making room: the index, after a round that left entries in it", *F3,
        after(applies(*range(8)), takes(), applies(1, 2, step=1)), applies(*range(25), step=1),
        (0, 6, 20, 40)),
    # Memory grows by at least 64 KiB, which is 128 of these rows.
    Scene("making room: the rows", *D64, applies(*range(130), width=64),
        applies(*range(128, 138), width=64), (0, 130, 135)),
    # The first gradient needs no undo log; the second one needs all of it at once.
    Scene("making room: the undo log", "float32", 8, applies(3, 4, 5, 6, width=8),
        applies(4, 6, width=8), (3, 4)),
    Scene("making room: a round of another shape", "float32", 5,
        after(applies(*range(5), width=2), takes()), applies(1, 7, width=5, step=1), (1, 2)),
    Scene("making room: dense: a round of another shape", *F0,
        after(lambda acc: acc.apply_grad([1.0, 2.0]), takes()),
        lambda acc: acc.apply_grad(np.arange(1000), NEVER_STALE)),
    Scene("set_global_step", *F3, applies(1, 2), lambda acc: acc.set_global_step(5), (2, 3)),
    Scene("advance_step, which drops the round", *F3, after(applies(1, 2), applies(2, 7)),
        lambda acc: acc.advance_step(5), (2, 3)),
    Scene("unseal", *F3, after(applies(1, 2), lambda acc: acc.take_partial(1, seal=True)),
        lambda acc: acc.unseal(), (2, 3)),
    GroupScene("group: first touch", *D3, leave_new, applies_all(5, 2, contributor=4, weight=2),
        (2, 6)),
    GroupScene("group: old and new rows", *D3, applies_all(1, 2, 3, contributor=2),
        applies_all(1, 2, 3, 4, seed=3, contributor=4), (2, 4, 9)),
    GroupScene("group: one member, in a later round", *F3,
        after(applies_all(1, 2, 3), takes(), lambda acc: acc.apply(OF.gradient(3), 1)),
        lambda acc: acc.apply({"wide": OF.gradient(1, 3)["wide"]}, 1), (1, 3)),
    GroupScene("group: no member", *D3, applies_all(1, 2, 3, contributor=2),
        lambda acc: acc.apply({}, 0, contributor=3), (1, 2)),
    GroupScene("group: a contributor that is in already", *D3, applies_all(1, 2, 3, contributor=2),
        applies_all(5, 6, contributor=2), (1, 2)),
    GroupScene("group: a partial with contributors, into one of two lanes", *D3,
        applies_all(2, 3, contributor=2), lambda acc: acc.apply_partial(OF_A_GROUP), (2, 4),
        lanes=2),
    GroupScene("group: a take", *D3,
        after(applies_all(1, 2, 3), lambda acc: acc.apply({"array": np.ones(100)}, 0)), takes(2),
        (1, 9)),
    GroupScene("group: a new step with two lanes", *D3,
        after(applies_all(1, 2, 3, contributor=2), applies_all(2, 8, contributor=1)),
        lambda acc: acc.advance_step(4), (1, 8), lanes=2),
]  # fmt: skip


# Only SHMACC_EVERY_INSTANT runs this scene: test_killed_while_restoring.py tests the undo code, and
# a C++ exception takes more instructions than all other scenes together.
OVERFLOWING: Final = GroupScene(
    "group: a sum that overflows in the second member",
    "int64",
    3,
    lambda acc: acc.apply(OF.gradient(1, 2) | {"wide": ([1, 2], np.full((2, 40), FULL))}, 0),
    _overflow,
    (2, 9),
)


@needs_ptrace
@pytest.mark.parametrize("scene", [*SCENES, *[OVERFLOWING] * EVERY_INSTANT], ids=str)
def test_a_kill_at_any_instruction_is_all_or_nothing(scene: Scene, record_property: Record) -> None:
    at_every_instruction(scene, record_property)


def claim_a_place(mark: Mark) -> None:
    """Attach, by the extension's calls only."""
    handle: Any = _core.open(path(), None)[2]
    semaphore = names.semaphore_path(os.path.basename(path()), handle.config()["token"])  # noqa: PTH119
    mark()
    handle.enter(path(), semaphore)
    mark()
    handle.close()


def close_handle(mark: Mark) -> None:
    """Close the handle, by the extension's call only."""
    acc: Any = shmacc.attach(NAME)
    mark()
    acc._handle.close()
    mark()


@needs_ptrace
@pytest.mark.parametrize("act", [claim_a_place, close_handle])
def test_a_kill_at_any_instruction_of_an_attach_or_close_harms_nobody(
    act: Callable[[Mark], None], record_property: Record
) -> None:
    image = ONE_MORE.prepare()
    looks = walk(act, {NAME: image}, {NAME: image})
    assert looks
    before = ONE_MORE.testimony(image)
    record_property("judged", judge(ONE_MORE, looks, before, before))


@pytest.mark.parametrize("scene", GIVING_BACK, ids=str)
def test_the_scenes_of_freed_memory_really_free_memory(scene: Scene) -> None:
    before, after = scene.prepare(), scene.perform()
    assert sum(length for _, length in after.occupied) < sum(
        length for _, length in before.occupied
    )
