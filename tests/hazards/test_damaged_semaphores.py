"""The semaphore is only a queue in front of the lock: whatever its value, the lock still excludes.

The tests damage the value, and replace the semaphore's file. The rest of the file's 32 bytes
belongs to the C library, which aborts the process on a bad value there; see docs/hazards.md.
"""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers.apart import Apart, run_apart

import shmacc
from shmacc import SparseConditionalAccumulator
from shmacc._base import names

ROWS: Final = 100


@pytest.fixture
def semaphore() -> Iterator[Path]:
    """Yield the file of a semaphore, whose segment is not open anywhere."""
    SparseConditionalAccumulator("f8", None, "queue", reduction_type="SUM").close()
    segment = Path(names.segment_name("queue").path)
    (path,) = segment.parent.glob(f"sem.{segment.name}.*")
    yield path
    for left in segment.parent.glob(f"*{segment.name}*"):
        left.rmdir() if left.is_dir() else left.unlink()


def _apply(count: int) -> int:
    acc = shmacc.attach("queue")
    assert isinstance(acc, SparseConditionalAccumulator)
    for _ in range(count):
        assert acc.apply_grad(range(ROWS), np.ones((ROWS, 2)), local_step=shmacc.NEVER_STALE)
    return count


def _check_exclusion() -> None:
    with Apart(_apply, 60) as one, Apart(_apply, 60) as other:
        assert one.result() + other.result() == 120
    acc = shmacc.attach("queue")
    assert isinstance(acc, SparseConditionalAccumulator)
    taken = acc.take(120, timeout=0)
    assert taken.row_counts.tolist() == [120] * ROWS
    assert (taken.values == 120).all()


@pytest.mark.parametrize("value", [0, 2, 0xFFFFFFFF])
def test_a_wrong_semaphore_value_still_admits_one_at_a_time(semaphore: Path, value: int) -> None:
    """With 0 no process gets a permit; with larger values, several processes do."""
    with semaphore.open("r+b") as file:
        file.write(struct.pack("<I", value))
    run_apart(_check_exclusion)


INSTEAD: Final[dict[str, Callable[[Path], object]]] = {
    "shorter": lambda path: path.write_bytes(b"12345"),
    "empty": Path.touch,
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a dangling link": lambda path: path.symlink_to("/dev/shm/nowhere"),  # noqa: S108
    "a link to a file": lambda path: path.symlink_to(__file__),
}


def _use() -> str:
    try:
        _apply(3)
    except shmacc.errors.ShmaccError as error:
        return type(error).__name__
    return "works"


@pytest.mark.parametrize("what", INSTEAD)
def test_a_file_at_the_semaphores_name_is_refused_or_harmless(semaphore: Path, what: str) -> None:
    semaphore.unlink()
    INSTEAD[what](semaphore)
    assert run_apart(_use) in {"works", "DataLossError"}
