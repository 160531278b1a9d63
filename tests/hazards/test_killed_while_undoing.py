"""A process that is killed while it undoes what a dead one left half done leaves it to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from helpers.killing_scenes import NAME, GroupScene, Record, Scene, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import judge, kill, under_the_lock, walk

import shmacc

if TYPE_CHECKING:
    from helpers.stepping_tracer import Mark
    from helpers.stepping_walk import Look

pytestmark = [needs_ptrace, pytest.mark.beyond_asan]

ADDING: Final = Scene(
    "adding to old rows and making new ones",
    "float64",
    64,
    before=lambda acc: acc.apply_grad(*rows(*range(0, 24, 2), width=64)),
    operation=lambda acc: acc.apply_grad(*rows(*range(24), width=64)),
    more=(0, 7, 8, 30),
)
IN_A_GROUP: Final[GroupScene] = GroupScene(
    "the same in three members",
    "float64",
    16,
    before=lambda acc: acc.apply(IN_A_GROUP.gradient(*range(0, 12, 2)), 0, contributor=1),
    operation=lambda acc: acc.apply(IN_A_GROUP.gradient(*range(12), seed=3), 0, contributor=2),
    more=(0, 7, 8, 30),
)


def come_upon_it(mark: Mark) -> None:
    """Attach; the first stay under the lock undoes what is to be undone."""
    mark()
    shmacc.attach(NAME).close()


def half_done(scene: Scene) -> list[Look]:
    """Make the scene's segment as killed processes left it, before the commit and earlier."""
    image, done = scene.prepare(), scene.perform()
    looks = walk(image, done, under_the_lock(scene))
    before = scene.testimony(image)
    while scene.testimony(looks[-1].image) != before:
        looks.pop()
    return [looks[len(looks) * part // 4 - 1] for part in (2, 3, 4)]


@pytest.mark.parametrize("deaths_before", [1, 2])
@pytest.mark.parametrize("scene", [ADDING, IN_A_GROUP], ids=str)
def test_at_every_instruction(scene: Scene, deaths_before: int, record_property: Record) -> None:
    clean = scene.prepare()
    before = scene.testimony(clean)
    torn = [look.image for look in half_done(scene)]
    for _ in range(1, deaths_before):
        looks = walk(torn[-1], clean, come_upon_it)
        torn = [looks[len(looks) // 2].image]
    for image in torn:
        looks = walk(image, clean, come_upon_it)
        assert len(looks) > 20, "there was nothing to undo"
        record_property("judged", judge(scene, looks, before, before))
        for part in (1, 2):
            kill(image, come_upon_it, looks[-1].step * part // 3)
            assert scene.testify() == before
