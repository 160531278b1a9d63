"""Other programs can open segments and semaphores as POSIX objects by their POSIX names."""

import os
import sys
from pathlib import Path

import posix_ipc
import pytest
from helpers.apart import needs_root, run_apart

import shmacc
from shmacc import inspection
from shmacc._base import names


def _file_names(namespace: str) -> tuple[str, str]:
    segment, semaphore = sorted(names.files_in(namespace), key=len)
    return segment, semaphore.removeprefix("sem.")


def _open_both(namespace: str) -> None:
    """Open both with posix_ipc alone, in a process that has nothing attached."""
    segment, semaphore = _file_names(namespace)
    memory = posix_ipc.SharedMemory(f"/{segment}")
    assert os.pread(memory.fd, 6, 0) == b"shmacc"
    memory.close_fd()
    permit = posix_ipc.Semaphore(f"/{semaphore}")
    assert permit.value == 1
    permit.acquire(0)  # as if its holder had died: the lock is free, as no process locks the file
    permit.close()


def test_posix_ipc_alone_opens_a_segment_and_its_semaphore(namespace: str) -> None:
    with shmacc.ConditionalAccumulator("f4", (), "w:0/grad_accum") as acc:
        run_apart(_open_both, namespace)
        assert inspection.describe("w:0/grad_accum").lock.tokens == 0
        assert acc.apply_grad(1.0)
        assert inspection.describe("w:0/grad_accum").lock.tokens == 1
        assert acc.take_grad(1) == 1.0
        acc.unlink()


def test_a_file_that_is_no_semaphore_has_no_value(namespace: str) -> None:
    with shmacc.ConditionalAccumulator("f4", (), "emb") as acc:
        path = Path("/dev/shm", f"sem.{_file_names(namespace)[1]}")  # noqa: S108
        content = path.read_bytes()
        for wrong in "too short", "a directory", "a link":
            path.unlink()
            if wrong == "a directory":
                path.mkdir()
            elif wrong == "a link":
                path.symlink_to("/dev/null")
            else:
                path.write_bytes(content[:16])
            assert inspection.describe("emb").lock.tokens is None
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(content)
        assert inspection.describe("emb").lock.tokens == 1
        acc.unlink()


@needs_root
def test_a_user_who_may_only_read_sees_all_but_the_semaphore() -> None:
    with shmacc.ConditionalAccumulator("f4", (), "emb", mode=0o644) as acc:

        def look() -> None:
            found = inspection.describe("emb")
            assert (found.lock.tokens, found.lock.held) == (None, False)

        run_apart(look, uid=12345)
        acc.unlink()


def test_only_semaphores_need_posix_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "posix_ipc", None)
    with shmacc.ConditionalAccumulator("f4", (), "emb") as acc:
        assert inspection.describe("emb").lock.tokens is None
        acc.unlink()
