"""The tests' own notes on the layout are right: else the damage that they do would be blind."""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np
from helpers import segment_layout as layout
from helpers.apart import run_apart
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import _core
from shmacc._layout import names


def _look(path: str) -> dict[str, object]:
    with SegmentFile(path) as file:
        config = file.record("config")
        state = file.committed("round")
        lane, member = file.committed("lane"), file.committed("member")
        shape = file.record("shape", member.shape)
        entry = file.record("directory")
        size = ctypes.sizeof(entry)
        declared = file.read(layout.region("directory") + size, entry.declared_rank * 8)
        directory = file.read(layout.region("directory"), config.directory_bytes)
        return {
            "magic": bytes(config.magic),
            "version": config.version,
            "kind": config.kind,
            "members": (config.members, config.lanes, entry.kind, entry.sum, entry.name_length),
            "declared": [*struct.unpack(f"={entry.declared_rank}q", declared)],
            "name": config.name[: config.name_length],
            "config checksum": config.checksum == layout.checksum_of(config),
            "directory checksum": config.directory_checksum == layout.mix_words(directory),
            "checksums": [
                record.checksum == layout.checksum_of(record) for record in (state, lane, member)
            ],
            "generation": state.generation == file.record("generation").word,
            "lane generation": lane.generation == file.record("lane_generation").word,
            "member generation": member.generation <= lane.generation,
            "rounds": lane.round == member.round == state.round,
            "step": state.step,
            "count": (lane.count, lane.weight, member.count, member.weight),
            "rows": member.rows,
            "shape": list(shape.dims[: shape.rank]),
            "applied": lane.applied,
            "dropped": lane.dropped,
            "slots": [
                (slot.row, slot.contributions)
                for slot in (file.record("slot", i) for i in range(member.rows))
            ],
            "sums": np.frombuffer(
                file.read(layout.region("rows 0"), member.rows * member.row_elements * 4),
                np.float32,
            ).tolist(),
            "participant": file.record("participant").pid,
            "participants": file.record("participants_top").word,
            "journal": file.record("journal").generation,
            "undo": [
                getattr(file.record("undo"), name) for name in ("first_slot", "slots", "member")
            ],
            "unlinked": file.record("unlinked").word,
            "places": sum(map(bool, [*file.record("bucket0").tags, *file.record("bucket1").tags])),
        }


def test_records_stand_where_the_tests_think() -> None:
    assert (layout.VERSION, layout.MAX_RANK) == (_core.VERSION, _core.MAX_RANK)
    assert tuple(sorted(_core.REGIONS, key=_core.REGIONS.__getitem__)) == layout.REGIONS
    assert [
        ctypes.sizeof(entry)
        for entry in (layout.Participant, layout.Waiter, layout.Bucket, layout.Slot)
    ] == [_core.PARTICIPANT_BYTES, _core.WAITER_BYTES, _core.BUCKET_BYTES, _core.SLOT_BYTES]
    with shmacc.SparseConditionalAccumulator("f4", (9, None), "known") as acc:
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
            "members": (1, 1, 1, 1, 0),
            "declared": [9, -1],
            "name": b"known",
            "config checksum": True,
            "directory checksum": True,
            "checksums": [True, True, True],
            "generation": True,
            "lane generation": True,
            "member generation": True,
            "rounds": True,
            "step": 7,
            "count": (2, 2, 2, 2),
            "rows": 2,
            "shape": [2],
            "applied": 2,
            "dropped": 1,
            "slots": [(3, 1), (5, 2)],
            "sums": [1, 2, 13, 24],
            "participants": 1,  # this process; the forked one that looks takes no place
            "undo": [1, 1, 0],
            "unlinked": 0,
            "places": 2,
        }
