"""`shmacc-inspect` on parameters that have tables."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.inspect_tool import ask, run
from helpers.segment_file import SegmentFile

from shmacc import AccumulatorGroup, Parameters, TableSpec, init, inspection, optim
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = np.arange(40) * 2**50


@pytest.fixture
def params() -> Iterator[Parameters]:
    """A table that had 40 rows and has 30, and an array."""
    made = _make()
    with made:
        yield made


def _make() -> Parameters:
    table = TableSpec((4,), initial=init.Uniform(-1, 1, seed=3), max_rows=50)
    params = Parameters(
        {"user": table, "fc": np.zeros((4, 2))},
        "params",
        optimizer={"user": optim.Adagrad(0.1)},
        unlink_on_close=True,
    )
    with AccumulatorGroup({"user": params.member_specs()["user"]}, unlink_on_close=True) as group:
        group.apply({"user": (IDS, np.ones((len(IDS), 4), np.float32))}, 0)
        with group.round(1) as taken:
            params.update(taken, remove={"user": IDS[:10]})
    return params


def test_the_list_has_the_rows(params: Parameters) -> None:
    assert len(params["user"]) == 30
    summary = inspection.describe("params").summary
    assert (summary.kind, summary.rows) == ("parameters", 30)
    titles, row = (line.split() for line in run("list", "params").stdout.splitlines())
    assert row[titles.index("ROWS")] == "30"


def test_the_list_has_no_rows_of_parameters_without_tables() -> None:
    with Parameters({"fc": np.zeros(3)}, "params", unlink_on_close=True):
        titles, row = (line.split() for line in run("list", "params").stdout.splitlines())
        assert row[titles.index("ROWS")] == "-"
        assert "1 parameter array," in run("show", "params").stdout


@pytest.mark.usefixtures("params")
def test_show_tells_tables_from_arrays() -> None:
    shown = run("show", "params").stdout
    assert re.search(r"^kind +1 parameter array and 1 table, ", shown, re.MULTILINE)
    assert (
        "user: 30 rows of at most 50; 40 were added and 10 removed in all; at first "
        "Uniform(low=-1.0, high=1.0, seed=3)" in shown
    )


@pytest.mark.usefixtures("params")
def test_json_has_them() -> None:
    table, array = ask("show", "params")["members"]
    assert (table["kind"], table["shape"], table["bytes_used"]) == ("table", [4], 30 * 16)
    assert [slot["name"] for slot in table["slots"]] == ["accumulator"]
    fields = ("rows", "max_rows", "rows_added", "rows_removed", "initial")
    assert [table[field] for field in fields] == [
        30,
        50,
        40,
        10,
        "Uniform(low=-1.0, high=1.0, seed=3)",
    ]
    assert [array[field] for field in fields] == [0, None, None, None, None]


def test_a_table_whose_rows_are_all_gone_has_none(params: Parameters) -> None:
    with AccumulatorGroup({"user": params.member_specs()["user"]}, unlink_on_close=True) as group:
        group.advance_step(1)
        group.apply({}, 1)
        with group.round(1) as taken:
            params.update(taken, remove={"user": params["user"].ids()})
    [table, _] = ask("show", "params")["members"]
    fields = ("rows", "rows_added", "rows_removed", "bytes_used")
    assert [table[field] for field in fields] == [0, 40, 40, 0]


@pytest.mark.usefixtures("params")
def test_metrics_have_them() -> None:
    said = run("metrics").stdout
    for name, value in {"rows": 30, "rows_added_total": 40, "rows_removed_total": 10}.items():
        found = re.search(rf'^shmacc_table_{name}{{name="params",.*}} (.*)$', said, re.MULTILINE)
        assert found is not None
        assert float(found[1]) == value


def test_metrics_of_others_have_no_tables() -> None:
    with Parameters({"fc": np.zeros(3)}, "params", unlink_on_close=True):
        assert 'shmacc_table_rows{name="params"' not in run("metrics").stdout


def test_check_holds_rows_against_the_index(params: Parameters) -> None:
    assert inspection.check("params") == ()
    assert len(params["user"]) == 30


def _lose_an_entry(file: SegmentFile) -> None:
    """The index leads to no row any more."""
    start = file.table.region("index 0") if not file.committed("member").index else None
    start = file.table.region("index 1") if start is None else start
    file.write(start, bytes(64 * int(file.committed("member").index_buckets)))


def _repeat_an_id(file: SegmentFile) -> None:
    """Two slots in use have the same id."""
    first = file.table.region("slots")
    file.write(first + 20 * 16, file.read(first + 21 * 16, 8))


def _bring_one_back(file: SegmentFile) -> None:
    """A removed row's slot has the stamp of one that is in use."""
    first = file.table.region("slots")
    file.write(first + 8, struct.pack("<q", 1 << 1))


def _checked(damage: Any) -> list[str]:
    with _make(), SegmentFile(names.segment_name("params").path) as file:
        file.look_at(0, 0)
        damage(file)
        return [finding.problem for finding in inspection.check("params")]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_lose_an_entry, "30 of 30 rows cannot be found through the index"),
        (_repeat_an_id, "a row stands in the table twice"),
        (_bring_one_back, "it has 30 rows, but 31 of its slots are in use"),
    ],
)
def test_check_finds_damage(damage: Any, said: str) -> None:
    found = run_apart(_checked, damage)
    assert any(said in problem for problem in found), found
