"""Memory of large results is reused, and the kernel may reclaim it in between."""

import contextlib
import ctypes
import gc
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import pytest
from helpers import own_shm
from helpers.apart import needs_own_shm, run_apart
from helpers.own_shm import BIND
from helpers.support import SANITIZED

from shmacc import _core

LARGE = 40 << 20  # bytes; malloc returns blocks of more than 32 MiB to the kernel


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Free the memory that earlier tests kept: an impossible request releases it."""
    gc.collect()
    with pytest.raises(MemoryError):
        _core.memory(1 << 60)


def lazily_free(address: int) -> int:
    """Return the bytes at this address that the kernel may reclaim."""
    overlaps, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            overlaps = int(match[1], 16) < address + LARGE and address < int(match[2], 16)
        elif overlaps and line.startswith("LazyFree:"):
            total += int(line.split()[1]) << 10
    return total


def filled(number: int, size: int = LARGE) -> np.ndarray:
    memory = _core.memory(size)
    memory[:] = number
    return memory


def test_a_dropped_results_memory_is_reused_and_the_kernel_may_take_it() -> None:
    first = filled(1)
    address = first.ctypes.data
    before = lazily_free(address)
    view = first[5:]
    del first
    assert lazily_free(address) == before, "a view of it is in use"
    del view
    assert lazily_free(address) >= before + LARGE - (4 << 20)
    again = filled(2)
    assert again.ctypes.data == address
    assert lazily_free(address) <= before + (4 << 20)


def test_results_in_use_do_not_share_memory() -> None:
    held = [filled(number) for number in range(6)]
    for number in range(0, 6, 2):
        held[number] = held[number + 1]  # drops the piece that was there
        held[number] = filled(10 + number)
    assert [int(piece[0]) for piece in held] == [10, 1, 12, 3, 14, 5]
    assert all((piece == piece[0]).all() for piece in held)


def test_a_small_result_does_not_reuse_a_large_piece() -> None:
    large = filled(1, 3 * LARGE)
    address = large.ctypes.data
    del large
    small, other = filled(2), filled(3, 2 * LARGE)
    assert small.ctypes.data != address
    assert other.ctypes.data == address


@pytest.mark.skipif(
    SANITIZED, reason="AddressSanitizer itself needs all the address space there is"
)
def test_kept_memory_is_freed_when_a_result_needs_it() -> None:
    kept = filled(1, 4 * LARGE)
    del kept
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGE, before[1]))
    try:
        held = filled(2, LARGE * 3 // 2)  # too small to reuse the kept piece
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (held == 2).all()


def allocated() -> int:
    """Return the bytes that malloc has allocated, in all of its arenas."""

    class Mallinfo2(ctypes.Structure):
        _fields_: ClassVar = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo2
    found = mallinfo()
    return int(found.field_4 + found.field_7)  # hblkhd and uordblks


needs_mallinfo = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs the mallinfo2 of glibc 2.33"
)


def _keeps_nothing_any_more(forbid: Callable[[], None]) -> None:
    before = allocated()
    filled(1)
    assert allocated() - before >= LARGE, "it is kept"
    forbid()
    filled(2, 2 * LARGE)
    assert allocated() - before < LARGE // 2, "neither that, nor the one that was kept earlier"
    filled(3)
    assert allocated() - before < LARGE // 2


def _is_limited_in(resource_number: int) -> None:
    def limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource_number, (used + 4 * LARGE, resource.RLIM_INFINITY))

    _keeps_nothing_any_more(limit)
    for _ in range(2):
        np.ones(4 * LARGE, np.uint8)  # NumPy can still allocate


@needs_mallinfo
@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer itself needs the address space")
@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_nothing_is_kept_where_the_address_space_is_limited(limit: int) -> None:
    run_apart(_is_limited_in, limit)


def _locks_all() -> bool:
    def lock_all() -> None:
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        current_and_future = 3
        if ctypes.CDLL(None).mlockall(current_and_future) != 0:
            raise PermissionError

    try:
        _keeps_nothing_any_more(lock_all)
    except PermissionError:
        return False
    return True


@needs_mallinfo
@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer's shadow does not fit into memory")
def test_nothing_is_kept_by_a_process_that_locks_its_memory() -> None:
    """The kernel could not reclaim locked memory."""
    if not run_apart(_locks_all):
        pytest.skip("this user may not lock so much memory")


POLICY: Final = Path("/proc/sys/vm/overcommit_memory")


def _promises_strictly(policy: Path) -> None:
    own_shm.enter_own_namespace()
    _keeps_nothing_any_more(partial(own_shm.mount, str(policy), str(POLICY), flags=BIND))


@needs_mallinfo
@needs_own_shm
@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer has a malloc of its own")
@pytest.mark.skipif(POLICY.read_text() == "2\n", reason="this machine's kernel does so anyway")
def test_nothing_is_kept_where_the_kernel_promises_memory_strictly(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.write_text("2\n")
    run_apart(_promises_strictly, policy)
