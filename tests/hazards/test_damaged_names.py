"""Something that is not a segment has a segment's name: opening it raises a clear error at once."""

import fcntl
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe
from helpers.lock_holder import hold_byte
from helpers.segment_file import SegmentFile
from helpers.support import path_of

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._base import names
from shmacc.inspection import SegmentState


def _socket(path: Path) -> None:
    # The path is too long for a socket's address; a path through a descriptor is short enough.
    directory = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{directory}/s-{os.getpid()}")
    os.close(directory)
    (path.parent / f"s-{os.getpid()}").rename(path)


def _bytes(content: bytes, size: int | None = None) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        if size is not None:
            os.truncate(path, size)

    return make


NOT_OURS: Final[dict[str, Callable[[Path], Any]]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("/dev/shm/nowhere"),  # noqa: S108
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to(__file__),
    "a socket": _socket,
    "random bytes": _bytes(os.urandom(1 << 16)),
    "magic alone": _bytes(b"shmacc\r\n"),
    "magic and zeros": _bytes(b"shmacc\r\n", layout.FILE_SIZE),
    "zeros, then something": _bytes(bytes(2048) + b"something"),
}
UNFINISHED: Final = {
    "empty": _bytes(b""),
    "zeros": _bytes(bytes(8192)),
    "zeros of full length": _bytes(b"", layout.FILE_SIZE),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_a_file_that_is_no_segment_is_refused_and_left_alone(what: str) -> None:
    path = path_of("odd")
    NOT_OURS[what](path)
    before = path.lstat()
    for look in (
        shmacc.attach,
        lambda name: ConditionalAccumulator("f4", (), name), inspection.describe,
        inspection.summarise_values, inspection.cancel, inspection.remove,
    ):  # fmt: skip
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
    for field in ("st_ino", "st_size", "st_mtime_ns"):
        assert getattr(after, field) == getattr(before, field)
    if what == "a directory":
        with pytest.raises(errors.ShmaccError):
            inspection.remove("odd", force=True)
        path.rmdir()
        return
    assert inspection.remove("odd", force=True) == (names.segment_name("odd").system_name,)
    with ConditionalAccumulator("f4", (), "odd", unlink_on_close=True) as acc:
        assert acc.apply_grad(1.0)


@pytest.mark.parametrize("what", UNFINISHED)
def test_an_unfinished_file_without_a_maker_counts_as_no_segment(what: str) -> None:
    UNFINISHED[what](path_of("half"))
    with pytest.raises(errors.NotFoundError):
        shmacc.attach("half")
    if not path_of("half").exists():
        UNFINISHED[what](path_of("half"))
    with ConditionalAccumulator("f4", (), "half", unlink_on_close=True) as acc:
        assert acc.apply_grad(1.0)
        with ConditionalAccumulator.attach("half") as same:
            assert same.take_grad(1, timeout=0) == 1.0


def _remove(path: Path, *, pipe: Pipe) -> None:
    """Remove the file as an opener does, but slowly."""
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, layout.NAME_BYTE)
        pipe.turn("held")
        path.unlink()


OPENERS: Final[dict[str, Callable[[], Any]]] = {
    "attach": lambda: shmacc.attach("half"),
    "create": lambda: ConditionalAccumulator("f4", (), "half"),
    "create, no other": lambda: ConditionalAccumulator("f4", (), "half", if_exists="error"),
    "replace": lambda: ConditionalAccumulator("f4", (), "half", if_exists="replace"),
}


def _open(how: str, *, pipe: Pipe) -> bool:
    pipe.say("opens")
    try:
        with OPENERS[how]() as acc:
            acc.unlink()
    except errors.NotFoundError:
        return False
    return True


@pytest.mark.parametrize("how", OPENERS)
def test_a_file_that_is_being_removed_counts_as_no_segment(how: str) -> None:
    path_of("half").touch()
    with Apart(_remove, path_of("half")).ready() as remover:
        with Apart(_open, how).ready() as opener:
            remover.say()
            assert opener.result() is (how != "attach")
        remover.result()


@pytest.mark.parametrize(("what", "byte"), [
    ("empty", 0), ("zeros", 4096), ("zeros of full length", layout.lane_byte()),
    ("empty", layout.PRESENCE_BYTE + 7),
])  # fmt: skip
def test_a_file_that_a_living_process_is_making_is_left_alone(what: str, byte: int) -> None:
    path = path_of("making")
    UNFINISHED[what](path)
    inode = path.stat().st_ino
    with Apart(hold_byte, str(path), byte).ready() as maker:
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
        # Now the file's maker is dead, so nobody will finish the file.
        with ConditionalAccumulator("f4", (), "making", unlink_on_close=True) as acc:
            assert path.stat().st_ino != inode
            assert acc.apply_grad(1.0)


def _of_version_1(path: Path) -> None:
    path.write_bytes(layout.header_of_version(1))
    os.truncate(path, layout.FILE_SIZE)


def _of_the_next_version(path: Path) -> None:
    ConditionalAccumulator("f4", (), "odd").close()
    with SegmentFile(path) as file:
        config = file.record("config")
        config.version += 1
        file.put("config", config)


@pytest.mark.parametrize(
    ("make", "version"), [(_of_version_1, 1), (_of_the_next_version, layout.VERSION + 1)]
)
def test_segments_of_other_versions_are_refused(make: Callable[[Path], None], version: int) -> None:
    make(path_of("odd"))
    which = "an older" if version == 1 else "a newer"
    words = (
        f"by {which} version of shmacc, with layout version {version}; "
        f"this one reads version {layout.VERSION}"
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
