"""The system withholds something: inodes, permission to write to /dev/shm, facts in /proc.

A call that cannot work raises an error that names the cause, and leaves nothing half made. Facts
that cannot be seen are reported as unknown.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import inspect_tool, own_shm
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, apart, needs_own_shm, needs_root, run_apart
from helpers.lock_holder import held
from helpers.own_shm import BIND, MIB, READ_ONLY, REMOUNT
from helpers.support import path_of

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection, testing
from shmacc._base import names
from shmacc.inspection import Severity

pytestmark = needs_own_shm

SIZE: Final = 16 * MIB
SHM: Final = Path(names.SHM_DIRECTORY)
LOCKS: Final = Path("/proc/locks")


def make(name: str = "there", mode: int | None = None) -> SparseConditionalAccumulator:
    acc = SparseConditionalAccumulator("f4", None, name, reduction_type="SUM", mode=mode)
    acc.apply_grad([1, 2], [[1.0], [2.0]])
    return acc


def _make_and_stay(*, pipe: Pipe) -> None:
    with make():
        pipe.turn()


# --- inodes ------------------------------------------------------------------------------------


def _leave_inodes(count: int) -> None:
    free = os.statvfs(SHM).f_favail
    for number in range(free - count):
        (SHM / f"filler-{count}-{number}").touch()
    assert os.statvfs(SHM).f_favail == count


@contextlib.contextmanager
def says_it_is_inodes() -> Iterator[None]:
    with pytest.raises(errors.ResourceExhaustedError, match=r"inodes.*nr_inodes") as caught:
        yield
    assert "ulimit" not in str(caught.value)
    assert "is full" not in str(caught.value)
    assert caught.value.needed is None


def _attach_without_inodes(*, pipe: Pipe) -> None:
    pipe.hear()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  descriptors
    with says_it_is_inodes():
        shmacc.attach("there")
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@apart(shm=SIZE)
def test_errors_without_free_inodes_name_them_and_leave_nothing() -> None:
    own_shm.mount("tmpfs", str(SHM), "tmpfs", options=f"size={SIZE},nr_inodes=40,mode=1777")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: SparseConditionalAccumulator("f4", None, "new"),
        lambda: ConditionalAccumulator("f4"),
    )
    # The stranger is forked first, so that it inherits no handle.
    with Apart(_attach_without_inodes) as stranger, make() as acc:
        before = testing.leaked_names()
        # A segment needs one inode, and its semaphore another.
        for left, call in itertools.product((3, 2, 1, 0), calls):
            _leave_inodes(left)
            if left >= 2:
                with call() as made:
                    made.unlink()
            else:
                with says_it_is_inodes():
                    call()
            assert testing.leaked_names() == before
            assert os.statvfs(SHM).f_favail == left

        # An existing segment needs no more inodes, however it grows and whoever attaches.
        assert acc.apply_grad(range(5000), np.ones((5000, 1), "f4"))
        (finding,) = inspection.check("there")
        assert (finding.subject, finding.kind) == (str(SHM), "files_exhausted")
        assert run_apart(lambda: shmacc.attach("there").stats().num_accumulated) == 2
        assert acc.take(2, timeout=0).count == 2

        # A process that finds no semaphore cannot make another one, and says so.
        for semaphore in SHM.glob("sem.*"):
            semaphore.unlink()  # this process still has it mapped
        assert os.statvfs(SHM).f_favail == 0
        stranger.finish()
        assert acc.stats().attached == 1
        assert acc.apply_grad([1], [[1.0]], local_step=1)
        acc.unlink()


# --- a read-only /dev/shm ------------------------------------------------------------------------


def _on_a_read_only_one() -> None:
    # A container whose volume is mounted read-only has such a /dev/shm.
    own_shm.enter_own_namespace()
    own_shm.mount("none", str(SHM), flags=BIND | REMOUNT | READ_ONLY)
    before = testing.leaked_names()
    assert len(before) == 7
    damaged = names.segment_name("damaged").system_name
    calls: list[Callable[[], Any]] = [
        lambda: ConditionalAccumulator("f4", (), "new"), lambda: ConditionalAccumulator("f4", ()),
        lambda: SparseConditionalAccumulator("f4", None, "there"), lambda: shmacc.attach("there"),
        lambda: inspection.cancel("there"), lambda: inspection.remove("orphaned"),
        lambda: inspection.remove("there", force=True),
        lambda: inspection.remove(damaged, force=True),
    ]  # fmt: skip
    removable = [leftover for leftover in inspection.leftovers() if leftover.removable]
    assert len(removable) == 2  # a segment and a semaphore
    calls += [partial(inspection.clean, leftover) for leftover in removable]
    for call in calls:
        with pytest.raises(errors.PermissionDeniedError, match=r"(?i)read-only") as caught:
            call()
        assert "ulimit" not in str(caught.value)
        assert testing.leaked_names() == before

    # Inspection still works.
    states = {found.name.shared_name: found.state for found in inspection.list_segments()}
    assert states == {"there": "sound", "orphaned": "orphaned", "damaged": "damaged"}
    assert inspection.describe("there").stats.num_accumulated == 1
    assert inspection.check("there") == ()
    assert [found.row for found in inspection.most_touched("there", 1)[0]] == [1]
    assert inspection.summarise_values("there").largest == 2
    for arguments in ("check", "clean --yes", "remove orphaned"):
        assert inspect_tool.run_here(*arguments.split())[0] == 1
    assert testing.leaked_names() == before


@apart(shm=SIZE)
def test_errors_on_a_read_only_dev_shm_name_it_and_leave_nothing() -> None:
    make("orphaned").close()
    make("damaged").close()
    with path_of("damaged").open("r+b") as file:
        file.seek(layout.ROUNDS)
        file.write(b"damage" * 300)
    (SHM / f"sem.{path_of('nobodys').name}.0123456789abcdef").write_bytes(bytes(32))
    with Apart(_make_and_stay).ready():
        run_apart(_on_a_read_only_one)


# --- what /proc tells ----------------------------------------------------------------------------


@pytest.mark.skipif(not LOCKS.exists(), reason="needs /proc/locks, to hide it")
@pytest.mark.parametrize(
    ("byte", "what"), [(layout.lane_byte(), "the lock"), (layout.NAME_BYTE, "the name")]
)
@apart(shm=SIZE)
def test_masked_proc_locks_hide_no_lock(byte: int, what: str) -> None:
    """Containers mask /proc/locks. The lock itself tells who holds it."""
    own_shm.mount("/dev/null", str(LOCKS), flags=BIND)
    assert LOCKS.read_bytes() == b""
    with Apart(_make_and_stay).ready() as other:
        assert inspection.check("there") == ()
        with held("there", byte) as holder:
            seen = inspection.describe("there").lock
            assert (seen.pid, seen.name_pid)[byte == layout.NAME_BYTE] == holder.pid
            (found,) = inspection.check("there")
            assert found.severity is Severity.WRONG
            assert f"pid {holder.pid} " in found.problem
            assert f"holds {what}" in found.problem
            assert "is stopped" in found.problem
            (summary,) = inspection.list_segments()
            assert (summary.state, summary.attached_alive) == ("sound", 1)
        other.finish()


def _look_without_others(holder: int) -> None:
    assert not os.access(f"/proc/{holder}/stat", os.R_OK)
    seen = inspection.describe("there")
    # The kernel's locks show who lives, whatever /proc shows.
    assert [(each.alive, each.condition) for each in seen.processes] == [(True, "")]
    assert seen.lock.name_pid == holder
    for found in (inspection.check("there"), inspection.check_all(), inspection.check_all("the*")):
        (finding,) = found
        assert (finding.subject, finding.severity) == ("/proc", Severity.NOTE)
        assert "hidepid" in finding.problem
    status, said = inspect_tool.run_here("check", "there")
    assert status == 0
    assert "hidepid" in said


def _hide_processes() -> bool:
    try:
        own_shm.mount("proc", "/proc", "proc", options="hidepid=2")
    except OSError:
        return False
    with contextlib.ExitStack() as stack:
        acc = stack.enter_context(make(mode=0o666))
        holder = stack.enter_context(held("there", layout.NAME_BYTE))
        (finding,) = inspection.check("there")
        assert finding.severity is Severity.WRONG, "root sees it"
        # Some users cannot read the files that the command imports, so it runs in this process.
        assert "is stopped" in inspect_tool.run_here("check", "there")[1]
        run_apart(_look_without_others, holder.pid, uid=4711)
        holder.kill()
        acc.unlink()
    return True


@needs_root
def test_check_does_not_call_hidden_processes_healthy() -> None:
    """With /proc hidden, a check cannot see whether processes are stopped."""
    if not run_apart(_hide_processes, shm=SIZE):
        pytest.skip("this machine does not let us mount another /proc")
