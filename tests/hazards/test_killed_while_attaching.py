"""A process that is killed while it attaches or closes takes away nothing that others have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from helpers.apart import Apart
from helpers.killing_deeds import SCENE, create
from helpers.killing_scenes import NAME, Record, path
from helpers.stepping_tracer import Traced, needs_ptrace
from helpers.stepping_walk import judge, walk

import shmacc
from shmacc import _core, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.apart import Pipe
    from helpers.stepping_tracer import Mark

pytestmark = pytest.mark.beyond_asan


def claim_a_place(mark: Mark) -> None:
    """Attach: the part that the extension does."""
    handle: Any = _core.open(path(), None)[2]
    semaphore = names.semaphore_path(os.path.basename(path()), handle.config()["token"])  # noqa: PTH119
    mark()
    handle.enter(path(), semaphore)
    mark()
    handle.close()


def close_handle(mark: Mark) -> None:
    """Close: the part that the extension does."""
    acc: Any = shmacc.attach(NAME)
    mark()
    acc._handle.close()
    mark()


@needs_ptrace
@pytest.mark.parametrize("act", [claim_a_place, close_handle])
def test_at_every_instruction(act: Callable[[Mark], None], record_property: Record) -> None:
    image = SCENE.prepare()
    looks = walk(act, {NAME: image}, {NAME: image})
    assert looks
    before = SCENE.testimony(image)
    record_property("judged", judge(SCENE, looks, before, before))


def create_and_say_so(pipe: Pipe) -> None:
    with create():
        pipe.say()
        pipe.hear()


def test_its_place_is_given_to_the_next() -> None:
    """However many die, the table of processes does not fill up."""
    for _ in range(10):
        with Apart(create_and_say_so) as process:
            process.hear()
    with create() as acc:
        assert [process.alive for process in inspection.describe(NAME).processes] == [True]
        acc.unlink()


@needs_ptrace
def test_a_cleaner_leaves_what_is_being_made() -> None:
    """The semaphore has its name before the segment has."""
    namespace = names.current_namespace()
    with Traced(lambda _: create()) as creator:
        creator.run_until(lambda: testing.leaked_names(namespace) != ())
        assert not os.path.lexists(path())
        assert inspection.leftovers(namespace=namespace) == ()
        creator.finish()
    with shmacc.attach(NAME) as made:
        made.unlink()
