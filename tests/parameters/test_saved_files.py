"""`save` replaces a file in one step, keeps its permissions, and touches nothing else."""

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, needs_root
from helpers.at_every_point import Points, coming_between
from helpers.support import LONG

import shmacc
from shmacc import Parameters, _core, errors, optim


@pytest.fixture
def params() -> Iterator[Parameters]:
    """Yield the parameters to save."""
    with Parameters({"a": np.ones(2)}, "params", optimizer=optim.SGD(1)) as made:
        yield made
        made.unlink()


@pytest.fixture(params=["without a name", "beside it"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path. A save first writes a nameless file or, as on NFS, a file with a name."""
    if request.param == "beside it":
        _no_nameless_files(monkeypatch)
    return tmp_path / "checkpoint.npz"


def _no_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _core.open_file

    def refusing(path: Path, flags: int, mode: int = 0) -> _core.Descriptor:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return system(path, flags, mode)

    monkeypatch.setattr(_core, "open_file", refusing)


def modes(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_name_may_be_as_long_as_the_system_allows(params: Parameters, path: Path) -> None:
    path = path.with_name("ä" * 127 + "x")  # 255 bytes
    for _ in range(2):
        shmacc.save(path, {"params": params})
    assert list(path.parent.iterdir()) == [path]
    shmacc.load(path, {"params": params})


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o400, 0o4755])
def test_a_replaced_files_mode_stays(params: Parameters, path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    for _ in range(2):
        shmacc.save(path, {"params": params})
        assert modes(path) == mode


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_a_new_file_obeys_the_umask(params: Parameters, path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        shmacc.save(path, {"params": params})
    finally:
        os.umask(before)
    assert modes(path) == mode


@needs_root
def test_a_replaced_files_owner_stays(params: Parameters, path: Path) -> None:
    path.touch()
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    shmacc.save(path, {"params": params})
    found = path.stat()
    assert (found.st_uid, found.st_gid, modes(path)) == (1234, 2345, 0o640)


@needs_root
def test_permissions_of_a_group_are_not_given_to_another_group() -> None:
    def save_as_another(path: Path) -> tuple[int, int]:
        with Parameters({"a": np.ones(2)}, optimizer=optim.SGD(1)) as own:
            shmacc.save(path, {"params": own})
        return path.stat().st_gid, modes(path)

    with tempfile.TemporaryDirectory() as directory:  # other users cannot enter pytest's directory
        Path(directory).chmod(0o777)
        path = Path(directory) / "checkpoint.npz"
        path.touch()
        os.chown(path, 1234, 2345)
        path.chmod(0o664)
        with Apart(save_as_another, path, uid=1234) as process:
            assert process.result() == (1234, 0o604)


def test_a_saved_file_is_flushed_after_it_is_named_and_before_it_replaces_another(
    params: Parameters, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On btrfs a nameless file cannot be flushed, so the file is flushed when it has a name."""
    flushed: list[int] = []
    system = os.fsync

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_nlink and stat.S_ISREG(status.st_mode):
            assert not replaced or path.stat().st_ino == replaced
            flushed.append(status.st_ino)
        system(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replaced = 0
    for _ in range(2):
        shmacc.save(path, {"params": params})
        replaced = path.stat().st_ino
        assert flushed.pop() == replaced
        assert not flushed


@pytest.mark.parametrize("there", [True, False])
def test_a_symlink_stays_and_is_followed(params: Parameters, path: Path, *, there: bool) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    real = elsewhere / "real.npz"
    if there:
        real.write_text("old")
    path.symlink_to(Path("elsewhere") / "real.npz")
    shmacc.save(path, {"params": params})
    assert path.is_symlink()
    assert zipfile.is_zipfile(real)
    assert [each.name for each in elsewhere.iterdir()] == ["real.npz"]


# The system's devices are not tried: a save that replaced a device would break the machine.
def no_files(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield paths that are no regular files, and their kinds."""
    pipe, link = directory / "pipe", directory / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    yield pipe, stat.S_IFIFO
    yield link, stat.S_IFIFO
    yield directory, stat.S_IFDIR
    device = directory / "device"
    with contextlib.suppress(PermissionError):
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        yield device, stat.S_IFCHR


def test_a_path_that_is_no_file_is_never_replaced(params: Parameters, path: Path) -> None:
    for wrong, kind in no_files(path.parent):
        names = sorted(path.parent.iterdir())
        with pytest.raises(errors.InvalidArgumentError, match="must be a file"):
            shmacc.save(wrong, {"params": params})
        assert stat.S_IFMT(wrong.stat().st_mode) == kind
        assert sorted(path.parent.iterdir()) == names


def _descriptors() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_an_interruption_anywhere_leaves_nothing(params: Parameters, path: Path) -> None:
    """An interrupted save leaves no file beside the saved file, and no descriptor."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    shmacc.save(path, {"params": params})
    descriptors = _descriptors()
    for number in itertools.count(1):
        with (
            contextlib.suppress(KeyboardInterrupt),
            coming_between(interrupt, Points.INSTRUCTIONS, number) as seen,
        ):
            shmacc.save(path, {"params": params})
        assert _descriptors() == descriptors
        assert list(path.parent.iterdir()) == [path]
        if not seen.came:
            break
    assert number > 20


def test_another_programs_lock_on_the_folder_stops_no_save(params: Parameters, path: Path) -> None:
    """Programs lock a folder so that systemd-tmpfiles does not clean it up."""
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    for _ in range(2):
        shmacc.save(path, {"params": params}, timeout=LONG)
    os.close(lock)
    assert list(path.parent.iterdir()) == [path]
    shmacc.load(path, {"params": params})


def _stop_at(step: str, path: Path, name: str, *, pipe: Pipe) -> None:
    """Save; before `step` (if it is savez, after it) wait until the test kills this process."""

    def stopping(call: Any, *, after: bool) -> Any:
        def stopped(*args: Any, **how: Any) -> Any:
            if after:
                call(*args, **how)
            pipe.turn("at it")

        return stopped

    with Parameters.attach(name) as params:
        if step == "savez":
            np.savez = stopping(np.savez, after=True)
        elif step == "replace":
            Path.replace = stopping(Path.replace, after=False)  # type: ignore[method-assign]
        else:
            setattr(os, step, stopping(getattr(os, step), after=False))
        shmacc.save(path, {"params": params})


@pytest.mark.parametrize(
    ("step", "existing"),
    [("savez", True), ("fsync", False), ("link", True), ("link", False), ("replace", True)],
)
def test_a_killed_save_leaves_no_other_file(
    params: Parameters, tmp_path: Path, step: str, *, existing: bool
) -> None:
    path = tmp_path / "checkpoint.npz"
    if existing:
        shmacc.save(path, {"params": params})
    before = path.read_bytes() if existing else None
    with Apart(_stop_at, step, path, "params").ready() as process:
        process.kill()
    assert (path.read_bytes() if path.exists() else None) == before
    if step != "replace":  # between link and replace, a file stays until the next save
        assert list(tmp_path.iterdir()) == [path] * existing
    shmacc.save(path, {"params": params})
    assert list(tmp_path.iterdir()) == [path]
    shmacc.load(path, {"params": params})


def test_processes_that_save_at_once_all_succeed(params: Parameters, tmp_path: Path) -> None:
    def save_often(path: Path) -> None:
        with Parameters.attach("params") as own:
            for _ in range(20):
                shmacc.save(path, {"params": own})

    path = tmp_path / "checkpoint.npz"
    with contextlib.ExitStack() as crew:
        started = [crew.enter_context(Apart(save_often, path)) for _ in range(3)]
        for process in started:
            process.result()
    assert list(tmp_path.iterdir()) == [path]
    shmacc.load(path, {"params": params})


@pytest.mark.parametrize("step", ["link", "replace"])
def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(
    params: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """For example, a container may mount a single file."""
    path = tmp_path / "checkpoint.npz"
    shmacc.save(path, {"params": params})

    def busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    owner: Any = Path if step == "replace" else os
    monkeypatch.setattr(owner, step, busy)
    with pytest.raises(OSError, match="busy"):
        shmacc.save(path, {"params": params})
    assert list(tmp_path.iterdir()) == [path]
