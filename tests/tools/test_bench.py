"""The benchmarks measure what their tables say, and check each peer's answers."""

import importlib
from contextlib import ExitStack

import numpy as np
import pytest

from bench import main
from shmacc_bench import timing
from shmacc_bench.parts import PARTS, calls, several_processes
from shmacc_bench.processes import Apart, FailedError
from shmacc_bench.tables import Table, figure, paired, spread
from shmacc_bench.workload import Workload, make_filling, make_gradient

TINY = Workload("sparse", 20, 3, table_rows=100)


def test_a_machine_that_slows_down_does_not_move_the_paired_ratio() -> None:
    drift = [1.0, 1.0, 7.0, 50.0]
    assert paired([(2 * slow, slow) for slow in drift]) == pytest.approx(2.0)


def test_figures_have_three_digits() -> None:
    assert [figure(of) for of in (0.01234, 12.345, 1234.5)] == ["0.0123", "12.3", "1,230"]
    assert spread([5.0, 1.0, 2.0, 3.0, 100.0]) == "3 [1.4-62]"


def test_a_missed_goal_is_reported() -> None:
    table = Table("apply", ("", "ratio"))
    table.rows = [("a", table.judged("a", 0.5, 1.0)), ("b", table.judged("b", 2.0, 1.0))]
    assert str(table).splitlines()[-2:] == ["| a | 0.5 (goal 1) |", "| b | 2 (goal 1) |"]
    assert table.missed == ["apply: b: 2 > 1"]


def test_gradients_have_the_rows_and_order_that_their_workload_says() -> None:
    plain = make_gradient(TINY)
    assert np.all(np.diff(plain.indices) > 0)
    assert np.array_equal(plain.values, make_gradient(TINY).values)
    zipf = make_gradient(Workload("sparse", 500, 2, table_rows=1000, order="zipf"))
    rows, sums, repeats = zipf.merged()
    assert rows.size < repeats.sum() == 500
    assert np.array_equal(sums[0], zipf.values[zipf.indices == rows[0]].sum(axis=0))
    filled = [row for gradient in make_filling(TINY) for row in gradient.indices]
    assert sorted(filled) == list(range(100))


@pytest.mark.parametrize("peer", ["shmacc", "numpy"])
@pytest.mark.parametrize(
    "workload",
    [TINY, Workload("dense", 50), Workload("sparse", 50, 2, table_rows=40, order="zipf")],
    ids=lambda of: of.label,
)
def test_each_peers_answer_is_checked_and_timed(peer: str, workload: Workload) -> None:
    timed = timing.Timed(peer)
    try:
        assert timed.open(workload) == ""
        operations = [timing.APPLY, timing.ROUND, timing.APPLY_NEW]
        if workload is TINY:
            operations += [timing.APPLY_FULL, timing.APPLY_OTHERS]
        for operation in operations:
            timed.begin(operation)
            assert min(timed.block(100_000, 3)) > 0
    finally:
        timed.close()


def test_a_peers_wrong_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = timing.Timed("numpy")
    monkeypatch.setattr(timed.peer, "take", lambda _: (np.arange(20), np.zeros((20, 3))))
    try:
        assert timed.open(TINY) == "repeated rows are not merged"
    finally:
        timed.close()


def test_a_peer_that_cannot_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"NumPy": ("numpy",), "none": ("no-such",)}
    monkeypatch.setattr(calls, "COLUMNS", columns)
    family = calls.Family("tiny", timing.ROUND, {TINY: {"NumPy": 1e9}}, tuple(columns))
    with ExitStack() as stack:
        made = calls.table(family, calls.Peers(stack), rounds=2)
    [(workload, time, ratio, none)] = made.rows
    assert (workload, none) == (TINY.label, "")
    assert time.endswith(" us")
    assert ratio.endswith("(goal 1,000,000,000)")
    assert "no-such is left out: KeyError" in capsys.readouterr().err


def test_an_object_in_another_process_reports_failures_and_its_end() -> None:
    apart = Apart(timing.Timed, "numpy")
    with pytest.raises(FailedError, match="AttributeError"):
        apart.ask("no_such")
    apart._process.kill()
    with pytest.raises(FailedError, match="ended: -9"):
        apart.ask("close")
    apart.end()


def test_quick_runs_measure_only_what_has_goals() -> None:
    for family in map(calls._quick, calls.FAMILIES):
        assert all(family.workloads.values())
        assert calls.SERVER not in family.columns


def test_every_part_has_a_module_with_measure() -> None:
    for name in set(PARTS) - {"rounds", "ddp"}:  # these two import torch
        assert importlib.import_module(f"shmacc_bench.parts.{name}").measure


def test_a_quick_run_of_two_parts_prints_two_tables_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_processes, "ROWS", (10,))
    parts = ["several_processes", "small_gradients"]
    assert main(["run", "--quick", "--parts", *parts]) == 0
    assert capsys.readouterr().out.count("\n## ") == 2 * len(parts)
