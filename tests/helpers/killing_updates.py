"""A chief that is cut short in an update of parameters, and what the next chief finds.

Two segments take part: the parameters, and the group whose round updates them.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from helpers import segment_layout as layout
from helpers.apart import run_apart
from helpers.killing_images import Image, Windows
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Traced, mark_call, on_one_core
from helpers.support import EVERY_INSTANT

from shmacc import AccumulatorGroup, Parameters, _core
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from helpers.stepping_tracer import Mark

    from shmacc import optim

PARAMS: Final = "params"
GROUP: Final = "group"

Gradient = dict[str, Any]


# Of the instants at which only contents had changed, one in this many is judged.
_ONE_IN: Final = 1 if EVERY_INSTANT else 8


@dataclass(frozen=True)
class UpdateScene:
    """An update that is cut short.

    Attributes:
        name: What it is.
        optimizer: Of both arrays, a table of five rows and one number.
        lanes: The group's.
        skips: Whether the round is skipped.
        values: New contents in place of optimizers.
    """

    name: str
    optimizer: optim.Optimizer
    lanes: int = 1
    skips: bool = False
    values: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        """Its name, for the test's name."""
        return self.name

    def make(self) -> tuple[Parameters, AccumulatorGroup]:
        """Parameters after a first round, and a group with a gradient in it."""
        table = np.arange(15, dtype=np.float32).reshape(5, 3)
        params = Parameters({"table": table, "one": np.ones(7)}, PARAMS, optimizer=self.optimizer)
        group = AccumulatorGroup(params.member_specs(["table"]), GROUP, lanes=self.lanes)
        assert group.apply(self.gradient(1), 0)
        with group.round(1) as taken:
            params.update(taken)
        assert group.apply(self.gradient(2), 1)
        return params, group

    def gradient(self, seed: int) -> Gradient:
        """Return a gradient of the round."""
        return gradient(seed)

    def is_touched(self, known: tuple[State, State, State]) -> bool:
        """Whether a reader may see contents other than those before the update."""
        return contents() != contents_in(known[0])

    def update(self, params: Parameters, taken: Any) -> bool:
        """Make the update."""
        return params.skip(taken) if self.skips else params.update(taken, self.values)

    def act(self, mark: Mark) -> None:
        """Act as a chief that marks the beginning and the end of the extension's call."""
        with AccumulatorGroup.attach(GROUP) as group, Parameters.attach(PARAMS) as params:
            mark_call(_core, "update", mark)
            with group.round(1) as taken:
                self.update(params, taken)


def gradient(seed: int) -> Gradient:
    """Some rows, and all of the other array."""
    rng = np.random.default_rng(seed)
    return {
        "table": ([0, 3, 4], rng.standard_normal((3, 3)).astype(np.float32)),
        "one": rng.standard_normal(7),
    }


Images = tuple[Image, Image]
State = tuple[tuple[str, bytes], ...]


def paths() -> tuple[str, str]:
    """The files of the parameters and of the group."""
    return names.segment_name(PARAMS).path, names.segment_name(GROUP).path


def images(scene: UpdateScene, *operations: Callable[..., object]) -> Images:
    """Make the scene, do the operations; return both segments' images. No name is left."""
    made: Images = run_apart(_images, scene, operations)
    return made


def _images(scene: UpdateScene, operations: tuple[Callable[..., object], ...]) -> Images:
    params, group = scene.make()
    with params, group:
        for operation in operations:
            operation(params, group)
    params_path, group_path = paths()
    found = Image.of(params_path), Image.of(group_path)
    with Parameters.attach(PARAMS) as again, AccumulatorGroup.attach(GROUP) as own:
        again.unlink()
        own.unlink()
    return found


def state(params: Parameters) -> State:
    """Everything that an update changes."""
    return tuple((key, saved.tobytes()) for key, saved in params.state().items())


def states(scene: UpdateScene) -> tuple[State, State, State]:
    """Return the parameters' states: before the update, after it, after one more gradient."""
    found: tuple[State, State, State] = run_apart(_states, scene)
    return found


def _states(scene: UpdateScene) -> tuple[State, State, State]:
    found = []
    for more in (False, True):
        params, group = scene.make()
        with params, group:
            if not more:
                found.append(state(params))
            else:
                assert group.apply(scene.gradient(3), 1)
            with group.round(1) as taken:
                assert scene.update(params, taken)
            found.append(state(params))
            params.unlink()
            group.unlink()
    return found[0], found[1], found[2]


