"""The tests' own notes on the layout are right: else the damage that they do would be blind."""

from __future__ import annotations

import ctypes
import os

import numpy as np
from helpers import segment_layout as layout
from helpers.apart import forks, run_apart
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import _core
from shmacc import _names as names

pytestmark = forks


def _look(path: str) -> dict[str, object]:
    with SegmentFile(path) as file:
        config = file.record("config")
        state = file.record("state", file.current)
        shape = file.record("shape", state.shape)
        return {
            "magic": bytes(config.magic),
            "version": config.version,
            "kind": config.kind,
            "declared": list(config.declared_dims[: config.declared_rank]),
            "name": config.name[: config.name_length],
            "config checksum": config.checksum == layout.checksum_of(config),
            "state checksum": state.checksum == layout.checksum_of(state),
            "generation": state.generation == file.record("generation").word,
            "step": state.step,
            "count": state.count,
            "rows": state.rows,
            "shape": list(shape.dims[: shape.rank]),
            "applied": state.applied,
            "dropped": state.dropped,
            "slots": [
                (slot.row, slot.contributions)
                for slot in (file.record("slot", i) for i in range(state.rows))
            ],
            "sums": np.frombuffer(
                file.read(layout.region("rows 0"), state.rows * state.row_elements * 4), np.float32
            ).tolist(),
            "participant": file.record("participant").pid,
            "participants": file.record("participants_top").word,
            "journal": file.record("journal").generation,
            "undo": (file.record("undo").first_slot, file.record("undo").slots),
            "unlinked": file.record("unlinked").word,
            "places": sum(map(bool, [*file.record("bucket0").tags, *file.record("bucket1").tags])),
        }


def test_records_stand_where_the_tests_think() -> None:
    assert (layout.VERSION, layout.MAX_RANK) == (_core.VERSION, _core.MAX_RANK)
    assert tuple(sorted(_core.REGIONS, key=_core.REGIONS.__getitem__)) == layout.REGIONS
    assert (layout.REGION_SPAN, layout.HEADER_BYTES) == (_core.REGION_SPAN, _core.HEADER_BYTES)
    assert [
        ctypes.sizeof(entry)
        for entry in (layout.Participant, layout.Waiter, layout.Bucket, layout.Slot)
    ] == [_core.PARTICIPANT_BYTES, _core.WAITER_BYTES, _core.BUCKET_BYTES, _core.SLOT_BYTES]
    with shmacc.SparseConditionalAccumulator("f4", (9, 2), "known") as acc:
        acc.set_global_step(7)
        assert acc.apply_grad([3, 5], [[1, 2], [3, 4]], local_step=7)
        assert acc.apply_grad([5], [[10, 20]], local_step=7)
        assert not acc.apply_grad([5], [[10, 20]], local_step=6)
        seen = run_apart(_look, names.segment_name("known").path)
        acc.unlink()
        assert seen.pop("journal") > 0
        assert seen.pop("participant") == os.getpid()
        assert seen == {
            "magic": b"shmacc\r\n",
            "version": layout.VERSION,
            "kind": 1,
            "declared": [9, 2],
            "name": b"known",
            "config checksum": True,
            "state checksum": True,
            "generation": True,
            "step": 7,
            "count": 2,
            "rows": 2,
            "shape": [2],
            "applied": 2,
            "dropped": 1,
            "slots": [(3, 1), (5, 2)],
            "sums": [1, 2, 13, 24],
            "participants": 1,  # this process; the forked one that looks takes no place
            "undo": (1, 1),
            "unlinked": 0,
            "places": 2,
        }
