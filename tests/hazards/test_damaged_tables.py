"""Bytes of a table that nobody wrote: a wrong row or a DataLossError, never a crash or no end."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.segment_file import SegmentFile

from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, inspection, optim
from shmacc._layout import names

IDS: Final = np.arange(200) * 2**40
_WRONG: Final = (0, 1, 3, 7, 199, 200, 1 << 20, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def _make() -> tuple[Parameters, AccumulatorGroup]:
    spec = TableSpec((3,))
    params = Parameters(
        {"t": spec}, "params", optimizer=optim.Adam(0.1), if_exists="replace", unlink_on_close=True
    )
    group = AccumulatorGroup(
        params.member_specs(), "group", if_exists="replace", unlink_on_close=True
    )
    _train(params, group, IDS)
    _train(params, group, IDS, remove={"t": IDS[20:60]})
    return params, group


def _train(params: Parameters, group: AccumulatorGroup, ids: Any, **update: Any) -> None:
    group.apply({"t": (ids, np.ones((len(ids), 3), np.float32))}, group.global_step)
    with group.round(1) as taken:
        params.update(taken, **update)


def _use(params: Parameters, group: AccumulatorGroup) -> None:
    """Do all that reads or writes it."""
    table = params["t"]
    for act in (
        lambda: table[IDS],
        lambda: table.contains(IDS),
        lambda: table.last_updated(IDS),
        table.ids,
        lambda: len(table),
        params.snapshot,
        params.state,
        lambda: inspection.check("params"),
        lambda: inspection.describe("params"),
        lambda: _train(params, group, np.concatenate([IDS, IDS[1:] + 1]), remove={"t": IDS[:40]}),
        lambda: table[IDS],
    ):
        try:
            act()
        except (errors.DataLossError, errors.ResourceExhaustedError):
            pass
        except errors.FailedPreconditionError:  # the round is final after an error in its update
            return


def _scribble(region: str, width: int) -> None:
    rng = np.random.default_rng(len(region))
    for turn in range(10):
        params, group = _make()
        with params, group, SegmentFile(names.segment_name("params").path) as file:
            start = file.table.region(region)
            for _ in range(1 + turn % 6):
                wrong = int(rng.choice(np.array(_WRONG, np.uint64)))
                place = start + int(rng.integers(0, 1024)) * width
                file.write(place, (wrong % 2 ** (8 * width)).to_bytes(width, "little"))
            _use(params, group)


@pytest.mark.parametrize(
    "region", ["index 0", "index 1", "slots", "rows 0", "rows 1", "states", "directory"]
)
def test_scribbled(region: str) -> None:
    for width in (2, 4, 8) if region == "index 0" else (8,):
        run_apart(_scribble, region, width)


def _forge(field: str) -> None:
    """Write a wrong number into the committed state, and the checksum that fits."""
    for wrong in _WRONG[::2]:
        params, group = _make()
        with params, group, SegmentFile(names.segment_name("params").path) as file:
            file.look_at(0, 0)
            state = file.committed("member")
            setattr(state, field, wrong)
            file.put("member", state, file.current("member"))
            _use(params, group)


FIELDS: Final = (
    *("rows", "row_elements", "shape", "buffer", "weight", "count", "index", "index_buckets"),
    *("index_stamp", "index_filled", "leftovers_before"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_forged_state(field: str) -> None:
    run_apart(_forge, field)
