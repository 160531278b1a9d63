"""Steps a child through an operation by single instructions, and looks at its segments after each.

Only looks at which a byte has changed matter: a death after any other instruction leaves the same
as a death before it. `instants` picks the looks to judge: what a death there leaves must have all
of the operation, or nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from helpers import segment_layout as layout
from helpers.killing_images import Image, Windows
from helpers.killing_scenes import NAME, Record, Scene, Testimony, path
from helpers.stepping_tracer import Mark, Traced, on_one_core
from helpers.support import EVERY_INSTANT

from shmacc import _core

Act = Callable[[Mark], None]

Images = dict[str, Image]  # by shared name

# The regions of journals, records and generations. A generation says which of the two copies of a
# record is current.
_RECORDS: Final = {layout.region("header"), layout.region("states")}
# A look at a change outside of _RECORDS (rows, slots, index entries, undo records) is judged only
# if the next look is at a change in _RECORDS, or if the look's own number is a multiple of this.
_ONE_IN: Final = 64


@dataclass(frozen=True)
class Look:
    """The segments at one instant.

    Attributes:
        step: The number of instructions so far.
        in_records: Whether the header or the lanes' states have changed since the last look.
        images: The segments' bytes.
    """

    step: int
    in_records: bool
    images: Images


class LockView:
    """Asks the kernel whether some process owns the lock of a segment's first lane."""

    def __init__(self, name: str = NAME) -> None:
        """Look at the segment, without attaching."""
        view = _core.view(path(name))[2]
        assert view is not None
        self._view = view
        self.close = view.close

    def held(self) -> bool:
        return bool(self._view.lock_state(0)[0])


def write(images: Images) -> None:
    """Write the segments; none of their names may exist."""
    for name, image in images.items():
        image.write(path(name))


@contextmanager
def begun(
    act: Act, before: Images, lock: str | None = None, *, to_mark: bool = False
) -> Iterator[tuple[Traced, Iterator[int]]]:
    """Stop a child at its first mark; with `lock`, let it go on until it gets that segment's lock.

    Yields:
        The child, and its single steps. They end when it releases the lock; without `lock`, or if
        `to_mark`, at the next mark.
    """
    write(before)
    with on_one_core(), Traced(act) as child, ExitStack() as stack:
        view = stack.enter_context(closing(LockView(lock))) if lock else None
        child.run_to_mark()
        if view:
            child.run_until(view.held)
        yield child, child.steps(view.held) if view and not to_mark else child.steps_to_mark()


def walk(
    act: Act,
    before: Images,
    after: Images,
    lock: str | None = None,
    *,
    to_mark: bool = False,
    ends: bool = True,
) -> list[Look]:
    """Step through the child; return a look after each instruction that changed a segment.

    Args:
        act: The function that the child runs.
        before: The segments at first.
        after: The segments at another time; `before` and `after` show which pages are used.
        lock: The argument of `begun`.
        to_mark: The argument of `begun`.
        ends: Whether the child ends by itself. If not, it is killed.
    """
    looks = []
    with begun(act, before, lock, to_mark=to_mark) as (child, steps), ExitStack() as stack:
        windows = {
            name: stack.enter_context(closing(Windows(path(name), before[name], after[name])))
            for name in before
        }
        for step in steps:
            changed = [offset for window in windows.values() for offset in window.look()]
            if changed:
                images = {name: window.image() for name, window in windows.items()}
                looks.append(Look(step, not _RECORDS.isdisjoint(changed), images))
        if ends:
            child.finish()
        child.kill()
        for name, window in windows.items():
            window.look()
            # Compare the whole files: this detects writes outside of the windows.
            assert window.image().pages() == Image.of(path(name)).pages()
            Path(path(name)).unlink()
    return looks


def instants(looks: list[Look], part: int = 1) -> Iterator[Look]:
    """Write the segments as they were at each look to judge; the caller removes them.

    Args:
        looks: The result of `walk`.
        part: Of the picked looks, one in this many is judged, and always the last.
    """
    picked = [
        look
        for number, look in enumerate(looks, start=1)
        if look.in_records
        or number == len(looks)
        or looks[number].in_records
        or number % _ONE_IN == 0
    ]
    for look in looks if EVERY_INSTANT else [*picked[:-1:part], picked[-1]]:
        write(look.images)
        yield look


def kill(act: Act, before: Images, step: int) -> None:
    """SIGKILL the child after `step` instructions under the lock; its segments keep their names."""
    with begun(act, before, NAME) as (child, steps):
        deque(islice(steps, step), maxlen=0)
        child.kill()


@contextmanager
def stopped(act: Act, step: int) -> Iterator[Traced]:
    """Stop the child after `step` instructions under the lock, as SIGSTOP does."""
    with begun(act, {}, NAME) as (child, steps):
        deque(islice(steps, step), maxlen=0)
        child.stop()
        yield child


def stops(act: Act, number: int, begin: float, end: float) -> Iterator[None]:
    """Stop at places evenly spread between the child's marks; run a new child for each.

    Args:
        act: The function that the child runs.
        number: The number of places.
        begin: The first place, as a fraction of the instructions between the marks. (Earlier
            instructions may be Python's own.)
        end: The last place, as a fraction in the same way.
    """
    with on_one_core():
        with Traced(act) as child:
            child.run_to_mark()
            total = sum(1 for _ in child.steps_to_mark())
            child.finish()
        for stop in np.linspace(begin * total, end * total, number).astype(int).tolist():
            with Traced(act) as child:
                child.run_to_mark()
                deque(islice(child.steps_to_mark(), stop), maxlen=0)
                yield
                child.finish()


def judge(scene: Scene, looks: list[Look], before: Testimony, after: Testimony) -> int:
    """Check that a death at each look would leave all of the operation or nothing.

    The looks must be those of one walk: once the operation is done, it must stay done.

    Returns:
        The number of looks that were judged.
    """
    done, judged = False, 0
    for look in instants(looks):
        judged += 1
        testimony = scene.testify()
        done = done or testimony == after
        assert testimony == (after if done else before), f"torn after {look.step} instructions"
    assert done
    return judged


def at_every_instruction(scene: Scene, record: Record) -> list[Look]:
    """Step through the operation under the lock, and `judge` each instant; return all looks."""
    image, done = scene.prepare(), scene.perform()
    looks = walk(scene.act, {NAME: image}, {NAME: done}, NAME)
    before, after = scene.testimony(image), scene.testimony(done)
    record("judged", judge(scene, looks, before, after))
    record("instants", len(looks))
    record("instructions", looks[-1].step)
    return looks
