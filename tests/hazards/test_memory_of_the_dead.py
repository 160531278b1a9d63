"""Memory that a killed process had reserved goes back to the system within some rounds.

The process was killed before its commit, so nothing in the segment records the memory.
"""

import os
import signal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.segment_layout import REGION_SPAN, Table
from helpers.support import until

import shmacc
from shmacc import AccumulatorGroup, IndexedSlicesSpec, Parameters, TableSpec, TensorSpec, optim
from shmacc._base import names

MIB: Final = 1 << 20
WIDTH: Final = 64
ROUNDS: Final = 17  # eight, eight more for the undo log, and one


def occupied(name: str) -> int:
    return Path(names.segment_name(name).path).stat().st_blocks * 512


def reserve(name: str, at: list[int]) -> None:
    """Reserve what an operation needs before its commit, as if its process then died."""
    fd = os.open(names.segment_name(name).path, os.O_RDWR)
    for offset in at:
        os.posix_fallocate(fd, offset, MIB)


def beyond(lanes: int, member: int) -> list[int]:
    """Return an offset in each region of a lane and a member, beyond the bytes in use."""
    table = Table(lanes=lanes, members=2, lane=lanes - 1, member=member)
    wanted = ["undo log", "undo rows", "index 0", "index 1", "slots", "rows 0", "rows 1"]
    return [table.region(name) + REGION_SPAN // 2 for name in wanted]


def rounds(group: Any, params: Any, count: int) -> None:
    for _ in range(count):
        step = group.global_step
        group.apply({"s": ([1], np.ones((1, WIDTH))), "d": np.ones(4)}, step)
        with group.round(1, timeout=0) as taken:
            if params is not None:
                params.update(taken)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("of", ["group", "params"])
def test_a_dead_processs_memory_in_any_region_is_given_back(lanes: int, of: str) -> None:
    with (
        Parameters(
            {"s": TableSpec((WIDTH,), "f8"), "d": np.zeros(4)}, "params", optimizer=optim.SGD(1.0)
        ) as params,
        AccumulatorGroup(params.member_specs(), "group", lanes=lanes) as group,
    ):
        rounds(group, params, ROUNDS)
        before = occupied(of)
        with Apart(reserve, of, beyond(lanes if of == "group" else 1, 0)) as dead:
            dead.result()
        assert occupied(of) >= before + 7 * MIB
        rounds(group, params, ROUNDS)
        assert occupied(of) <= before + MIB // 4
        assert params["s"][[1]].shape == (1, WIDTH)
        assert shmacc.inspection.check("group") == shmacc.inspection.check("params") == ()
        group.unlink()
        params.unlink()


def restore(acc: Any, rows: int, pipe: Pipe) -> None:
    state = acc.state()
    state |= {
        "0.indices": np.arange(rows),
        "0.values": np.ones((rows, WIDTH)),
        "0.row_counts": np.ones(rows, np.int64),
    }
    pipe.say("now")
    acc.restore(state)


def test_memory_of_a_killed_restore_is_given_back() -> None:
    specs = {"s": IndexedSlicesSpec((None, WIDTH), "f8"), "d": TensorSpec((4,), "f8")}
    with AccumulatorGroup(specs, "group", unlink_on_close=True) as group:
        rounds(group, None, ROUNDS)
        group.apply({"s": ([1], np.ones((1, WIDTH))), "d": np.ones(4)}, group.global_step)
        before = occupied("group")
        with Apart(restore, group, 40_000) as restoring:
            assert restoring.hear() == "now"
            until(lambda: occupied("group") > before + MIB or group.stats().rows > 1)
            restoring.signal(signal.SIGKILL)
        group.take_partial(0)
        rounds(group, None, 2 * ROUNDS)
        assert occupied("group") <= before + MIB // 2
