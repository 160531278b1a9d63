"""A process that is killed while it undoes what a dead one left half done leaves it to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from helpers.killing_scenes import NAME, GroupScene, Record, Scene, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import judge, kill, walk

import shmacc

if TYPE_CHECKING:
    from helpers.stepping_tracer import Mark

pytestmark = [needs_ptrace, pytest.mark.beyond_asan]

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
    """Attach; the first stay under the lock undoes what is to be undone."""
    mark()
    shmacc.attach(NAME).close()


@pytest.mark.parametrize("scene", [ADDING, IN_A_GROUP], ids=str)
def test_at_every_instruction(scene: Scene, record_property: Record) -> None:
    clean = {NAME: scene.prepare()}
    before = scene.testimony(clean[NAME])
    # As a process left it that was killed just before the commit.
    looks = walk(scene.act, clean, {NAME: scene.perform()}, NAME)
    while scene.testimony(looks[-1].images[NAME]) != before:
        looks.pop()
    torn = looks[-1].images
    looks = walk(come_upon_it, torn, clean, NAME)
    assert len(looks) > 20, "there was nothing to undo"
    record_property("judged", judge(scene, looks, before, before))
    kill(come_upon_it, torn, looks[-1].step // 2)
    assert scene.testify() == before
    # One that dies while it undoes what another one left that died while it undid it.
    looks = walk(come_upon_it, looks[len(looks) // 2].images, clean, NAME)
    judge(scene, looks, before, before)
