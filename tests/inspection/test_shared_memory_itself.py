"""`shmacc-inspect` reports problems of /dev/shm itself, and names that were removed under a job."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import own_shm
from helpers.apart import Apart, Crew, Pipe, needs_own_shm, run_apart
from helpers.inspect_tool import Terminal, ask, idle, path_of, run, semaphore_of, start

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc.inspection import Severity, _memory

MIB: Final = 1 << 20
SHM: Final = Path("/dev/shm")  # noqa: S108


MAKERS: Final[list[Callable[[], Any]]] = [
    lambda: ConditionalAccumulator(np.float32, [2], "new"),
    lambda: shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, "new"),
    lambda: shmacc.Parameters({"w": np.zeros(2, np.float32)}, "new"),
    lambda: shmacc.SharedArrays({"w": np.zeros(2, np.float32)}, "new"),
]


def _kinds() -> list[str]:
    return [each.kind for each in inspection.check_all()]


def _on_a_disk(folder: str, make: Callable[[], Any]) -> tuple[str, list[str]]:
    own_shm.enter_own_namespace()
    own_shm.mount(folder, str(SHM), flags=own_shm.BIND)
    said = ""
    try:
        with make() as made:
            made.unlink()
    except errors.ShmaccError as error:
        said = str(error)
    return said, _kinds()


@needs_own_shm
@pytest.mark.parametrize("make", MAKERS)
def test_a_dev_shm_on_a_disk_is_reported(make: Callable[[], Any]) -> None:
    """Kubernetes mounts a disk for an emptyDir without `medium: Memory`."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        kind = _memory._filesystem_at(folder)
        if kind in {"", "tmpfs", "ramfs"}:
            pytest.skip(f"the checkout is on {kind}")
        said, kinds = run_apart(_on_a_disk, folder, make)
    assert "not_in_memory" in kinds
    if said:  # some filesystems allow files of a segment's length
        assert "medium: Memory" in said or "cannot be used" in said
        assert "ulimit" not in said


@needs_own_shm
def test_a_dev_shm_in_memory_is_not_reported() -> None:
    assert "not_in_memory" not in run_apart(_kinds, shm=MIB)


def _beside_a_mount_of_no_text(folder: str) -> list[str]:
    place = os.fsencode(folder) + b"/M\xfcller"
    os.mkdir(place)  # noqa: PTH102  no text
    own_shm.call("mount", b"tmpfs", place, b"tmpfs", 0, b"")
    return _kinds()


@needs_own_shm
def test_the_name_of_another_mount_may_be_in_any_encoding(tmp_path: Path) -> None:
    assert "not_in_memory" not in run_apart(_beside_a_mount_of_no_text, str(tmp_path), shm=MIB)


def _without_proc(act: Callable[[], Any]) -> str:
    ConditionalAccumulator(np.float32, [2], "there").close()
    own_shm.mount("none", "/proc", "tmpfs")
    try:
        act()
    except errors.FailedPreconditionError as error:
        return str(error)
    return "nothing"


@needs_own_shm
@pytest.mark.parametrize("act", [
    *MAKERS, lambda: shmacc.attach("there"), lambda: inspection.describe("there"),
    inspection.check_all, inspection.list_segments, inspection.leftovers,
])  # fmt: skip
def test_a_missing_proc_is_reported(act: Callable[[], Any]) -> None:
    assert "/proc is not mounted" in run_apart(_without_proc, act, shm=MIB)


def _full_of_others() -> tuple[str, str]:
    (SHM / "another").mkdir()
    with (SHM / "another" / "programs").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, inspection.shared_memory_space().free - 4096)
    (found,) = [each for each in inspection.check_all() if each.severity is Severity.WRONG]
    return found.problem, run("list").stderr


@needs_own_shm
def test_other_programs_files_that_fill_dev_shm_are_reported() -> None:
    problem, listed = run_apart(_full_of_others, shm=8 * MIB)
    assert "; most is taken by another/programs 8.0 MiB" in problem
    assert "8.0 MiB of it by files that are not shmacc's" in listed


