"""500 accumulators in one process: what each costs, and that it all comes back."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import SANITIZED

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection, testing

pytestmark = pytest.mark.beyond_asan

MANY: Final = 500


def used() -> dict[str, int]:
    """Descriptors, mappings and names that this process has."""
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()),
        "names": len(testing.leaked_names(os.environ["SHMACC_NAMESPACE"])),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def _make(i: int) -> Any:
    if i % 2:
        return ConditionalAccumulator("f4", (8,), f"many-{i}", reduction_type="SUM")
    return SparseConditionalAccumulator("f4", (None, 8), f"many-{i}", reduction_type="SUM")


def _apply(acc: Any, value: float) -> None:
    if isinstance(acc, SparseConditionalAccumulator):
        assert acc.apply_grad([1, 5], np.full((2, 8), value), local_step=acc.global_step)
    else:
        assert acc.apply_grad(np.full(8, value), local_step=acc.global_step)


def _many() -> dict[str, Any]:
    _make(0).unlink()
    _make(1).unlink()  # whatever is imported or cached once is there now
    gc.collect()
    before = used()
    started = time.process_time()
    accs = [_make(i) for i in range(MANY)]
    made = time.process_time()
    for value in (1.0, 2.0):
        for acc in accs:
            _apply(acc, value)
    again = [shmacc.attach(f"many-{i}") for i in range(0, MANY, 10)]
    peak = used()
    bytes_held = sum(inspection.describe(acc.shared_name).summary.bytes_reserved for acc in accs)
    for acc in accs:
        taken = acc.take(2, timeout=0)
        values = taken.values if hasattr(taken, "values") else taken.value
        assert (values == 3.0).all()
    used_for = time.process_time() - made
    for acc in accs[: MANY // 2]:
        acc.unlink()
        acc.close()
    for acc in accs[MANY // 2 :]:
        acc.unlink()
    del acc, accs, again
    gc.collect()
    return {
        "before": before,
        "peak": peak,
        "after": used(),
        "making": made - started,
        "using": used_for,
        "bytes": bytes_held,
    }


def test_five_hundred_in_one_process() -> None:
    seen = run_apart(_many)
    before, peak, after = seen["before"], seen["peak"], seen["after"]
    assert peak["descriptors"] - before["descriptors"] == MANY  # one each, however many handles
    assert peak["names"] - before["names"] == 2 * MANY  # a segment and a semaphore each
    assert peak["threads"] == before["threads"]
    # The regions that are in use, and the semaphore: far from the system's limit of 65530.
    assert peak["mappings"] - before["mappings"] <= 10 * MANY
    # Small ones are small: less than 512 KiB of shared memory each.
    assert seen["bytes"] < 512 * 1024 * MANY
    for what in ("descriptors", "names", "threads"):
        assert after[what] == before[what]
    if not SANITIZED:
        assert after["mappings"] <= before["mappings"] + 20
        # Generous: it is a few hundred microseconds each on an idle machine.
        assert seen["making"] < 20 * MANY / 1000
        assert seen["using"] < 20 * MANY / 1000


def _over_and_over() -> tuple[dict[str, int], dict[str, int], int]:
    def once() -> None:
        with SparseConditionalAccumulator("f4", None, "again") as acc:
            acc.apply_grad(range(500), np.ones((500, 16)))
            acc.take(1, timeout=0)
            acc.unlink()

    with ConditionalAccumulator("f4", (), "handles") as acc:
        for _ in range(20):
            once()
        gc.collect()
        before, memory = used(), _resident()
        for _ in range(MANY):
            once()
            handle = ConditionalAccumulator("f4", (), "handles")
            handle.apply_grad(1.0)
        del handle
        gc.collect()
        after, grown = used(), _resident() - memory
        assert acc.num_accumulated() == MANY
        assert acc.stats().attached == 1
        acc.unlink()
    return before, after, grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_five_hundred_times_made_and_removed_or_attached() -> None:
    before, after, grown = run_apart(_over_and_over)
    assert after == before or after["mappings"] <= before["mappings"] + 20
    assert (after["descriptors"], after["names"]) == (before["descriptors"], before["names"])
    if not SANITIZED:  # which keeps what is freed, to catch its use
        assert grown < 8 << 20
