"""Interrupts work on segments, such as creating and cleaning, and checks what it leaves.

Each kind of work (`Deed`) is interrupted at a system call (stepping_calls.py): the process is
killed, or the call fails.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.departures import bystander
from helpers.killing_images import Image
from helpers.killing_scenes import NAME, Scene, Testimony, path, rows
from helpers.support import SOON, slept, until, update_once

import shmacc
from shmacc import errors, init, inspection, optim, testing
from shmacc._base import names
from shmacc.inspection import SegmentState

MODE: Final = 0o640

# One gradient is in the round. The operation applies another one, which has a new row.
SCENE: Final = Scene(
    "one more",
    "float32",
    3,
    before=lambda acc: acc.apply_grad(*rows(1, 2)),
    operation=lambda acc: acc.apply_grad(*rows(2, 3)),
    more=(2, 3),
)


def create(name: str | None = NAME) -> Any:
    return shmacc.SparseConditionalAccumulator(
        "float32", None, name, reduction_type="SUM", mode=MODE
    )


def create_arrays(*_: Any) -> shmacc.SharedArrays:
    """Make private shared arrays, and check their contents."""
    params = shmacc.SharedArrays(
        {"zeros": shmacc.TensorSpec((3,)), "given": range(2000)}, mode=MODE
    )
    try:
        assert [array.sum() for array in params.values()] == [0, 1999000]
    except BaseException:
        params.close()
        raise
    return params


def lay_out(*_: Any) -> tuple[shmacc.Parameters, shmacc.AccumulatorGroup]:
    """Make private parameters whose first update needs memory, and a group with a gradient."""
    params = shmacc.Parameters(
        {"rows": np.ones((900, 32)), "all": shmacc.TensorSpec((9000,), "float64")},
        optimizer=optim.Adagrad(0.5),
        mode=MODE,
    )
    specs = params.member_specs(["rows"])
    group = shmacc.AccumulatorGroup(specs, reduction_type="SUM", mode=MODE)
    rows = np.arange(0, 900, 2)
    group.apply({"rows": (rows, np.ones((450, 32))), "all": np.ones(9000)}, 0)
    return params, group


def update(begun: tuple[shmacc.Parameters, shmacc.AccumulatorGroup]) -> None:
    """Update if the round is not consumed yet; check that the update is in wholly or not at all."""
    params, group = begun
    try:
        if group.num_accumulated():
            with group.round(1, timeout=0) as taken:
                params.update(taken)
    finally:
        change = 0.5 / np.sqrt(1.1) if params.step else 0.0
        assert np.all(params["rows"][::2] == 1 - change)
        assert np.all(params["rows"][1::2] == 1)
        assert np.all(params["all"] == -change)
    assert (params.step, group.global_step) == (1, 1)


_OLD, _NEW, _GONE = np.arange(10), np.arange(5, 905), np.array([0, 1, 7, 900])


def lay_out_table(*_: Any) -> tuple[shmacc.Parameters, shmacc.AccumulatorGroup]:
    """Make private parameters whose table grows in the next update, and a group with a gradient."""
    spec = shmacc.TableSpec((32,), initial=init.Constant(3))
    params = shmacc.Parameters({"table": spec}, optimizer=optim.SGD(1), mode=MODE)
    group = shmacc.AccumulatorGroup(params.member_specs(), reduction_type="SUM", mode=MODE)
    update_once(params, group, {"table": (_OLD, np.ones((len(_OLD), 32), np.float32))})
    group.apply({"table": (_NEW, np.ones((len(_NEW), 32), np.float32))}, 1)
    return params, group


def update_table(begun: tuple[shmacc.Parameters, shmacc.AccumulatorGroup]) -> None:
    """Like `update`; this update adds, changes and removes rows of a table."""
    params, group = begun
    try:
        if group.num_accumulated():
            with group.round(1, timeout=0) as taken:
                params.update(taken, remove={"table": _GONE})
    finally:
        ids, is_in = np.union1d(_OLD, _NEW), params.step == 2
        times = np.isin(ids, _OLD).astype(int) + (np.isin(ids, _NEW) if is_in else 0)
        there = (times > 0) & ~(np.isin(ids, _GONE) & is_in)
        table = params["table"]
        assert table.ids().tolist() == ids[there].tolist()
        assert table.contains(ids).tolist() == there.tolist()
        expected = np.where(there, 3 - times, 3)
        assert np.array_equal(table[ids], np.repeat(expected[:, None], 32, axis=1))
    assert (params.step, group.global_step) == (2, 2)


class Both(tuple[Any, ...]):
    """Objects that are closed together."""

    __slots__ = ()

    def close(self) -> None:
        for one in self:
            one.close()


@dataclass(frozen=True)
class Deed:
    """Work in which a process is interrupted.

    Attributes:
        name: The work, in a few words.
        before: Prepares shared memory in the test's process, which closes the result afterwards.
        begin: Prepares the process that is interrupted; gets the result of `before`.
        act: Does the work; gets the result of `begin`. May return an accumulator.
    """

    name: str
    before: Callable[[], Any]
    begin: Callable[[Any], Any]
    act: Callable[[Any], Any]

    def __str__(self) -> str:
        return self.name


def nothing(*_: Any) -> None:
    pass


def _of_another_time() -> None:
    """Leave a semaphore like that of an earlier segment with the same name."""
    semaphore = Path(names.semaphore_path(os.path.basename(path()), 0x1234567))  # noqa: PTH119
    semaphore.write_bytes(bytes(32))


def _fill() -> Image:
    with create() as acc:
        SCENE.before(acc)
        image = Image.of(path())
        acc.unlink()
    return image


@cache
def _filled_image() -> Image:
    image: Image = run_apart(_fill)
    return image


def filled() -> None:
    """Leave a segment with a gradient in it, and no semaphore."""
    _filled_image().write(path())
    os.chmod(path(), MODE)  # noqa: PTH101


def left_by_the_dead() -> None:
    """Leave a filled segment that a killed process had attached, and no semaphore."""
    filled()
    bystander(NAME).kill()
    for name in testing.leaked_names(names.current_namespace()):
        if name.startswith("sem."):
            os.unlink(f"{names.SHM_DIRECTORY}/{name}")  # noqa: PTH108


def _wait_in_queue(pipe: Pipe) -> None:
    with shmacc.attach(NAME) as acc:
        pipe.say()
        acc.take(2)


def with_a_dead_take() -> None:
    """Leave a filled segment whose queue still holds the take of a dead process."""
    filled()
    with Apart(_wait_in_queue) as process, shmacc.attach(NAME) as acc:
        process.hear()
        until(lambda: acc.stats().waiting == 1)


def filled_and_attached() -> Any:
    filled()
    return _attach()


def _attach(*_: Any) -> Any:
    return shmacc.attach(NAME)


def _wait_in_vain(acc: Any) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(5, timeout=0.01)


def _clean(*_: Any) -> None:
    for leftover in inspection.leftovers(namespace=names.current_namespace()):
        inspection.clean(leftover)


CREATING: Final = Deed("creating", _of_another_time, nothing, lambda _: create())
DEEDS: Final = (
    CREATING,
    Deed("creating a private one", nothing, nothing, lambda _: create(None)),
    Deed("creating shared arrays", nothing, nothing, create_arrays),
    Deed("updating", nothing, lambda _: Both(lay_out()), update),
    Deed("updating a table", nothing, lambda _: Both(lay_out_table()), update_table),
    Deed("finding what the dead left", left_by_the_dead, nothing, lambda _: create()),
    Deed("attaching", filled_and_attached, nothing, _attach),
    Deed("a child's first operation", filled_and_attached, lambda acc: acc, SCENE.operation),
    Deed("applying behind the dead", with_a_dead_take, _attach, SCENE.operation),
    Deed("taking behind the dead", with_a_dead_take, _attach, lambda acc: acc.take(1, timeout=0)),
    Deed("waiting until the timeout", filled, _attach, _wait_in_vain),
    Deed("closing", filled, _attach, lambda acc: acc.close()),
    Deed("closing a private one", nothing, lambda _: create(None), lambda acc: acc.close()),
    Deed("unlinking", filled, _attach, lambda acc: acc.unlink()),
    Deed("cleaning", left_by_the_dead, nothing, _clean),
)


def left() -> tuple[str, ...]:
    return testing.leaked_names(names.current_namespace())


@dataclass(frozen=True)
class Leftovers:
    """A copy of everything in shared memory, which can be written back and judged again."""

    modes: dict[str, int]
    segments: dict[str, Image]
    semaphores: dict[str, bytes]

    @classmethod
    def now(cls) -> "Leftovers":
        segments, semaphores = {}, {}
        for name in left():
            if name.startswith("sem."):
                semaphores[name] = _file(name).read_bytes()
            else:
                segments[name] = Image.of(str(_file(name)))
        modes = {name: stat.S_IMODE(_file(name).stat().st_mode) for name in left()}
        return cls(modes, segments, semaphores)

    def write(self) -> None:
        for name, image in self.segments.items():
            image.write(str(_file(name)))
        for name, content in self.semaphores.items():
            _file(name).write_bytes(content)
        for name, mode in self.modes.items():
            _file(name).chmod(mode)


def _file(name: str) -> Path:
    return Path(names.SHM_DIRECTORY, name)


class Watcher(Apart):
    """A process that copies shared memory whenever it is asked.

    The test itself cannot: by closing the file of a segment that it has attached, it would lose
    its record locks on the segment.
    """

    def __init__(self) -> None:
        """Start the process. The test must have nothing attached: the process would inherit it."""
        super().__init__(_tell_changes)

    def change(self) -> Leftovers | None:
        """Return what is in shared memory; None if it has not changed since the last call."""
        self.say()
        now: Leftovers | None = self.hear()
        return now


def _tell_changes(pipe: Pipe) -> None:
    last = None
    while True:
        pipe.hear()
        now = Leftovers.now()
        pipe.say(now if now != last else None)
        last = now


def clean_up() -> None:
    """Remove all segments and semaphores; no process may have them open."""
    for leftover in inspection.leftovers(namespace=names.current_namespace()):
        assert leftover.removable, leftover
        inspection.clean(leftover)
    assert left() == ()


def judge() -> Testimony | None:
    """Check that a process can use what is left; return what it finds (None: no segment).

    Afterwards shared memory is empty.
    """
    leftovers = Leftovers.now()
    for file, mode in leftovers.modes.items():
        assert mode == MODE or file.endswith("1234567"), f"{file} has mode {mode:o}"
    for segment in inspection.list_segments(namespace=names.current_namespace()):
        assert segment.state is SegmentState.ORPHANED, segment
    clean_up()
    leftovers.write()
    try:
        found = SCENE.testify()
    except errors.NotFoundError:
        found = None
    # A new segment can use the name at once.
    start = slept()
    with create() as acc:
        assert slept() - start < SOON
        assert (acc.num_accumulated(), acc.global_step, acc.stats().attached) == (0, 0, 1)
        acc.unlink()
    clean_up()
    return found
