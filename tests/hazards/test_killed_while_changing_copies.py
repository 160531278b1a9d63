"""A change of a copy is complete or not made at all, at whatever instruction its process dies.

Copies are parameters that several hosts have (`shmacc._parameters.copies`). Workers read them
without a lock; at the same instants the test checks what they may read.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.killing_images import Image
from helpers.killing_scenes import path
from helpers.numpy_optimizers import by_name
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Mark, mark_call, needs_ptrace
from helpers.stepping_walk import Images, instants, walk, write

from shmacc import Parameters, TableSpec, _core, errors, init, optim
from shmacc._base.lineage import Lineage
from shmacc._parameters import copies
from shmacc._parameters.change_checks import Asked

pytestmark = needs_ptrace

_PARAMS: Final = "params"
_FIRST: Final = Lineage(3, 1, 17)
_SECOND: Final = (3, 2)
_STEP: Final = 4
_READ: Final = 64  # bytes of each member that are compared without the lock
_ARRAYS: Final = {"table": np.arange(15, dtype=np.float32).reshape(5, 3), "one": np.ones(8)}
_TABLE: Final = {"t": TableSpec((3,), initial=init.Uniform(-1, 1, seed=5))}
_IDS: Final = [1, 2, 3, 4, 5, 2**40]

State = tuple[tuple[str, bytes], ...]
Change = copies.Update | tuple[Lineage, dict[str, Any]]


@dataclass(frozen=True)
class Scene:
    """A copy, and the change in which a process dies."""

    name: str
    contents: dict[str, Any]
    optimizer: optim.Optimizer
    first: Asked
    second: Asked
    is_whole: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self) -> Parameters:
        """Make a copy whose lineage is `_FIRST`."""
        optimizers = by_name(self.optimizer, self.contents)
        params = Parameters(self.contents, _PARAMS, optimizer=optimizers)
        state = params.state()
        copies.replace(params, state, Lineage(1, 1), 1)
        update = copies.prepare(params, {}, _STEP - 1, self.first)
        copies.make(params, update, (2, 1), Lineage(1, 1))
        copies.replace(params, params.state(), _FIRST, _STEP)
        return params

    def change(self) -> Change:
        """Return the change: an update, or the state of another copy after the update."""
        with self.make() as params:
            update = copies.prepare(params, {}, _STEP, self.second)
            if self.is_whole:
                copies.make(params, update, _SECOND, _FIRST)
            copy, state = copies.state(params)
            params.unlink()
        return (copy.lineage, state) if self.is_whole else update


def _make(params: Parameters, change: Change) -> bool:
    if isinstance(change, copies.Update):
        return copies.make(params, change, _SECOND, _FIRST)[0]
    lineage, state = change
    return copies.replace(params, state, lineage, _STEP + 1)


_NEW_ARRAYS: Final = {"table": ([1, 2], np.ones((2, 3))), "one": np.zeros(8)}
_GRADIENTS: Final = {"table": ([0, 3, 4], np.ones((3, 3))), "one": np.full(8, 0.5)}
_ALL_IDS: Final = Asked(gradients={"t": (_IDS, np.ones((6, 3)))}, remove={"t": [2]})
_SCENES: Final = (
    Scene("SGD", _ARRAYS, optim.SGD(0.5), Asked(), Asked(gradients=_GRADIENTS)),
    Scene("Adam", _ARRAYS, optim.Adam(0.1), Asked(), Asked(gradients=_GRADIENTS)),
    Scene("new contents", _ARRAYS, optim.SGD(0.5), Asked(), Asked(values=_NEW_ARRAYS)),
    Scene("a table's rows, old and new ones, some removed", _TABLE, optim.Adagrad(0.1), _ALL_IDS,
        Asked(gradients={"t": ([1, 2, 4, 9, 10], np.ones((5, 3)))}, remove={"t": [5, 10, 77]})),
    Scene("constrained rows", _ARRAYS, optim.SGD(0.5, constraint=optim.UnitNorm()), Asked(),
        Asked(gradients=_GRADIENTS)),
    Scene("a table's constrained rows", _TABLE, optim.Adam(0.1, constraint=optim.MaxNorm(0.5)),
        _ALL_IDS, Asked(gradients={"t": ([1, 2, 9], np.ones((3, 3)))}, remove={"t": [5]})),
    Scene("another copy's arrays", _ARRAYS, optim.Adam(0.1), Asked(), Asked(gradients=_GRADIENTS),
        is_whole=True),
    Scene("another copy's table", _TABLE, optim.Adam(0.1), _ALL_IDS,
        Asked(gradients={"t": ([1, 2, 6, 7, 8, 9, 10, 11], np.ones((8, 3)))}), is_whole=True),
)  # fmt: skip


def _images(scene: Scene, change: Change | None = None) -> tuple[Images, State, Lineage]:
    with scene.make() as params:
        if change is not None:
            assert _make(params, change)
        copy, state = copies.state(params)
    images = {_PARAMS: Image.of(path(_PARAMS))}
    _remove()
    return images, _state(state), copy.lineage


def _remove() -> None:
    with Parameters.attach(_PARAMS) as params:
        params.unlink()


def _state(state: dict[str, Any]) -> State:
    return tuple((key, saved.tobytes()) for key, saved in state.items())


def _read_unlocked(scene: Scene) -> tuple[list[bytes], int]:
    """Return the beginning of each member's rows, and the step to which the last change leads."""
    with SegmentFile(path(_PARAMS)) as file:
        found = []
        for member in range(len(scene.contents)):
            file.look_at(0, member)
            found.append(file.read(file.table.region("rows 0"), _READ))
        return found, file.committed("round").spread  # in a copy: RoundState::begun


@pytest.mark.parametrize("scene", _SCENES, ids=str)
def test_a_change_killed_at_any_instruction_is_all_or_nothing(scene: Scene) -> None:
    change: Change = run_apart(scene.change)
    images, before, first = run_apart(_images, scene)
    changed, after, lineage = run_apart(_images, scene, change)
    assert (first, lineage[:2]) == (_FIRST, _SECOND)
    write(images)
    read, _ = _read_unlocked(scene)
    _remove()

    def act(mark: Mark) -> None:
        with Parameters.attach(_PARAMS) as params:
            mark_call(_core, "change_copy", mark)
            _make(params, change)

    def testify() -> bool:
        """Check what a death has left; return whether the change was made."""
        found, begun = _read_unlocked(scene)
        assert begun in {_STEP, _STEP + 1}
        assert found == read or begun == _STEP + 1, "workers see a change that has not begun"
        with Parameters.attach(_PARAMS) as params:
            copy, state = copies.state(params)
            was_in: bool = copy.lineage == lineage
            assert copy == (lineage if was_in else _FIRST, begun, _STEP + was_in)
            assert _state(state) == (after if was_in else before)
            assert _make(params, change) is not was_in
            copy, state = copies.state(params)
            assert (copy, _state(state)) == ((lineage, _STEP + 1, _STEP + 1), after)
            assert not _make(params, change)
            empty = copies.prepare(params, {}, _STEP + 1)
            with pytest.raises(errors.FailedPreconditionError):
                copies.make(params, empty, (3, 3), _FIRST)
            assert copies.make(params, empty, (3, 3), lineage)[0]
            params.unlink()
        return was_in

    looks = walk(act, images, changed, _PARAMS, to_mark=True)
    found = [testify() for _ in instants(looks)]
    assert found == sorted(found), "taken back again"
    assert found[-1]
    assert not found[0]
