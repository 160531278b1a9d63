"""A process that inspects a segment keeps its own record locks on it.

When a process closes any descriptor of a file, the kernel drops all its record locks on that file:
its proof of being attached, and its ownership of the lock. So only one place in the extension may
open a segment's file, because it knows who else relies on the locks.
"""

import contextlib
import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import inspect_tool
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.busy import busy
from helpers.segment_file import SegmentFile
from helpers.support import path_of, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection
from shmacc._base import names

pytestmark = pytest.mark.threads

ROUNDS: Final = 12
SHM: Final = Path(names.SHM_DIRECTORY)
FLOCK: Final = "hhqqi4x"


def make_segments_in_all_states() -> list[Any]:
    """Make segments in all states and other files with such names; return handles to keep."""
    kept: list[Any] = [
        SparseConditionalAccumulator("f4", None, "sparse"),
        ConditionalAccumulator("f4", (), "dense"),
        ConditionalAccumulator("f4", ()),
        ConditionalAccumulator("f4", (), "removed"),
        ConditionalAccumulator("f4", (), "damaged"),
    ]
    kept[0].apply_grad([1], [1.0])
    kept[1].apply_grad(1.0)
    kept[3].unlink()
    run_apart(lambda: SegmentFile(path_of("damaged")).write(layout.ROUNDS, b"damage" * 300))
    ConditionalAccumulator("f4", (), "orphaned").close()
    path_of("empty").touch()
    path_of("zeros").write_bytes(bytes(8192))
    path_of("text").write_text("no segment")
    path_of("link").symlink_to(path_of("dense"))
    path_of("directory").mkdir()
    os.mkfifo(path_of("pipe"))
    (SHM / f"sem.{path_of('nobodys').name}.0123456789abcdef").write_bytes(bytes(32))
    return kept


def remove_them() -> None:
    for file in SHM.glob(f"*{os.environ[names.NAMESPACE_VARIABLE]}:*"):
        file.rmdir() if file.is_dir() else file.unlink()


def look_at_all() -> None:
    """Call every function of inspection on every name; damaged segments raise errors."""
    namespace = names.current_namespace()
    inspection.unlinked_uses()
    inspection.shared_memory_space()
    found = inspection.list_segments(namespace=namespace)
    inspection.check_all(namespace=namespace)
    for summary in found:
        name = summary.name.system_name
        for look in (
            inspection.resolve, inspection.describe, inspection.check, inspection.cancel,
            inspection.summarise_values, lambda name: inspection.most_touched(name, 3),
            inspection.remove,
        ):  # fmt: skip
            with contextlib.suppress(errors.ShmaccError):
                look(name)


VERBS: Final = (
    "list --json",
    *(f"show {name} --values --rows 3" for name in ("sparse", "dense", "damaged", "empty")),
    *("check", "check dense", "check empty", "metrics", "watch --count 1 --interval 0.05 dense"),
    *("cancel dense --yes", "clean", "clean --yes", "remove text dense --force --yes"),
)


def _record_opens() -> list[str]:
    kept = make_segments_in_all_states()
    opened: list[str] = []
    files = {f"{SHM}/{name}" for name in os.listdir(SHM)}  # noqa: PTH208
    watching = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(args[0], str) and args[0] in files:
            opened.append(args[0])

    sys.addaudithook(hook)
    try:
        look_at_all()
        for arguments in VERBS:
            inspect_tool.run_here(*arguments.split())
        for summary in inspection.list_segments(namespace=names.current_namespace()):
            with contextlib.suppress(errors.ShmaccError):
                inspection.remove(summary.name.system_name, force=True)
    finally:
        watching = False
        remove_them()
        for acc in kept:
            acc.close()
    return opened


def test_python_opens_no_file_of_a_segment() -> None:
    assert run_apart(_record_opens) == []


