"""One process has 500 accumulators: each costs what is promised, and all of it is freed."""

import gc
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import apart
from helpers.support import SANITIZED

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection, testing

pytestmark = pytest.mark.beyond_asan

MANY: Final = 500


def used() -> dict[str, int]:
    """Return the numbers of this process's descriptors, mappings, names and threads."""
    gc.collect()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()),
        "names": len(testing.leaked_names(os.environ["SHMACC_NAMESPACE"])),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def assert_all_is_back(before: dict[str, int]) -> None:
    after = used()
    for what in ("descriptors", "names", "threads"):
        assert after[what] == before[what]
    if not SANITIZED:
        assert after["mappings"] <= before["mappings"] + 20


def _make(i: int) -> Any:
    kind = ConditionalAccumulator if i % 2 else SparseConditionalAccumulator
    shape = (8,) if i % 2 else (None, 8)
    return kind("f4", shape, f"many-{i}", reduction_type="SUM")


def _apply(acc: Any, value: float) -> None:
    rows = ([1, 5],) if isinstance(acc, SparseConditionalAccumulator) else ()
    assert acc.apply_grad(*rows, np.full((2, 8) if rows else 8, value), local_step=acc.global_step)


@apart()
def test_five_hundred_accumulators_in_one_process_cost_what_is_promised() -> None:
    _make(0).unlink()
    _make(1).unlink()  # whatever is imported or cached once is there now
    before, started = used(), time.process_time()
    accs = [_make(i) for i in range(MANY)]
    made = time.process_time()
    for value in (1.0, 2.0):
        for acc in accs:
            _apply(acc, value)
    again = [shmacc.attach(f"many-{i}") for i in range(0, MANY, 10)]
    peak = used()
    held = sum(inspection.describe(acc.shared_name).summary.bytes_reserved for acc in accs)
    for acc in accs:
        taken = acc.take(2, timeout=0)
        values = taken.values if hasattr(taken, "values") else taken.value
        assert (values == 3.0).all()
    used_for = time.process_time() - made
    for number, acc in enumerate(accs):
        acc.unlink()
        if number % 2:
            acc.close()
    del acc, accs, again
    assert peak["descriptors"] - before["descriptors"] == MANY  # one each, however many handles
    assert peak["names"] - before["names"] == 2 * MANY  # a segment and a semaphore each
    assert peak["threads"] == before["threads"]
    # Each region in use is a mapping, and so is the semaphore. The system's limit is 65530.
    assert peak["mappings"] - before["mappings"] <= 10 * MANY
    # A small accumulator has less than 512 KiB of shared memory.
    assert held < 512 * 1024 * MANY
    assert_all_is_back(before)
    if not SANITIZED:  # on an idle machine, each takes a few hundred microseconds
        assert made - started < 20 * MANY / 1000
        assert used_for < 20 * MANY / 1000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@apart()
def test_making_and_attaching_five_hundred_times_leaves_nothing() -> None:
    def once() -> None:
        with SparseConditionalAccumulator("f4", None, "again", unlink_on_close=True) as acc:
            acc.apply_grad(range(500), np.ones((500, 16)))
            acc.take(1, timeout=0)

    with ConditionalAccumulator("f4", (), "handles", unlink_on_close=True) as acc:
        for _ in range(20):
            once()
        before, memory = used(), _resident()
        for _ in range(MANY):
            once()
            handle = ConditionalAccumulator("f4", (), "handles")
            handle.apply_grad(1.0)
        del handle
        assert_all_is_back(before)
        if not SANITIZED:  # sanitizers keep freed memory, to catch its use
            assert _resident() - memory < 8 << 20
        assert acc.num_accumulated() == MANY
        assert acc.stats().attached == 1
