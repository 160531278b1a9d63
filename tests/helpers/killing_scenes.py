"""Scenes: operations in which a process is killed, and checks of what the next process finds.

The accumulator may have been used before the operation. The next process must find the segment as
before the operation or as after it, and must be able to go on: `testify` checks that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from helpers.apart import run_apart
from helpers.killing_images import Image
from helpers.numpy_model import Array
from helpers.stepping_tracer import Mark
from helpers.support import SOON, slept

import shmacc
from shmacc._base import names

Record = Callable[[str, object], None]  # the type of pytest's record_property

NAME: Final = "killed"


def rows(*indices: int, width: int = 3, seed: int = 0) -> tuple[Array, Array]:
    """Make a sparse gradient of whole numbers, so that every sum is exact in any order."""
    rng = np.random.default_rng([len(indices), width, seed])
    return np.array(indices, dtype=np.int64), rng.integers(-99, 100, size=(len(indices), width))


def array(seed: int = 0) -> Array:
    return (np.arange(1000) + seed) % 97


def leave_new(_: Any) -> None:
    """Leave a new accumulator as it is."""


@dataclass(frozen=True)
class Scene:
    """An operation, its preparation, and a gradient that shows that work can go on.

    Attributes:
        name: The operation, in a few words.
        dtype: The accumulator's dtype.
        width: Numbers in a row; 0: the accumulator is dense.
        before: Called on a new accumulator, in a process that ends normally.
        operation: The call in which a process dies; gets what `begin` returned.
        more: Rows of a gradient that the next process applies.
        begin: Called on the accumulator just before the operation, by the process that dies.
    """

    name: str
    dtype: str
    width: int
    before: Callable[[Any], object]
    operation: Callable[[Any], object]
    more: tuple[int, ...] = ()
    begin: Callable[[Any], Any] = lambda acc: acc

    def __str__(self) -> str:
        return self.name

    def prepare(self) -> Image:
        """Return the image of the segment before the operation; remove the segment's name."""
        image: Image = run_apart(_prepare, self, ())
        return image

    def perform(self) -> Image:
        """Return the image after an operation that nobody interrupts; remove the segment's name."""
        image: Image = run_apart(_prepare, self, (self.operation,))
        return image

    def testimony(self, image: Image) -> "Testimony":
        image.write(path())
        return self.testify()

    def testify(self) -> "Testimony":
        """Attach, read, go on with the work, remove the name; return what was read."""
        start = slept()
        acc: Any = shmacc.attach(NAME)
        with acc:
            stats = acc.stats()
            contributors = tuple(acc.contributors().tolist())
            state = tuple((key, saved.tobytes()) for key, saved in acc.state().items())
            acc.unseal()
            assert self.add(acc)
            waited = slept() - start
            round_at_stake = _content(acc.take_partial(0, timeout=0))
            assert self.add(acc)
            next_round = _content(acc.take(1, timeout=0))
            assert acc.num_accumulated() == 0
            acc.unlink()
        assert waited < SOON, f"the next process slept for {waited:.2f} s"
        assert stats.waiting == 0
        assert stats.attached == 1
        counters = (
            stats.applied, stats.dropped, stats.discarded, stats.taken, stats.takes,
            stats.num_accumulated, stats.rows, stats.global_step, stats.sealed, contributors,
        )  # fmt: skip
        return Testimony(counters, state, round_at_stake, next_round)

    def act(self, mark: Mark) -> None:
        """Act as the process that dies: perform the operation between two marks."""
        acc: Any = shmacc.attach(NAME)
        begun = self.begin(acc)
        mark()
        self.operation(begun)
        mark()
        acc.close()

    def make(self) -> Any:
        make = shmacc.SparseConditionalAccumulator if self.width else shmacc.ConditionalAccumulator
        return make(self.dtype, None, NAME, reduction_type="SUM")

    def add(self, acc: Any) -> bool:
        gradient = rows(*self.more, width=self.width) if self.width else (array(),)
        return bool(acc.apply_grad(*gradient, local_step=shmacc.NEVER_STALE))


@dataclass(frozen=True)
class GroupScene(Scene):
    """A scene with a group: two sparse members and a dense one. ``width`` is the width of "rows".

    Attributes:
        lanes: How many lanes the group has.
    """

    lanes: int = 1

    def specs(self) -> dict[str, shmacc.TensorSpec]:
        return {
            "rows": shmacc.IndexedSlicesSpec((None, self.width), self.dtype),
            "wide": shmacc.IndexedSlicesSpec((None, 40), self.dtype),
            "array": shmacc.TensorSpec(None, self.dtype),
        }

    def make(self) -> Any:
        return shmacc.AccumulatorGroup(self.specs(), NAME, reduction_type="SUM", lanes=self.lanes)

    def add(self, acc: Any) -> bool:
        return bool(acc.apply(self.gradient(*self.more), shmacc.NEVER_STALE))

    def gradient(self, *indices: int, seed: int = 0) -> dict[str, Any]:
        return {
            "rows": rows(*indices, width=self.width, seed=seed),
            "wide": rows(*indices[::-1], width=40, seed=seed + 1),
            "array": array(seed)[:100],
        }


class Testimony(NamedTuple):
    """All that can be read from an accumulator."""

    counters: tuple[Any, ...]  # stats that only operations change, and contributors
    state: tuple[tuple[str, bytes], ...]  # from `state()`, before any change
    content: tuple[Any, ...]  # the current round, with one more gradient added to it
    next_round: tuple[Any, ...]  # the next round, which has one gradient


def path(name: str = NAME) -> str:
    """Return the path of the scenes' segment, or of the segment with another name."""
    return names.segment_name(name).path


def _prepare(scene: Scene, operations: tuple[Callable[[Any], object], ...]) -> Image:
    with scene.make() as acc:
        scene.before(acc)
    with shmacc.attach(NAME) as again:
        for operation in operations:
            operation(scene.begin(again))
    image = Image.of(path())
    with shmacc.attach(NAME) as last:
        last.unlink()
    return image


def _content(taken: Any) -> tuple[Any, ...]:
    if isinstance(taken, shmacc.GroupTaken | shmacc.GroupPartial):
        members = tuple((name, _content(member)) for name, member in taken.items())
        return taken.count, taken.step, taken.weight, members
    fields = ("value",) if hasattr(taken, "value") else ("indices", "values", "row_counts")
    arrays = [getattr(taken, field) for field in fields]
    arrays.append(taken.contributors)
    return taken.count, taken.step, taken.weight, *(array.tobytes() for array in arrays)