def is_attached(fd: int) -> bool:
    """Return whether another process is attached to the file: ask the kernel about its locks."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, layout.PRESENCE_BYTE, 0, 0)
    kind, *_ = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)


def _inspect(*, pipe: Pipe) -> int:
    acc = ConditionalAccumulator("f8", (), "watched", reduction_type="SUM")
    acc.apply_grad(1.0)
    pipe.turn("attached")
    with busy(lambda: _apply_to(acc)):
        for _ in range(ROUNDS):
            _look_and_clean()
    pipe.turn("looked")
    assert acc.stats().applied > 1
    return int(acc.take_partial(1).count)


def _apply_to(acc: ConditionalAccumulator) -> None:
    # While the segment's name leads to another file, a call may raise an error that says so.
    with contextlib.suppress(errors.NotFoundError):
        acc.apply_grad(1.0)


def _look_and_clean() -> None:
    own = names.current_namespace()
    for look in (
        lambda: inspection.list_segments(namespace=own),
        lambda: inspection.check("watched"),
        lambda: inspection.describe("watched"),
        lambda: shmacc.attach("watched").close(),
    ):
        # The name may lead to any of the files at this moment.
        with contextlib.suppress(errors.ShmaccError):
            look()
    for leftover in inspection.leftovers(namespace=own):
        with contextlib.suppress(errors.ShmaccError):
            inspection.clean(leftover)
    for name in ("other", "unfinished"):
        with contextlib.suppress(errors.ShmaccError):
            inspection.remove(name, force=True)


def _come_and_go(*, pipe: Pipe) -> None:
    """Let the watched name lead to an unfinished file now and then; make others, too."""
    watched, aside = path_of("watched"), SHM / f"aside-{names.current_namespace()}"
    pipe.say()
    while not pipe.poll():
        watched.rename(aside)
        watched.touch()
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):  # the file was cleaned already
                empty = held.enter_context(watched.open("r+b"))
                # A remover looks at the name with this lock held.
                fcntl.lockf(empty, fcntl.LOCK_EX, 1, layout.NAME_BYTE)
            aside.rename(watched)
        path_of("unfinished").write_bytes(bytes(4096))
        with (
            contextlib.suppress(errors.ShmaccError),
            ConditionalAccumulator("f8", (), "other") as made,
        ):
            made.apply_grad(1.0)


def test_a_process_that_inspects_stays_attached() -> None:
    """The process stays attached even while a name leads to one file, then to another."""
    with Apart(_inspect).ready() as inspector:
        fd = os.open(path_of("watched"), os.O_RDWR)
        try:
            assert is_attached(fd)
            with Apart(_come_and_go).ready() as other:
                inspector.say()
                looks = 0
                while not inspector.pipe.poll():
                    assert is_attached(fd)
                    looks += 1
                assert looks > ROUNDS
                other.finish()
            inspector.hear()
            assert inspector.finish() > 1
        finally:
            os.close(fd)
    remove_them()


def test_inspection_opens_no_other_link_to_an_attached_file() -> None:
    """A link may have a semaphore's name; only files that can be semaphores are opened."""
    acc = ConditionalAccumulator("f8", (), "linked")
    (semaphore,) = SHM.glob(f"sem.{path_of('linked').name}.*")
    semaphore.unlink()
    semaphore.hardlink_to(path_of("linked"))
    (SHM / f"sem.{path_of('linked').name}.0123456789abcdef").hardlink_to(path_of("linked"))
    (SHM / f"sem.{path_of('gone').name}.0123456789abcdef").hardlink_to(path_of("linked"))
    try:
        look_at_all()
        shmacc.attach("linked").close()
        for leftover in inspection.leftovers(namespace=names.current_namespace()):
            inspection.clean(leftover)
        assert run_apart(lambda: inspection.describe("linked").summary.attached_alive) == 1
        assert run_apart(lambda: shmacc.attach("linked").stats().attached) == 2
        assert run_apart(lambda: inspection.describe("linked").summary.attached_alive) == 1
        until(lambda: acc.stats().attached == 1)
        acc.unlink()
        acc.close()
    finally:
        remove_them()
