"""In a full /dev/shm, a damaged segment harms nobody but its own users.

A reader must not allocate what the segment claims to hold, since there is no space. The reader's
error must not prevent the use of other segments, cleaning up, or the segment's removal.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import inspect_tool
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, apart, needs_own_shm, run_apart
from helpers.damage import Damage, Overwrite, Resize, SetField, Sizes
from helpers.full_memory import SIZE, free_bytes
from helpers.own_shm import MIB
from helpers.segment_file import SegmentFile
from helpers.support import path_of

import shmacc
from shmacc import NEVER_STALE, SparseConditionalAccumulator, errors, inspection
from shmacc._base import names
from shmacc.inspection import SegmentState, Severity

pytestmark = needs_own_shm

ROWS: Final = 100

DAMAGES: Final[dict[str, Damage]] = {
    "takes": SetField("queue", "top", 65536),
    "processes": SetField("participants_top", "word", 4096),
    "rows": Sizes(50_000, (3,), reserved=4 * MIB, buckets=5_000, count=1),
    "reserved": Sizes(ROWS, (3,), reserved=MIB, buckets=None, count=1),
    "noise": Overwrite(layout.ROUNDS, b"\xa5" * 4096),
    "noise in the tables": Overwrite(layout.region("participants"), b"\xa5" * 4096),
    "truncated": Resize(4096),
    "empty pages": Resize(0, and_back=True),
}


def make(name: str) -> SparseConditionalAccumulator:
    """Make an accumulator of sums, take two gradients, and apply a third one."""
    acc = SparseConditionalAccumulator("f4", None, name, reduction_type="SUM")
    apply(acc)
    apply(acc)
    acc.take_partial(1)
    apply(acc)
    return acc


def apply(acc: Any) -> None:
    assert acc.apply_grad(range(ROWS), np.ones((ROWS, 3), "f4"), local_step=NEVER_STALE)


def _occupied() -> int:
    # The next process that opens the name removes a segment that is empty and unused.
    return path_of("scribbled").stat().st_blocks if path_of("scribbled").exists() else 0


def _stay(*, pipe: Pipe) -> None:
    with make("scribbled"):
        pipe.turn()


def _scribble(damage: Damage) -> None:
    with SegmentFile(path_of("scribbled")) as file:
        damage.do(file, file)


def _look_at_all() -> None:
    states = {found.name.shared_name: found.state for found in inspection.list_segments()}
    assert states.keys() == {"sound", "scribbled"}
    assert states["sound"] is SegmentState.SOUND
    assert states["scribbled"] is not SegmentState.UNREADABLE
    wrong = {each.subject for each in inspection.check_all() if each.severity is Severity.WRONG}
    assert path_of("sound").name not in wrong
    assert inspection.describe("sound").stats.applied == 3
    inspection.check("scribbled")
    inspection.leftovers()
    for look in (
        inspection.describe,
        lambda name: inspection.most_touched(name, 3),
        inspection.summarise_values,
    ):
        with contextlib.suppress(errors.DataLossError):
            look("scribbled")
    for arguments in ("list", "check", "check scribbled", "show scribbled --rows 3 --values"):
        status, said = inspect_tool.run_here(*arguments.split())
        assert status in {0, 1}, said
        assert "is full" not in said
    # A view reads the file; it maps nothing.
    with (
        contextlib.suppress(errors.DataLossError),
        inspection._listing.open_view(names.segment_name("scribbled")) as view,
    ):
        for read in (view.participants, view.waiters, view.state):
            read()
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
            assert str(path_of("scribbled")) not in maps


def _attach_in_vain() -> None:
    with contextlib.suppress(errors.ShmaccError):
        shmacc.attach("scribbled").close()


def _clean() -> None:
    for leftover in inspection.leftovers():
        with contextlib.suppress(errors.DataLossError):
            inspection.clean(leftover)
    with contextlib.suppress(errors.NotFoundError):
        inspection.remove("scribbled", force=True)


@pytest.mark.parametrize("damage", DAMAGES)
@apart(shm=SIZE)
def test_a_damaged_segment_harms_no_other(damage: str) -> None:
    """Half of the damages happen at rest, half while a process is attached."""
    with make("sound") as sound, Apart(_stay).ready() as staying:
        if list(DAMAGES).index(damage) % 2 == 0:
            staying.finish()
        run_apart(_scribble, DAMAGES[damage])
        filler = Path(names.SHM_DIRECTORY) / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free_bytes())
        assert free_bytes() == 0
        occupied = _occupied()

        run_apart(_look_at_all)
        assert (_occupied(), free_bytes()) == (occupied, 0)
        run_apart(_attach_in_vain)
        assert (_occupied(), free_bytes()) == (occupied, 0)
        # The damaged segment delays no other one, in this process or another.
        apply(sound)
        with shmacc.attach("sound") as again:
            assert again.take(2, timeout=0).count == 2

        # The damaged segment can be removed without a free byte.
        staying.kill()
        run_apart(_clean)
        assert "scribbled" not in {s.name.shared_name for s in inspection.list_segments()}
        filler.unlink()
        with make("scribbled") as anew:
            assert anew.take(1, timeout=0).count == 1
            anew.unlink()
        sound.unlink()
