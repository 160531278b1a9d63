"""A damaged table gives a wrong row or a DataLossError; no call crashes or runs for ever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import apart, run_apart
from helpers.segment_file import SegmentFile
from helpers.support import state_of, update_once

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, inspection, optim
from shmacc._base import names

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
    update_once(params, group, {"t": (ids, np.ones((len(ids), 3), np.float32))}, **update)


def _use(params: Parameters, group: AccumulatorGroup) -> None:
    """Make every call that reads or writes the table."""
    table = params["t"]
    for act in (
        lambda: table[IDS], lambda: table.contains(IDS), lambda: table.last_updated(IDS), table.ids,
        lambda: len(table), params.snapshot, params.state, lambda: inspection.check("params"),
        lambda: inspection.describe("params"),
        lambda: _train(params, group, np.concatenate([IDS, IDS[1:] + 1]), remove={"t": IDS[:40]}),
        lambda: table[IDS],
    ):  # fmt: skip
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
def test_random_bytes_in_a_table_crash_no_call(region: str) -> None:
    for width in (2, 4, 8) if region == "index 0" else (8,):
        run_apart(_scribble, region, width)


FIELDS: Final = (
    *("rows", "row_elements", "shape", "buffer", "weight", "count", "index", "index_buckets"),
    *("index_stamp", "index_filled", "leftovers_before"),
)


@pytest.mark.parametrize("field", FIELDS)
@apart()
def test_a_forged_state_crashes_no_call(field: str) -> None:
    """Write a wrong number into the committed state, with a valid checksum."""
    for wrong in _WRONG[::2]:
        params, group = _make()
        with params, group, SegmentFile(names.segment_name("params").path) as file:
            file.look_at(0, 0)
            state = file.committed("member")
            setattr(state, field, wrong)
            file.put("member", state, file.current("member"))
            _use(params, group)


ROWS: Final = np.arange(3000) * 2**40 + 5
# Ways to damage an index's bytes. A bucket has 64 bytes: tags, a stamp, and places of rows.
_DAMAGE: Final[dict[str, Callable[[bytes], bytes]]] = {
    "zeros": lambda was: bytes(len(was)),
    "ones": lambda was: b"\xff" * len(was),
    "random bytes": lambda was: np.random.default_rng(3).bytes(len(was)),
    "other tags": lambda was: bytes(b ^ (0x5A if i % 64 < 20 else 0) for i, b in enumerate(was)),
    "another stamp": lambda was: bytes(b ^ (3 if i % 64 == 20 else 0) for i, b in enumerate(was)),
    "other places": lambda was: bytes(b ^ (1 if i % 64 >= 24 else 0) for i, b in enumerate(was)),
    "moved by a byte": lambda was: was[1:] + was[:1],
}


def _damage_index(how: Callable[[bytes], bytes], share: float = 1.0) -> None:
    with SegmentFile(names.segment_name("params").path) as file:
        file.look_at(0, 0)
        state = file.committed("member")
        start = file.table.region(f"index {state.index}")
        file.write(start, how(file.read(start, 64 * int(share * state.index_buckets))))


def _trained() -> tuple[Parameters, AccumulatorGroup]:
    params = Parameters(
        {"t": TableSpec((3,)), "w": np.zeros(2)}, "params", optimizer=optim.Adam(0.1)
    )
    group = AccumulatorGroup(params.member_specs(), "group")
    for ids in np.array_split(ROWS, 3):
        _train(params, group, ids)
    _train(params, group, ROWS[:9], remove={"t": ROWS[20:60]})
    return params, group


def _remedy(how: str, attached: bool) -> None:
    """Act as a chief: updates fail and change nothing; the message's remedy saves all rows."""
    params, group = _trained()
    before = state_of(params)
    if not attached:  # then the next update is the handle's first
        params.close()
        params = Parameters.attach("params")
    _damage_index(_DAMAGE[how], share=1.0 if not attached else 0.9)
    new = np.setdiff1d(ROWS, ROWS[20:60])
    for update in ({}, {"remove": {"t": ROWS}}, {"forget": {"t": 0}}, {"values": {"t": _new()}}):
        with pytest.raises(errors.DataLossError, match="nothing was changed") as caught:
            _train(params, group, new, **update)
        assert group.stats().update is None  # the round is not final
        group.advance_step(group.global_step + 1)
    assert state_of(params) == before
    assert "params.restore(params.state())" in str(caught.value)
    group.apply({"w": np.ones(2)}, group.global_step)
    with group.round(1) as taken:
        with pytest.raises(errors.DataLossError, match="nothing was changed"):
            params.skip(taken, {"t": _new()})
        assert params.update(taken)  # other arrays can still be updated
    before = state_of(params)
    shmacc.save("saved.npz", {"params": params, "group": group})
    if attached:
        params.restore(params.state())
    else:
        shmacc.load("saved.npz", {"params": params, "group": group})
    assert state_of(params) == before
    assert params["t"].contains(new).all()
    assert [str(found) for found in inspection.check("params")] == []
    _train(params, group, ROWS)
    assert len(params["t"]) == len(ROWS)
    assert params["t"].ids().tolist() == ROWS.tolist()
    for one in (params, group):
        one.unlink()
        one.close()


def _new() -> tuple[Any, Any]:
    return ROWS[50:70], np.ones((20, 3), np.float32)


@pytest.mark.parametrize("attached", [False, True], ids=["before", "after its first update"])
@pytest.mark.parametrize("how", _DAMAGE)
def test_a_damaged_index_is_reported_and_can_be_rebuilt_with_all_rows(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, attached: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run_apart(_remedy, how, attached)
