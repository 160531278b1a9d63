"""A walk through an operation, instruction by instruction, with a look at the segment after each.

Every look that differs from the last is a place where the process may be killed. `judge` checks
that the operation is there wholly or not at all. This covers all deaths between acquiring and
releasing the lock, not a sample: after an instruction that changes no byte of the segment, a death
leaves the same as before it.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helpers import segment_layout as layout
from helpers.killing_images import Image, Windows
from helpers.killing_scenes import NAME, Record, Scene, Testimony, path
from helpers.stepping_tracer import Traced, on_one_core
from helpers.support import EVERY_INSTANT

import shmacc
from shmacc import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.stepping_tracer import Mark

# Of the looks at which only rows, slots, index entries or undo records had changed, one in this
# many is judged; with SHMACC_EVERY_INSTANT=1 all are. Looks at which the header or the lanes'
# states had changed are always judged: they have the journals, both copies of all committed
# records, and the generations that say which copy is current.
_ONE_IN: Final = 1 if EVERY_INSTANT else 8
_RECORDS: Final = {layout.region("header"), layout.region("states")}


@dataclass(frozen=True)
class Look:
    """The segment at one instant.

    Attributes:
        step: After how many instructions under the lock.
        in_records: Whether the header or the lanes' states had changed.
        image: The bytes.
    """

    step: int
    in_records: bool
    image: Image


class LockView:
    """Asks the kernel whether some process owns the lock of the segment's first lane."""

    def __init__(self) -> None:
        """Look at the scenes' segment, without attaching."""
        view = _core.view(path())[2]
        assert view is not None
        self._view = view

    def held(self) -> bool:
        """Whether the lock is held at this instant."""
        return bool(self._view.lock_state(0)[0])

    def close(self) -> None:
        """Stop looking."""
        self._view.close()


def under_the_lock(scene: Scene) -> Callable[[Mark], None]:
    """Make a child that attaches, and then performs the operation after a mark."""

    def act(mark: Mark) -> None:
        acc: Any = shmacc.attach(NAME)
        begun = scene.begin(acc)
        mark()
        scene.operation(begun)
        mark()
        acc.close()

    return act


def walk(before: Image, after: Image, act: Callable[[Mark], None]) -> list[Look]:
    """Step through the child from where it gets the lock, after its first mark, to the release."""
    before.write(path())
    with _begun(act) as (child, lock), _windows(before, after) as windows:
        looks = list(_looks(child.steps(lock.held), windows))
        child.finish()
        windows.look()
        # Had anything ever been written outside the windows, it would show now.
        assert windows.image().pages() == Image.of(path()).pages()
    Path(path()).unlink()
    return looks


def walk_between_marks(before: Image, after: Image, act: Callable[[Mark], None]) -> list[Look]:
    """Step through all that the child does between its first two marks, lock or no lock."""
    before.write(path())
    with _begun(act, until_held=False) as (child, _), _windows(before, after) as windows:
        looks = list(_looks(child.steps_to_mark(), windows))
        child.finish()
    Path(path()).unlink()
    return looks


def _looks(steps: Iterator[int], windows: Windows) -> Iterator[Look]:
    for step in steps:
        if changed := windows.look():
            yield Look(step, not _RECORDS.isdisjoint(changed), windows.image())


def kill(before: Image, act: Callable[[Mark], None], step: int) -> None:
    """SIGKILL the child after `step` instructions under the lock; its segment keeps its name."""
    before.write(path())
    with _begun(act) as (child, _):
        for _ in range(step):
            child.step()
        child.kill()


@contextmanager
def stopped(act: Callable[[Mark], None], step: int) -> Iterator[Traced]:
    """Stop the child after `step` instructions under the lock, as SIGSTOP does."""
    with _begun(act) as (child, _):
        for _ in range(step):
            child.step()
        child.stop()
        yield child


@contextmanager
def _begun(
    act: Callable[[Mark], None], *, until_held: bool = True
) -> Iterator[tuple[Traced, LockView]]:
    with on_one_core(), Traced(act) as child, closing(LockView()) as lock:
        child.run_to_mark()
        if until_held:
            child.run_until(lock.held)
        yield child, lock


def _windows(before: Image, after: Image) -> closing[Windows]:
    return closing(Windows(path(), before, after))


def judge(scene: Scene, looks: list[Look], before: Testimony, after: Testimony) -> int:
    """Check that a death at each look would leave all of the operation or nothing.

    The looks must be those of one walk: once the operation is there, it stays.

    Returns:
        How many were judged.
    """
    done, judged = False, 0
    for number, look in enumerate(looks, start=1):
        if look.in_records or number % _ONE_IN == 0 or number == len(looks):
            judged += 1
            testimony = scene.testimony(look.image)
            done = done or testimony == after
            assert testimony == (after if done else before), f"torn after {look.step} instructions"
    assert done
    return judged


def at_every_instruction(scene: Scene, record: Record) -> None:
    """Judge each instant of the operation, and kill a process for real in the middle of it.

    One real death is enough: under the lock the kernel drops the same locks at all instants. Only
    the bytes differ, and those are judged.

    Args:
        scene: The scene of the operation.
        record: Is told how many instructions and instants there were.
    """
    image = scene.prepare()
    act = under_the_lock(scene)
    looks = walk(image, scene.perform(), act)
    before, after = scene.testimony(image), scene.testimony(scene.perform())
    record("judged", judge(scene, looks, before, after))
    record("instants", len(looks))
    record("instructions", looks[-1].step)
    kill(image, act, looks[len(looks) // 2].step)
    assert scene.testify() in {before, after}
