"""What is wrong with /dev/shm itself is said by what opens segments in it, and by `check`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import own_shm
from helpers.apart import needs_own_shm, run_apart
from helpers.inspect_tool import run

import shmacc
from shmacc import errors, inspection
from shmacc.inspection import Severity, _memory

if TYPE_CHECKING:
    from collections.abc import Callable

MIB: Final = 1 << 20

pytestmark = needs_own_shm


def make_single() -> Any:
    return shmacc.ConditionalAccumulator(np.float32, [2], "new")


def make_group() -> Any:
    return shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, "new")


def make_parameters() -> Any:
    return shmacc.Parameters({"w": np.zeros(2, np.float32)}, "new")


def make_arrays() -> Any:
    return shmacc.SharedArrays({"w": np.zeros(2, np.float32)}, "new")


every_maker = pytest.mark.parametrize(
    "make", [make_single, make_group, make_parameters, make_arrays]
)


def _on_a_disk(folder: str, make: Callable[[], Any]) -> tuple[str, list[str]]:
    own_shm.enter_own_namespace()
    own_shm.mount(folder, "/dev/shm", flags=own_shm.BIND)  # noqa: S108
    said = ""
    try:
        with make() as made:
            made.unlink()
    except errors.ShmaccError as error:
        said = str(error)
    return said, [each.kind for each in inspection.check_all()]


@every_maker
def test_a_disk_is_named(make: Callable[[], Any]) -> None:
    """Kubernetes mounts such a disk for an emptyDir without `medium: Memory`."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        kind = _memory._filesystem_at(folder)
        if kind in {"", "tmpfs", "ramfs"}:
            pytest.skip(f"the checkout is on {kind}")
        said, kinds = run_apart(_on_a_disk, folder, make)
    assert "not_in_memory" in kinds
    if said:  # there are filesystems that have files of a segment's length
        assert "medium: Memory" in said or "cannot be used" in said
        assert "ulimit" not in said


def test_memory_is_no_disk() -> None:
    kinds = run_apart(_kinds, shm=MIB)
    assert "not_in_memory" not in kinds


def _kinds() -> list[str]:
    return [each.kind for each in inspection.check_all()]


def _without_proc(act: Callable[[], Any]) -> str:
    shmacc.ConditionalAccumulator(np.float32, [2], "there").close()
    own_shm.mount("none", "/proc", "tmpfs")
    try:
        act()
    except errors.FailedPreconditionError as error:
        return str(error)
    return "nothing"


def _attach() -> None:
    shmacc.attach("there")


def _describe() -> None:
    inspection.describe("there")


@pytest.mark.parametrize(
    "act",
    [
        make_single,
        make_group,
        make_parameters,
        make_arrays,
        _attach,
        _describe,
        inspection.check_all,
        inspection.list_segments,
        inspection.leftovers,
    ],
)
def test_a_missing_proc_is_named(act: Callable[[], Any]) -> None:
    assert "/proc is not mounted" in run_apart(_without_proc, act, shm=MIB)


def _full_of_others() -> tuple[str, str]:
    os.mkdir("/dev/shm/another")  # noqa: PTH102, S108
    with open("/dev/shm/another/programs", "wb") as file:  # noqa: PTH123, S108
        space = inspection.shared_memory_space()
        os.posix_fallocate(file.fileno(), 0, space.free - 4096)
    (found,) = [each for each in inspection.check_all() if each.severity is Severity.WRONG]
    return found.problem, run("list").stderr


def test_foreign_files_that_fill_it_are_named() -> None:
    problem, listed = run_apart(_full_of_others, shm=8 * MIB)
    assert "; most is taken by another/programs 8.0 MiB" in problem
    assert "8.0 MiB of it by files that are not shmacc's" in listed
