"""What is no segment at all stands under a segment's name: a clear error, and no hang."""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._layout import names
from shmacc.inspection import SegmentState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Pipe


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _dangling_link(path: Path) -> None:
    path.symlink_to("/dev/shm/nowhere")  # noqa: S108


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_a_file(path: Path) -> None:
    path.symlink_to(__file__)


def _socket(path: Path) -> None:
    # The name is longer than what an address holds; its directory as a descriptor is not.
    directory = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{directory}/s-{os.getpid()}")
    os.close(directory)
    (path.parent / f"s-{os.getpid()}").rename(path)


def _text(path: Path) -> None:
    path.write_text("this is somebody's letter\n")


def _one_byte(path: Path) -> None:
    path.write_bytes(b"\0")


def _random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(1 << 16))


def _magic_alone(path: Path) -> None:
    path.write_bytes(b"shmacc\r\n")


def _magic_and_nothing_else(path: Path) -> None:
    path.write_bytes(b"shmacc\r\n")
    os.truncate(path, layout.FILE_SIZE)


def _zeros_then_something(path: Path) -> None:
    path.write_bytes(bytes(2048) + b"something")


def _zero_length(path: Path) -> None:
    path.touch()


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(8192))


def _zeros_of_full_length(path: Path) -> None:
    path.touch()
    os.truncate(path, layout.FILE_SIZE)


NOT_OURS: Final[tuple[Callable[[Path], None], ...]] = (
    _directory,
    _fifo,
    _dangling_link,
    _link_to_itself,
    _link_to_a_device,
    _link_to_a_file,
    _socket,
    _text,
    _random_bytes,
    _magic_alone,
    _magic_and_nothing_else,
    _zeros_then_something,
)
UNFINISHED: Final = (_zero_length, _zeros, _zeros_of_full_length)


def _path(name: str) -> Path:
    return Path(names.segment_name(name).path)


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("make", NOT_OURS)
def test_what_is_not_ours_is_refused_and_left_alone(make: Callable[[Path], None]) -> None:
    path = _path("odd")
    make(path)
    before = path.lstat()
    try:
        with pytest.raises(errors.DataLossError, match="odd"):
            shmacc.attach("odd")
        with pytest.raises(errors.DataLossError, match="odd"):
            ConditionalAccumulator("f4", (), "odd")
        for look in (
            inspection.describe,
            inspection.summarise_values,
            inspection.cancel,
            inspection.remove,
        ):
            with pytest.raises(errors.DataLossError, match="odd"):
                look("odd")
        assert inspection.check("odd")
        (summary,) = inspection.list_segments(namespace=names.current_namespace())
        assert summary.state in {SegmentState.DAMAGED, SegmentState.OTHER_VERSION}
        (leftover,) = inspection.leftovers(namespace=names.current_namespace())
        assert not leftover.removable
        with pytest.raises(errors.DataLossError, match="odd"):
            inspection.clean(leftover)
        after = path.lstat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
    finally:
        _clear(path)


@pytest.mark.parametrize("make", [make for make in NOT_OURS if make is not _directory])
def test_it_can_be_removed_by_force(make: Callable[[Path], None]) -> None:
    make(_path("odd"))
    assert inspection.remove("odd", force=True) == (names.segment_name("odd").system_name,)
    with ConditionalAccumulator("f4", (), "odd") as acc:
        assert acc.apply_grad(1.0)
        acc.unlink()


def test_a_directory_is_not_removed_by_force() -> None:
    path = _path("odd")
    path.mkdir()
    try:
        with pytest.raises(errors.ShmaccError):
            inspection.remove("odd", force=True)
        assert path.is_dir()
    finally:
        path.rmdir()


@pytest.mark.parametrize("make", UNFINISHED)
def test_what_nobody_finishes_is_nothing(make: Callable[[Path], None]) -> None:
    make(_path("half"))
    with pytest.raises(errors.NotFoundError):
        shmacc.attach("half")
    if not _path("half").exists():
        make(_path("half"))
    with ConditionalAccumulator("f4", (), "half") as acc:
        assert acc.apply_grad(1.0)
        with ConditionalAccumulator.attach("half") as same:
            assert same.take_grad(1, timeout=0) == 1.0
        acc.unlink()


@contextmanager
def removing(name: str) -> Iterator[None]:
    """Leave nothing under this name, whatever the test comes to."""
    try:
        yield
    finally:
        with suppress(errors.NotFoundError):
            inspection.remove(name, force=True)


def _hold(path: Path, byte: int, *, pipe: Pipe) -> None:
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, byte)
    pipe.say("held")
    pipe.hear()


@pytest.mark.parametrize("byte", [0, 4096, layout.lane_byte(), layout.PRESENCE_BYTE + 7])
@pytest.mark.parametrize("make", UNFINISHED)
def test_what_a_living_process_is_making_is_left_alone(
    make: Callable[[Path], None], byte: int
) -> None:
    path = _path("making")
    make(path)
    inode = path.stat().st_ino
    with removing("making"), Apart(_hold, path, byte) as maker:
        maker.hear()
        for opener in (shmacc.attach, lambda name: ConditionalAccumulator("f4", (), name)):
            with pytest.raises(errors.DataLossError, match="unfinished file that a process holds"):
                opener("making")
        (summary,) = inspection.list_segments(namespace=names.current_namespace())
        assert summary.state is SegmentState.STARTING
        (leftover,) = inspection.leftovers(namespace=names.current_namespace())
        assert not leftover.removable
        assert not inspection.clean(leftover)
        assert path.stat().st_ino == inode
        maker.kill()
        # Now it is proved that nobody finishes it.
        with ConditionalAccumulator("f4", (), "making") as acc:
            assert path.stat().st_ino != inode
            assert acc.apply_grad(1.0)


def _of_version_1(path: Path) -> None:
    path.write_bytes(layout.header_of_version_1(b"odd"))
    os.truncate(path, layout.FILE_SIZE)


def _of_the_next_version(path: Path) -> None:
    ConditionalAccumulator("f4", (), "odd").close()
    with SegmentFile(path) as file:
        config = file.record("config")
        config.version += 1
        file.put("config", config)


@pytest.mark.parametrize(
    ("make", "version"),
    [(_of_version_1, 1), (_of_the_next_version, layout.VERSION + 1)],
)
def test_another_version_says_so(make: Callable[[Path], None], version: int) -> None:
    make(_path("odd"))
    reader = "shmacc 1.0" if version == 1 else "a newer shmacc"
    words = (
        f"layout version {version}, which {reader} reads; this one reads version {layout.VERSION}"
    )
    opened: tuple[Callable[[str], Any], ...] = (
        shmacc.attach,
        lambda name: ConditionalAccumulator("f4", (), name),
        inspection.describe,
    )
    for opener in opened:
        with pytest.raises(errors.DataLossError, match=words) as caught:
            opener("odd")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.version, str(again)) == (version, str(caught.value))
    (summary,) = inspection.list_segments(namespace=names.current_namespace())
    assert summary.state is SegmentState.OTHER_VERSION
    assert words in summary.detail
    with pytest.raises(errors.DataLossError, match=words):
        inspection.remove("odd")
    inspection.remove("odd", force=True)
