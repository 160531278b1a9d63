"""Another process writes into the segment all the time, while every operation runs on it.

A number may change between its check and its use, so the library must check a copy.
"""

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import every_call
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, needs_own_shm
from helpers.every_call import SHM_BYTES, VICTIM, Scenario
from helpers.segment_file import SegmentFile
from helpers.support import LONG, until

import shmacc
from shmacc._base import names
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import HostGroup, LocalSegment

pytestmark = [needs_own_shm, pytest.mark.threads]

# Each of SHMACC_FUZZ_EXAMPLES stands for 2.5 ms here.
SECONDS: Final = int(os.environ.get("SHMACC_FUZZ_EXAMPLES", "200")) / 400

_ROWS: Final = 3000

_RECORDS: Final = (
    *("round", "lane", "member", "shape", "journal", "queue", "waiter", "participant"),
    *("generation", "lane_generation"),
)
_PLACES: Final = (
    (0, layout.HEADER_USED),
    (layout.ROUNDS, layout.HEADER_USED - layout.ROUNDS),
    *[(layout.region(name), 4096) for name in layout.REGIONS[1:]],
)


def _use(scenario: Scenario, seconds: float, *, pipe: Pipe) -> list[Any]:
    path = names.segment_name(VICTIM).path
    deadline = time.monotonic() + seconds
    calls, bad, order = 0, [], 0
    while time.monotonic() < deadline or calls <= 100 * seconds:
        acc = None
        with suppress(shmacc.errors.ShmaccError):  # the segment was damaged while it was made
            acc = every_call.make(scenario, VICTIM)
        pipe.say(path)
        for _ in range(5 if acc else 0):
            order += 1
            for outcome in every_call.operate(acc, scenario, order):
                calls += 1
                bad += [] if outcome.fine else [outcome]
        if acc is not None:
            with suppress(shmacc.errors.ShmaccError):  # a close may fail to give up the round
                acc.close()
        for name in os.listdir(names.SHM_DIRECTORY):  # noqa: PTH208
            os.unlink(f"{names.SHM_DIRECTORY}/{name}")  # noqa: PTH108
    return bad


def _scribble(root: str, stop: threading.Event, seed: int) -> int:
    rng = random.Random(seed)
    written = 0
    while not stop.is_set():
        with suppress(OSError), SegmentFile(root + names.segment_name(VICTIM).path) as file:
            file.look_at(rng.randrange(2), rng.randrange(3))
            for _ in range(20):
                start, length = rng.choice(_PLACES)
                if rng.random() < 0.5:
                    file.write(start + rng.randrange(length), rng.randbytes(rng.choice((1, 4, 8))))
                else:
                    # With a valid checksum, a wrong field gets past the first check.
                    kind = rng.choice(_RECORDS)
                    number = rng.randrange(layout.RECORDS[kind][1])
                    record = file.record(kind, number)
                    field = rng.choice([name for name, *_ in record._fields_])
                    with suppress(TypeError):
                        setattr(record, field, getattr(record, field) + rng.randrange(-2, 1 << 33))
                    file.put(kind, record, number)
                written += 1
    return written


@pytest.mark.parametrize(
    ("kind", "lanes"), [("sparse", 1), ("dense", 2), ("group", 1), ("group", 2)]
)
def test_every_call_ends_while_others_write_into_the_segment(kind: str, lanes: int) -> None:
    stop = threading.Event()
    scenario = Scenario(kind, lanes=lanes, contributors=True)
    with Apart(_use, scenario, SECONDS, shm=SHM_BYTES) as victim:
        said = victim.hear()
        scribbling = threading.Thread(
            target=_scribble, args=(f"/proc/{victim.pid}/root", stop, len(kind))
        )
        scribbling.start()
        try:
            while isinstance(said, str):
                said = victim.hear(SECONDS + every_call.PATIENCE)
        finally:
            stop.set()
            scribbling.join()
    assert not said


def _divide(seconds: float, *, pipe: Pipe) -> int:
    """Hold a segment's round again and again; return how often that found no damage."""
    members = {
        "wide": shmacc.IndexedSlicesSpec((None, 64), "float64"),
        "narrow": shmacc.IndexedSlicesSpec((None,), "float64"),
        "dense": shmacc.TensorSpec((40_000,), "float64"),
    }
    group, rows = HostGroup(members, VICTIM), np.arange(_ROWS)
    values = np.ones((_ROWS, 64)), np.ones(_ROWS), np.ones(40_000)
    assert group.apply(
        {"wide": (rows, values[0]), "narrow": (rows, values[1]), "dense": values[2]}, 0
    )
    segment, sound = LocalSegment(group, Plan(group.members, 2)), 0
    pipe.say(names.segment_name(VICTIM).path)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or not sound:
        with suppress(shmacc.errors.DataLossError):
            segment.hold()
            sound += 1
        segment.release()
    return sound


def test_holding_a_round_is_safe_while_rows_change_their_shard() -> None:
    """Room is reserved before rows are read: extra rows must not use a dense member's room."""
    hashes = np.arange(4 * _ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    at_shard = hashes >> np.uint64(63)
    pools = [np.flatnonzero(at_shard == shard)[:_ROWS] for shard in range(2)]
    with Apart(_divide, SECONDS, shm=SHM_BYTES) as victim:
        with SegmentFile(f"/proc/{victim.pid}/root{victim.hear(every_call.PATIENCE)}") as file:
            regions = []
            for member in range(2):
                file.look_at(0, member)
                regions.append(file.table.region("slots"))
            slots = np.ones((_ROWS, 2), np.int64)
            until_then = time.monotonic() + SECONDS
            while time.monotonic() < until_then:
                for elsewhere in 0, 300:
                    for member, region in enumerate(regions):
                        slots[:, 0] = pools[member]
                        slots[:elsewhere, 0] = pools[1 - member][:elsewhere]
                        file.write(region, slots.tobytes())
                    time.sleep(random.random() * 0.003)
        assert victim.result(every_call.PATIENCE) > 0


def _wait_in_queue(pipe: Pipe) -> str:
    acc = every_call.make(Scenario("dense", applies=0), VICTIM)
    pipe.say(names.segment_name(VICTIM).path)
    try:
        acc.take(2, timeout=LONG)
    except shmacc.errors.ShmaccError as error:
        return type(error).__name__
    return "no error"


def _fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_take_that_cannot_read_the_queue_leaves_it() -> None:
    """Reading all entries that the queue claims needs memory; without it the take raises."""
    with Apart(_wait_in_queue, shm=1 << 20) as victim:
        path = Path(f"/proc/{victim.pid}/root{victim.hear()}")
        with SegmentFile(path) as file:
            until(lambda: file.record("waiter").ticket)
            _fill(path.parent)
            queue = file.record("queue")
            queue.top = 4000
            file.put("queue", queue)
        assert victim.result() == "ResourceExhaustedError"