def testify(scene: UpdateScene, known: tuple[State, State, State]) -> bool:
    """Act as the next chief: the update must be in completely or not at all. No name is left.

    Returns:
        Whether the update was in.
    """
    before, after, after_more = known
    touched = scene.is_touched(known)
    with AccumulatorGroup.attach(GROUP) as group:
        accepted = group.apply(scene.gradient(3), 1)
        # A gradient counts only if nothing that it may have been computed from was changed.
        assert not (accepted and touched)
        with Parameters.attach(PARAMS) as params:
            assert params.snapshot()[0] in {1, 2}
            was_in = params.step == 2
            assert state(params) == (after if was_in else before)
            assert not (was_in and accepted)
            with group.round(1, timeout=1) as taken:
                assert taken.count == 1 + accepted
                assert scene.update(params, taken) is not was_in
            assert state(params) == (after_more if accepted else after)
            assert (params.step, group.global_step, group.num_accumulated()) == (2, 2, 0)
            assert group.apply(scene.gradient(4), 2)
            with group.round(1) as taken:
                assert params.update(taken)
            params.unlink()
        group.unlink()
    return was_in


def contents() -> list[bytes]:
    """Return the contents of the arrays, torn or not."""
    found = []
    with SegmentFile(paths()[0]) as file:
        for member, size in enumerate((15 * 4, 7 * 8)):
            file.look_at(0, member)
            found.append(file.read(file.table.region("rows 0"), size))
    return found


def contents_in(known: State) -> list[bytes]:
    """Return the contents of the arrays in that state."""
    saved = dict(known)
    return [saved["0.array"], saved["1.array"]]


@dataclass(frozen=True)
class Looks:
    """Both segments at one instant.

    Attributes:
        step: After how many instructions of the call.
        in_records: Whether a record had changed, not only contents.
        images: The bytes.
    """

    step: int
    in_records: bool
    images: Images


def walk(before: Images, after: Images, act: Callable[[Mark], None]) -> list[Looks]:
    """Step through the extension's call."""
    records = {layout.region("header"), layout.region("states")}
    looks = []
    with begun(before, act) as child, ExitStack() as stack:
        windows = [
            stack.enter_context(closing(Windows(path, *both)))
            for path, both in zip(paths(), zip(before, after, strict=True), strict=True)
        ]
        for step in child.steps_to_mark():
            changed = [set(window.look()) for window in windows]
            if any(changed):
                in_records = any(not records.isdisjoint(of) for of in changed)
                now = windows[0].image(), windows[1].image()
                looks.append(Looks(step, in_records, now))
        child.finish()
    for path in paths():
        Path(path).unlink()
    return looks


@contextmanager
def begun(before: Images, act: Callable[[Mark], None]) -> Iterator[Traced]:
    """A traced chief that stands before the extension's call."""
    write(before)
    with on_one_core(), Traced(act) as child:
        child.run_to_mark()
        yield child


def write(what: Images) -> None:
    """Write these images over both segments."""
    for image, path in zip(what, paths(), strict=True):
        image.write(path)


def judge_every_instruction(scene: UpdateScene) -> None:
    """Judge what a death at each instruction of an update would leave; kill at some of them."""

    def made(params: Parameters, group: AccumulatorGroup) -> None:
        with group.round(1) as taken:
            scene.update(params, taken)

    before, known = images(scene), states(scene)
    looks = walk(before, images(scene, made), scene.act)
    is_in = False
    for number, look in enumerate(looks):
        if look.in_records or number % _ONE_IN == 0 or number == len(looks) - 1:
            write(look.images)
            found = testify(scene, known)
            assert found or not is_in, f"taken back after {look.step} instructions"
            is_in = found
    assert is_in
    # Real deaths, at which the kernel drops locks. Not near the call's end: two walks of one call
    # differ, by hundreds of instructions or, if Python collects garbage in one, by more.
    for part in (1, 2, 3):
        with begun(before, scene.act) as child:
            deque(islice(child.steps_to_mark(), looks[len(looks) * part // 4].step), maxlen=0)
            child.kill()
        testify(scene, known)
