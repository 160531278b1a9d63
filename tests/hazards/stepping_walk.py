"""A walk through an operation, instruction by instruction, with a look at the segment after each.

Every look that differs from the last is a place where the process may be killed; each is judged by
whether the operation is there wholly or not at all (`judge`). Thus all instants of death between
taking the lock and letting go of it are covered, not a sample: an instruction that leaves the
segment's bytes as they were adds nothing that the last one did not leave.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hazards.killing_images import Image, Windows
from hazards.killing_scenes import NAME, Scene, Testimony, path
from hazards.stepping_tracer import Traced, on_one_core

import shmacc
from shmacc import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hazards.stepping_tracer import Mark

# Of the looks at which nothing but rows, slots, index entries or undo records had changed, one in so
# many is judged; with SHMACC_EVERY_INSTANT=1 all are. Those at which the header had changed always
# are: there lie the journal, both states, and the generation that says which is current.
_ONE_IN: Final = 1 if os.environ.get("SHMACC_EVERY_INSTANT") else 4


@dataclass(frozen=True)
class Look:
    """The segment at one instant.

    Attributes:
        step: After how many instructions under the lock.
        in_header: Whether the header had changed.
        image: The bytes.
    """

    step: int
    in_header: bool
    image: Image


class LockView:
    """Whether some process owns the segment's lock, by the kernel's word."""

    def __init__(self) -> None:
        """Look at the scenes' segment, without attaching."""
        handle = _core.open(path())
        assert isinstance(handle, _core.Handle)
        self._handle = handle

    def held(self) -> bool:
        """At this instant."""
        return bool(self._handle.lock_state()[0])

    def close(self) -> None:
        """Look no more."""
        self._handle.close()

def under_the_lock(scene: Scene) -> Callable[[Mark], None]:
    """Make a child that attaches, and then performs the operation after a mark."""

    def act(mark: Mark) -> None:
        acc: Any = shmacc.attach(NAME)
        mark()
        scene.operation(acc)
        mark()
        acc.close()

    return act


def walk(before: Image, after: Image, act: Callable[[Mark], None]) -> list[Look]:
    """Step through what the child does between its first mark and its letting go of the lock."""
    looks = []
    with _begun(before, act) as (child, lock), _windows(before, after) as windows:
        for step in child.steps(lock.held):
            if changed := windows.look():
                looks.append(Look(step, 0 in changed, windows.image()))
        child.finish()
        windows.look()
        # Had anything ever been written outside the windows, it would show now.
        assert windows.image().pages() == Image.of(path()).pages()
    os.unlink(path())
    return looks


def walk_between_marks(before: Image, after: Image, act: Callable[[Mark], None]) -> list[Look]:
    """Step through all that the child does between its first and its second mark, lock or no lock."""
    looks = []
    with _begun(before, act, until_held=False) as (child, _), _windows(before, after) as windows:
        for step in child.steps_to_mark():
            if changed := windows.look():
                looks.append(Look(step, 0 in changed, windows.image()))
        child.finish()
    os.unlink(path())
    return looks


def kill(before: Image, act: Callable[[Mark], None], step: int) -> None:
    """SIGKILL the child after so many instructions under the lock; what it leaves has its name."""
    with _begun(before, act) as (child, _):
        for _ in range(step):
            child.step()
        child.kill()


@contextmanager
def _begun(
    before: Image, act: Callable[[Mark], None], *, until_held: bool = True
) -> Iterator[tuple[Traced, LockView]]:
    before.write(path())
    with on_one_core(), Traced(act) as child, closing(LockView()) as lock:
        child.run_to_mark()
        if until_held:
            child.run_until(lock.held)
        yield child, lock


def _windows(before: Image, after: Image) -> closing[Windows]:
    return closing(Windows(path(), before, after))


def judge(scene: Scene, looks: list[Look], before: Testimony, after: Testimony) -> None:
    """Hold what each look would leave to being all or nothing.

    The looks must be those of one walk: once the operation is there, it stays.
    """
    if os.environ.get("SHOW"): print(len(looks), "looks in", looks[-1].step)
    done = False
    for number, look in enumerate(looks, start=1):
        if look.in_header or number % _ONE_IN == 0 or number == len(looks):
            testimony = scene.testimony(look.image)
            done = done or testimony == after
            assert testimony == (after if done else before), f"torn after {look.step} instructions"
    assert done


def at_every_instruction(scene: Scene, *, kills: int = 3) -> None:
    """Judge each instant of the operation, and kill a process for real at some of them."""
    image = scene.prepare()
    act = under_the_lock(scene)
    looks = walk(image, scene.perform(), act)
    before, after = scene.testimony(image), scene.testimony(scene.perform())
    judge(scene, looks, before, after)
    for part in range(1, kills + 1):
        kill(image, act, looks[len(looks) * part // (kills + 1)].step)
        assert scene.testify() in {before, after}
