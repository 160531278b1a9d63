"""A chief killed at any instruction of an update has made all of it or nothing.

At the same instants, the tests check what readers without a lock see.
"""

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers import killing_updates as killing
from helpers.apart import Apart, Pipe, run_apart
from helpers.killing_images import Image
from helpers.killing_scenes import path
from helpers.killing_updates import GROUP, PARAMS, TableScene, UpdateScene
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Traced, needs_ptrace
from helpers.stepping_walk import Images, begun, write
from helpers.support import LONG

import shmacc
from shmacc import AccumulatorGroup, Parameters, _core, errors, inspection, optim

pytestmark = needs_ptrace

_SGD: Final = optim.SGD(0.5)
# A bucket of the index has ten entries, and an index of up to seven rows has one bucket.
_SIX: Final = (1, 2, 3, 4, 5, 2**40)
_NEW_ARRAYS: Final = {"table": ([1, 2], np.ones((2, 3))), "one": np.zeros(7)}
_NEW_ROWS: Final = {"t": ([1, 2, 9], np.ones((3, killing.WIDTH), np.float32))}
SCENES: Final = (
    UpdateScene("SGD", _SGD),
    UpdateScene("Adam", optim.Adam(0.1)),
    UpdateScene("rowwise Adagrad in two lanes", optim.Adagrad(0.1, rowwise=True), lanes=2),
    UpdateScene("rows of a unit's norm", optim.SGD(0.5, constraint=optim.UnitNorm())),
    UpdateScene("clipped numbers", optim.SGD(0.5, constraint=optim.Clip(-0.5, 0.5))),
    UpdateScene("a skipped round", _SGD, skips=True),
    UpdateScene("new contents", _SGD, values=_NEW_ARRAYS),
    UpdateScene("gradients that the chief gives", optim.Adam(0.1),
        more={"gradients": {"table": ([4, 1, 4], np.ones((3, 3)))}}),
    TableScene("a table's first rows", _SGD, changed=(0, 7, 2**63 - 1)),
    TableScene("rows on free slots and new ones, rows removed", optim.Adagrad(0.1), there=_SIX,
        gone=(2, 3), changed=(1, 2, 4, 9, 10), removed=(2, 5, 10, 77)),
    TableScene("a table with a largest norm",
        optim.Adagrad(0.1, rowwise=True, weight_decay=0.5, constraint=optim.MaxNorm(0.5)),
        there=_SIX, gone=(2,), changed=(1, 2, 9), removed=(3,)),
    TableScene("a table whose rows decay and are of a unit's norm",
        optim.AdamW(0.1, weight_decay=0.5, constraint=optim.UnitNorm()), there=_SIX,
        changed=(1, 2, 4)),
    TableScene("a table's rows that decay", optim.AdamW(0.1), there=_SIX, changed=(1, 2, 4)),
    TableScene("an id that comes again, with another index", optim.Adam(0.1), there=_SIX, gone=(2,),
        changed=(1, 2, 6, 7, 8, 9, 10, 11), removed=(3, 2**40)),
    TableScene("rows that are set", optim.SGD(0.5, momentum=0.5), there=_SIX, gone=(2,),
        changed=(1,), removed=(1, 4), values=_NEW_ROWS),
    TableScene("old rows are forgotten", optim.Adagrad(0.1), there=_SIX, gone=(2,),
        changed=(1, 9, 10), removed=(9,), more={"forget": {"t": 0}}),
    TableScene("a table's skipped round", _SGD, there=_SIX, gone=(2,), changed=(1, 9), skips=True),
)  # fmt: skip
# Values that a faulty program might write over a word of the log.
_WRONG: Final = (0, 7, 1 << 20, 1 << 40, (1 << 64) - 1)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_an_update_killed_anywhere_is_all_or_nothing(scene: UpdateScene) -> None:
    killing.judge_every_instruction(scene)


def _stand_by(*, pipe: Pipe) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Run a second chief, attached before the first one died, which sets new contents."""
    with AccumulatorGroup.attach(GROUP) as group, Parameters.attach(PARAMS) as params:
        pipe.turn()
        torn = [array.tobytes() for array in params.values()]
        with group.round(1, timeout=LONG) as taken:
            in_block = [array.tobytes() for array in params.values()]
            assert params.update(taken, {name: 2 * array for name, array in params.items()})
        return torn, in_block, [array.tobytes() for array in params.values()]


def test_a_block_after_a_killed_update_starts_from_the_committed_arrays() -> None:
    scene = SCENES[0]
    before = killing.contents_in(killing.states(scene)[0])
    with begun(scene.act, killing.images(scene)) as (child, _), Apart(_stand_by).ready() as chief:
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


def _update_while_attaching(*, pipe: Pipe) -> bool:
    """Update while another handle has opened the file, but not attached yet."""
    with AccumulatorGroup.attach(GROUP) as group:
        _, _, not_entered = _core.open(path(PARAMS), None)
        assert not_entered is not None
        pipe.turn()
        with group.round(1, timeout=LONG) as taken, Parameters.attach(PARAMS) as params:
            updated = params.update(taken)
        not_entered.close()
        return updated


def test_an_update_while_another_thread_attaches_undoes_a_dead_update() -> None:
    scene = SCENES[0]
    with (
        begun(scene.act, killing.images(scene)) as (child, _),
        Apart(_update_while_attaching).ready() as chief,
    ):
        _until_something_is_saved(child)
        child.kill()
        assert chief.finish() is True
    _remove()


def test_a_save_between_update_and_end_of_block_is_of_one_step(tmp_path: Path) -> None:
    """Gradients that are in the parameters are not saved as pending."""
    scene, saved = SCENES[0], tmp_path / "checkpoint.npz"
    with (
        begun(scene.act, killing.images(scene)) as (child, _),
        AccumulatorGroup.attach(GROUP) as group,
        Parameters.attach(PARAMS) as params,
    ):
        both: dict[str, AccumulatorGroup | Parameters] = {"group": group, "params": params}
        child.run_until(lambda: params.step == 2)
        child.kill()
        assert group.stats().update == "begun"
        shmacc.save(saved, both)
        shmacc.load(saved, both)
        assert (group.global_step, group.num_accumulated(), params.step) == (2, 0, 2)
    _remove()


def test_a_damaged_undo_log_raises_or_is_recovered() -> None:
    """A process that undoes an update may find any numbers in the undo log."""
    scene = SCENES[1]
    with begun(scene.act, killing.images(scene)) as (child, _):
        _until_something_is_saved(child)
        child.kill()
    interrupted = {name: Image.of(path(name)) for name in (PARAMS, GROUP)}
    _remove()
    found = run_apart(_scribble_and_recover_all, interrupted)
    assert found == {"DataLossError", "recovered"}


def _remove() -> None:
    for name in (PARAMS, GROUP):
        inspection.remove(name, force=True)


def _until_something_is_saved(child: Traced) -> None:
    with SegmentFile(path(PARAMS)) as file:
        while (
            file.record("journal").records < 2
            or file.record("journal").generation != file.committed("lane").generation + 1
        ):
            child.step()


def _scribble_and_recover_all(interrupted: Images) -> set[str]:
    found = set()
    for word in range(20):
        for wrong in _WRONG:
            write(interrupted)
            with SegmentFile(path(PARAMS)) as file:
                start = file.table.region("undo log") + word * 8
                file.write(start, wrong.to_bytes(8, "little"))
            try:
                with Parameters.attach(PARAMS) as params:
                    params.snapshot()
                found.add("recovered")
            except errors.DataLossError:
                found.add("DataLossError")
            _remove()
    return found