def _fill(*, pipe: Pipe) -> None:
    with ConditionalAccumulator("f4", [2], "there") as acc:
        space = inspection.shared_memory_space()
        assert not {"bytes_scarce", "bytes_exhausted"} & {*_kinds()}
        filler = SHM / "filler"  # in the process's own /dev/shm
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.free - space.total // 20)
            assert "bytes_scarce" in _kinds()
            os.posix_fallocate(file.fileno(), 0, space.free - 8192)
        (found,) = [each for each in inspection.check_all() if each.severity is Severity.WRONG]
        assert found.kind == "bytes_exhausted"
        assert [each.kind for each in inspection.check("there")] == ["bytes_exhausted"]
        assert "(100 %)" in run("list").stderr
        with Terminal("watch", "there") as screen:
            screen.wait_for("memory 100 %")
        pipe.say()
        filler.unlink()
        acc.unlink()


@needs_own_shm
def test_full_shared_memory_is_reported() -> None:
    with Apart(_fill, shm=8 * MIB) as process:
        process.hear()
        process.result()


def test_memory_of_removed_segments_is_reported() -> None:
    with ConditionalAccumulator("f4", [MIB], "removed") as acc:
        acc.apply_grad(np.ones(MIB, "f4"))
        acc.unlink()
        (use,) = [
            use for use in inspection.unlinked_uses() if use.name == inspection.resolve("removed")
        ]
        assert use.bytes_reserved > 4 * MIB
        assert ask("list")["removed_but_used_bytes"] >= use.bytes_reserved
        assert "by removed segments that processes still use" in run("list").stderr
        notes = [f["problem"] for f in ask("check")["findings"] if f["kind"] == "removed_in_use"]
        assert any(f"{use.bytes_reserved / MIB:.1f} MiB" in problem for problem in notes)
        assert "shmacc_removed_but_used_bytes" in run("metrics").stdout


def _remove_in_own_shm() -> list[str]:
    removed = SHM / "removed"
    with removed.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8192)
        removed.unlink()
        return [use.name.system_name for use in inspection.unlinked_uses()]


@needs_own_shm
def test_memory_of_another_containers_segments_is_not_reported() -> None:
    with ConditionalAccumulator("f4", [2], "removed-elsewhere") as acc:
        acc.unlink()
        assert path_of("removed-elsewhere").name not in run_apart(_remove_in_own_shm, shm=MIB)


# -- segments whose names were removed ------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    run("clean", "--yes")


def finding(status: int) -> dict[str, Any]:
    findings: list[dict[str, Any]] = ask("check", status=status)["findings"]
    (found,) = [each for each in findings if each["kind"] == "removed_in_use"]
    return found


def split() -> float:
    """Return the metric `shmacc_removed_under_users` of the segment "new"; 0 if it has none."""
    metrics = {metric["name"]: metric["samples"] for metric in ask("metrics")["metrics"]}
    of_all = metrics["shmacc_removed_under_users"]
    return sum(float(each["value"]) for each in of_all if each["labels"]["name"] == "new")


@pytest.mark.parametrize("make", MAKERS)
def test_a_job_split_by_rm_over_two_segments_is_wrong(make: Callable[[], Any], crew: Crew) -> None:
    with make():
        old = start(crew, idle, "new")
        semaphore_of("new").unlink()
        path_of("new").unlink()
        alone = run("check", "new")  # there is no such name
        assert (alone.returncode, "still use" in alone.stdout) == (1, True)
        with make():
            found = finding(1)
            assert found["severity"] == "wrong"
            assert f"{old.pid}" in found["problem"]
            assert "the job is split" in found["problem"]
            assert "still use" in run("check", "--quiet").stdout
            kinds = [each.kind for each in inspection.check("new")]
            assert kinds.count("removed_in_use") == 1
            assert split() == 2


def by_command() -> None:
    assert run("remove", "new", "--yes", "--force").returncode == 0


@pytest.mark.parametrize("remove", [None, by_command])
@pytest.mark.parametrize("make", MAKERS)
def test_a_segment_removed_on_purpose_is_only_noted(
    make: Callable[[], Any], remove: Callable[[], None] | None
) -> None:
    with make() as made:
        (remove or made.unlink)()
        assert finding(0)["severity"] == "note"
        assert split() == 0
        assert run("check", "new").returncode == 3
