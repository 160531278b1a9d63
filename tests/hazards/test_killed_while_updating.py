"""A chief that dies at any instruction of an update leaves all of it or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import killing_updates as killing
from helpers.apart import Apart, Pipe, run_apart
from helpers.killing_images import Image
from helpers.killing_updates import UpdateScene
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import refusal
from helpers.support import LONG

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, inspection, optim

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.stepping_tracer import Traced

pytestmark = [
    pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}"),
]

SCENES: Final = (
    UpdateScene("SGD", optim.SGD(0.5)),
    UpdateScene("Adam", optim.Adam(0.1)),
    UpdateScene("rowwise Adagrad in two lanes", optim.Adagrad(0.1, rowwise=True), lanes=2),
    UpdateScene("a skipped round", optim.SGD(0.5), skips=True),
    UpdateScene(
        "new contents",
        optim.SGD(0.5),
        values={"table": ([1, 2], np.ones((2, 3))), "one": np.zeros(7)},
    ),
)
# What a scribbler might write over a word of the log.
_WRONG: Final = (0, 1, 7, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: UpdateScene) -> None:
    killing.judge_every_instruction(scene)


def _stand_by(*, pipe: Pipe) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Be a chief with an optimizer of its own, attached before the other one died."""
    with (
        AccumulatorGroup.attach(killing.GROUP) as group,
        Parameters.attach(killing.PARAMS) as params,
    ):
        pipe.say()
        pipe.hear()
        torn = [array.tobytes() for array in params.values()]
        with group.round(1, timeout=LONG) as taken:
            in_block = [array.tobytes() for array in params.values()]
            assert params.update(taken, {name: 2 * array for name, array in params.items()})
        return torn, in_block, [array.tobytes() for array in params.values()]


def test_new_contents_are_computed_from_whole_arrays() -> None:
    """A block begins with the arrays as the rounds before it left them: no half update."""
    scene = SCENES[0]
    before = killing.contents_in(killing.states(scene)[0])
    with killing.begun(killing.images(scene), scene.act) as child, Apart(_stand_by) as chief:
        chief.hear()
        _until_something_is_saved(child)
        while killing.contents() == before:
            child.step()
        child.kill()
        chief.say()
        torn, in_block, after = chief.result()
    _remove()
    assert torn != before
    assert in_block == before
    assert after == [
        (2 * np.frombuffer(old, kind)).tobytes() for old, kind in zip(before, "fd", strict=True)
    ]


def test_a_save_before_the_round_knows_of_its_update(tmp_path: Path) -> None:
    """What is saved is of one step: the gradients that are in the parameters are not pending."""
    scene, saved = SCENES[0], tmp_path / "checkpoint.npz"
    with (
        killing.begun(killing.images(scene), scene.act) as child,
        AccumulatorGroup.attach(killing.GROUP) as group,
        Parameters.attach(killing.PARAMS) as params,
    ):
        both: dict[str, AccumulatorGroup | Parameters] = {"group": group, "params": params}
        child.run_until(lambda: params.step == 2)
        child.kill()
        assert group.stats().update == "begun"
        shmacc.save(saved, both)
        shmacc.load(saved, both)
        assert (group.global_step, group.num_accumulated(), params.step) == (2, 0, 2)
    _remove()


def test_a_damaged_log_is_an_error_and_no_crash() -> None:
    """Whoever recovers finds numbers that nobody wrote, wherever they stand in it."""
    scene = SCENES[1]
    with killing.begun(killing.images(scene), scene.act) as child:
        _until_something_is_saved(child)
        child.kill()
    params, group = killing.paths()
    interrupted = Image.of(params), Image.of(group)
    _remove()
    found = set()
    for word in range(20):
        found |= run_apart(_scribble_and_recover_all, interrupted, word)
    assert found == {"DataLossError", "recovered"}


def _remove() -> None:
    for name in (killing.PARAMS, killing.GROUP):
        inspection.remove(name, force=True)


def _until_something_is_saved(child: Traced) -> None:
    with SegmentFile(killing.paths()[0]) as file:
        while file.record("journal").records < 2 or not _is_stamped(file):
            child.step()


def _is_stamped(file: SegmentFile) -> bool:
    return bool(file.record("journal").generation == file.committed("lane").generation + 1)


def _scribble_and_recover_all(interrupted: killing.Images, word: int) -> set[str]:
    found = set()
    for wrong in _WRONG:
        killing.write(interrupted)
        found.add(_scribble_and_recover(word, wrong))
        _remove()
    return found


def _scribble_and_recover(word: int, wrong: int) -> str:
    with SegmentFile(killing.paths()[0]) as file:
        start = file.table.region("undo log") + word * 8
        file.write(start, wrong.to_bytes(8, "little"))
    try:
        with Parameters.attach(killing.PARAMS) as params:
            params.snapshot()
    except errors.DataLossError as error:
        return type(error).__name__
    return "recovered"
