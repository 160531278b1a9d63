"""The tests' copy of the layout is right; with a wrong one they would damage other bytes."""

import ctypes
import os
from typing import Any

from helpers import segment_layout as layout
from helpers.apart import run_apart
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import _core
from shmacc._base import names


def _look(path: str) -> list[Any]:
    with SegmentFile(path) as file:
        config, entry = file.record("config"), file.record("directory")
        state, lane, member = map(file.committed, ("round", "lane", "member"))
        shape, undo = file.record("shape", member.shape), file.record("undo")
        directory = file.read(layout.region("directory"), config.directory_bytes)
        declared = layout.region("directory") + ctypes.sizeof(entry)
        sums = file.read(layout.region("rows 0"), member.rows * member.row_elements * 4)
        slots = [file.record("slot", number) for number in range(member.rows)]
        tags = [*file.record("bucket0").tags, *file.record("bucket1").tags]
        assert config.directory_checksum == layout.mix_words(directory)
        for record in (config, state, lane, member):
            assert record.checksum == layout.checksum_of(record)
        assert state.generation == file.record("generation").word
        assert lane.generation == file.record("lane_generation").word >= member.generation
        assert lane.round == member.round == state.round
        assert file.record("journal").generation > 0
        return [
            (bytes(config.magic), config.version, config.kind, config.name[: config.name_length]),
            (config.members, config.lanes, entry.kind, entry.sum, entry.name_length),
            [int.from_bytes(file.read(declared + 8 * i, 8), "little") for i in range(2)],
            (state.step, lane.count, lane.weight, member.count, member.weight, member.rows),
            (list(shape.dims[: shape.rank]), lane.applied, lane.dropped),
            [(slot.row, slot.contributions) for slot in slots],
            list(memoryview(sums).cast("f")),
            (file.record("participant").pid, file.record("participants_top").word),
            (undo.first_slot, undo.slots, undo.member, file.record("unlinked").word),
            sum(map(bool, tags)),
        ]


def test_the_tests_layout_finds_every_record() -> None:
    entries = layout.Participant, layout.Waiter, layout.Bucket, layout.Slot
    sizes = _core.PARTICIPANT_BYTES, _core.WAITER_BYTES, _core.BUCKET_BYTES, _core.ROW_PLACE_BYTES
    assert tuple(map(ctypes.sizeof, entries)) == sizes
    with shmacc.SparseConditionalAccumulator("f4", (9, None), "known", unlink_on_close=True) as acc:
        acc.set_global_step(7)
        assert acc.apply_grad([3, 5], [[1, 2], [3, 4]], local_step=7)
        assert acc.apply_grad([5], [[10, 20]], local_step=7)
        assert not acc.apply_grad([5], [[10, 20]], local_step=6)
        seen = run_apart(_look, names.segment_name("known").path)
    assert seen == [
        (b"shmacc\r\n", layout.VERSION, 1, b"known"),
        (1, 1, 1, 1, 0),
        [9, 2**64 - 1],
        (7, 2, 2, 2, 2, 2),
        ([2], 2, 1),
        [(3, 1), (5, 2)],
        [1, 2, 13, 24],
        (os.getpid(), 1),  # the forked process that looks has no entry
        (1, 1, 0, 0),
        2,
    ]
