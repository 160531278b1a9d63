"""A process killed while it restores a state has replaced everything, or nothing.

The old state stays whole until the commit, although restored rows overwrite it. A process may also
be killed while it undoes a dead process's half restore: then the next process finishes the undo.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe
from helpers.killing_scenes import NAME, GroupScene, Record, Scene, leave_new, path, rows
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Mark, needs_ptrace
from helpers.stepping_walk import at_every_instruction, judge, kill, walk

import shmacc
from shmacc import AccumulatorGroup, SparseConditionalAccumulator, inspection

pytestmark = [needs_ptrace, pytest.mark.beyond_asan]

OF: Final = GroupScene("", "float64", 3, leave_new, leave_new)
LOOKED_AT: Final = 20  # instants at which inspection is checked


def _group_state() -> Mapping[str, Any]:
    with AccumulatorGroup(OF.specs(), reduction_type="SUM") as group:
        group.set_global_step(3)
        group.apply(OF.gradient(3, 4), 3, contributor=7)
        group.apply(OF.gradient(2, 9, seed=3), 3, contributor=6, weight=5)
        return group.state()


def _state() -> Mapping[str, Any]:
    with SparseConditionalAccumulator("float64", None, reduction_type="SUM") as acc:
        acc.apply_grad(*rows(*range(3, 40), seed=3))
        acc.apply_grad(*rows(2, 9))
        return acc.state()


_GROUP_STATE, _STATE = _group_state(), _state()
SINGLE: Final = Scene(
    "over the rows of one lane",
    "float64",
    3,
    before=lambda acc: (acc.apply_grad(*rows(7, 2)), acc.apply_grad(*rows(*range(50, 20, -2)))),
    operation=lambda acc: acc.restore(_STATE),
    more=(1, 7, 30),
)
SCENES: Final = [
    SINGLE,
    GroupScene(
        "over what two lanes have of a group",
        "float64",
        3,
        before=lambda acc: (
            acc.apply(OF.gradient(1, 2, 3), 0, contributor=2),
            acc.apply(OF.gradient(2, 8), 0, contributor=1),
        ),
        operation=lambda acc: acc.restore(_GROUP_STATE),
        more=(1, 9),
        lanes=2,
    ),
    GroupScene(
        "over nothing of this round",
        "float64",
        3,
        before=lambda acc: (acc.apply(OF.gradient(1, 2, 3), 0), acc.take(1)),
        operation=lambda acc: acc.restore(_GROUP_STATE),
        more=(1, 9),
    ),
]


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_a_restore_killed_anywhere_is_all_or_nothing(scene: Scene, record_property: Record) -> None:
    looks = at_every_instruction(scene, record_property)
    if scene is not SINGLE:
        return
    # Inspection sees the old state or the new one.
    seen = []
    for look in [*looks[:: max(1, len(looks) // LOOKED_AT)], looks[-1]]:
        look.images[NAME].write(path())
        seen.append((inspection.most_touched(NAME, 99)[0], inspection.summarise_values(NAME)))
        Path(path()).unlink()
    before, after = seen[0], seen[-1]
    assert before != after
    assert seen.count(before) > LOOKED_AT // 2
    assert all(found in {before, after} for found in seen)
    SINGLE.testimony(looks[-1].images[NAME])  # this also removes the segment


def _ask_for_numbers(*, pipe: Pipe) -> None:
    """Attach, and report the step and the counters; again after a message."""
    with SparseConditionalAccumulator("float64", None, NAME, unlink_on_close=True) as acc:
        acc.set_global_step(3)
        acc.apply_grad(*rows(1, 2), local_step=3)
        for _ in range(2):
            pipe.turn((acc.global_step, acc.num_accumulated(), acc.stats().rows))


def test_readers_see_the_old_numbers_until_a_restore_commits() -> None:
    """The restoring process may be stopped for long between its two commits."""
    with Apart(_ask_for_numbers) as process:
        before = process.hear()
        assert before == (3, 1, 2)
        with SegmentFile(path()) as file:
            after = file.committed("round")
            after.generation += 1
            after.step, after.round = 9, after.round + 1
            after.needs = file.committed("lane").generation + 1
            file.put("round", after, after.generation & 1)
            word = file.record("generation")
            word.word = after.generation
            file.put("generation", word)
        assert process.turn(None) == before
        process.finish(None)


ADDING: Final = Scene(
    "adding to old rows and making new ones",
    "float64",
    24,
    before=lambda acc: acc.apply_grad(*rows(*range(0, 24, 2), width=24)),
    operation=lambda acc: acc.apply_grad(*rows(*range(24), width=24)),
    more=(0, 7, 8, 30),
)
IN_A_GROUP: Final[GroupScene] = GroupScene(
    "the same in three members",
    "float64",
    4,
    before=lambda acc: acc.apply(IN_A_GROUP.gradient(*range(0, 8, 2)), 0, contributor=1),
    operation=lambda acc: acc.apply(IN_A_GROUP.gradient(*range(8), seed=3), 0, contributor=2),
    more=(0, 7, 8, 30),
)


def come_upon_it(mark: Mark) -> None:
    """Attach: the first operation under the lock undoes what is half done."""
    mark()
    shmacc.attach(NAME).close()


@pytest.mark.parametrize("scene", [ADDING, IN_A_GROUP], ids=str)
def test_an_undo_killed_anywhere_loses_nothing(scene: Scene, record_property: Record) -> None:
    clean = {NAME: scene.prepare()}
    before = scene.testimony(clean[NAME])
    # `torn` is what a process killed just before its commit leaves.
    looks = walk(scene.act, clean, {NAME: scene.perform()}, NAME)
    while scene.testimony(looks[-1].images[NAME]) != before:
        looks.pop()
    torn = looks[-1].images
    looks = walk(come_upon_it, torn, clean, NAME)
    assert len(looks) > 20, "there was nothing to undo"
    record_property("judged", judge(scene, looks, before, before))
    kill(come_upon_it, torn, looks[-1].step // 2)
    assert scene.testify() == before
    # A second process dies while it undoes what the first one left, and a third one finishes.
    looks = walk(come_upon_it, looks[len(looks) // 2].images, clean, NAME)
    judge(scene, looks, before, before)
