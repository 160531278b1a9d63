"""Memory of large results is kept for the next ones, and the kernel may have it meanwhile."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from helpers.support import SANITIZED

import shmacc
from shmacc import _core

LARGE = 40 << 20  # bytes; malloc returns what is larger than 32 MiB to the kernel


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """What earlier tests left is freed when there is no memory for a piece."""
    gc.collect()
    with pytest.raises(MemoryError):
        _core.memory(1 << 60)


def lazily_free(address: int) -> int:
    """Bytes that the kernel may take, of the mappings of the piece at this address."""
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


def test_a_result_that_is_dropped_is_the_next_one_and_the_kernel_may_have_it() -> None:
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


def test_results_that_are_in_use_have_memory_of_their_own() -> None:
    held = [filled(number) for number in range(6)]
    for number in range(0, 6, 2):
        held[number] = held[number + 1]  # its own is dropped
        held[number] = filled(10 + number)
    assert [int(piece[0]) for piece in held] == [10, 1, 12, 3, 14, 5]
    assert all((piece == piece[0]).all() for piece in held)


def test_a_small_result_does_not_hold_a_large_piece() -> None:
    large = filled(1, 3 * LARGE)
    address = large.ctypes.data
    del large
    small, other = filled(2), filled(3, 2 * LARGE)
    assert small.ctypes.data != address
    assert other.ctypes.data == address


@pytest.mark.skipif(
    SANITIZED, reason="AddressSanitizer itself needs all the address space there is"
)
def test_it_does_not_keep_a_result_from_memory_that_is_short() -> None:
    kept = filled(1, 4 * LARGE)
    del kept
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGE, before[1]))
    try:
        held = filled(2, LARGE * 3 // 2)  # too small for the piece
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (held == 2).all()


def test_takes_use_it() -> None:
    rows = LARGE // 256
    gradient = np.arange(rows), np.ones((rows, 64), np.float32)
    with shmacc.SparseConditionalAccumulator("float32", (rows, 64)) as acc:
        addresses = set()
        for step in range(4):
            assert acc.apply_grad(*gradient, local_step=step)
            taken = acc.take_grad(1)
            assert (taken.values == 1).all()
            addresses.add(taken.values.ctypes.data)
            del taken
    assert len(addresses) == 1
