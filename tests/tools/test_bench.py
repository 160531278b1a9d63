"""The benchmark harness itself: statistics, verdicts, reports, and a run in miniature."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.support import LONG

from shmacc_bench import results
from shmacc_bench.cases import IDS, SORTED_IDS, TORCH, Case, all_cases, is_like, quick_cases
from shmacc_bench.cli import main
from shmacc_bench.cost_model import Model, models
from shmacc_bench.crew import Member
from shmacc_bench.fleet import Fleet, PeerFailedError, known_peers
from shmacc_bench.instructions import Count, cost_by_object, heavier
from shmacc_bench.operations import Operation
from shmacc_bench.peers.shmacc_peer import ShmaccPeer
from shmacc_bench.runner import Effort, Measured, ratios, run_cases
from shmacc_bench.samples import paired_ratio, summarise
from shmacc_bench.scenarios import Plan
from shmacc_bench.scenarios.lanes import VARIANTS
from shmacc_bench.scenarios.parts import WORKLOADS
from shmacc_bench.scenarios.realistic import ROUNDS, summary
from shmacc_bench.scenarios.running import run_scenarios
from shmacc_bench.tables import all_tables
from shmacc_bench.targets import LANES_GAIN, verdicts
from shmacc_bench.workload import Workload, make_filling, make_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

_BENCH = Path(__file__).parents[2] / "tools" / "bench" / "bench.py"
TINY = Workload("sparse", 20, 3, table_rows=100)
TINY_DENSE = Workload("dense", 50)
BRIEF = Effort(rounds=2, turn_ns=200_000, most_samples=3, peer_seconds=1.0, fewest_rounds=1)


def quiet(what: str) -> None:
    del what


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet.of(["shmacc", "numpy-fancy", "numpy-add-at", "np.add", "no-such"]) as started:
        yield started


def test_a_summary_has_the_order_statistics() -> None:
    summary = summarise([5.0, 1.0, 2.0, 3.0, 100.0])
    assert (summary.count, summary.median, summary.mad) == (5, 3.0, 2.0)
    assert summary.p10 == pytest.approx(1.4)
    assert summary.p90 == pytest.approx(62.0)
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_a_machine_that_slows_down_does_not_move_the_paired_ratio() -> None:
    drift = [1.0, 1.0, 7.0, 50.0]
    mine = [[2 * slow] for slow in drift]
    theirs = [[slow, slow, slow * 1000] for slow in drift]
    assert paired_ratio(mine, theirs).median == pytest.approx(2.0)
    assert paired_ratio([[], [3.0]], [[1.0], [1.0]]).count == 1


def test_gradients_are_what_their_workload_says() -> None:
    plain = make_gradient(TINY)
    assert np.all(np.diff(plain.indices) > 0)
    assert np.array_equal(plain.values, make_gradient(TINY).values)
    zipf = make_gradient(Workload("sparse", 500, 2, table_rows=1000, order="zipf"))
    distinct, sums = zipf.merged()
    assert distinct.size < zipf.indices.size
    for row, total in zip(distinct, sums, strict=True):
        assert np.array_equal(total, zipf.values[zipf.indices == row].sum(axis=0))
    assert zipf.occurrences().sum() == zipf.indices.size
    ascending = make_gradient(Workload("sparse", 500, 2, table_rows=1000, order="zipf-sorted"))
    assert np.array_equal(ascending.indices, np.sort(zipf.indices))
    assert not ascending.unique
    filled = np.concatenate([gradient.indices for gradient in make_filling(TINY, chunk=30)])
    assert sorted(filled) == list(range(100))


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    quick = {case.name: case for case in quick_cases()}
    assert set(quick) < set(names)
    for case in all_cases():
        assert "shmacc" in case.peers
        assert all(set(against) <= set(case.peers) for _, against in case.limits)
        if case.limits:
            assert "tf-server" not in quick[case.name].peers
    assert is_like("rows/apply/10 x 64", "rows/*64")
    assert not is_like("rows/apply/10 x 64", "dense")


def fake_case(operation: Operation, mine: float, **theirs: float) -> dict[str, Any]:
    peers = tuple(name.replace("_", "-") for name in theirs)
    against = [of for of in (TORCH, ("tf-local",), ("tf-server",)) if set(of) & set(peers)]
    workload = Workload("sparse", 1_000, 64)
    case = Case("rows", operation, workload, peers, tuple((1 / 3, of) for of in against))
    measured = {"shmacc": Measured(answer="right", turns=[[mine]])}
    for name, nanoseconds in theirs.items():
        measured[name.replace("_", "-")] = Measured(answer="right", turns=[[nanoseconds]])
    return results.case_record(case, measured)


def fake_results() -> dict[str, Any]:
    return {
        "schema_version": results.SCHEMA_VERSION,
        "machine": {
            "cores": 2,
            "processor": "a processor",
            "memory_gib": 1,
            "system": "Linux",
            "python": "3",
            "date": "2026-01-01",
            "load_before": 0.0,
        },
        "quick": True,
        "peers": {
            "shmacc": {"status": "measured", "versions": {"shmacc": "1"}, "how": "so"},
            "torch": {"status": "missing", "reason": "ModuleNotFoundError"},
        },
        "cases": [
            fake_case(Operation.APPLY, 2000, torch=4000, torch_1=1000),
            fake_case(Operation.ROUND, 3000, tf_local=30_000, tf_server=8000, torch=31_000),
        ],
        "seconds": {"cases: rows": 2.0, "scenario: wakeup": 1.5},
        "scenarios": {
            "wakeup": {
                "shmacc": {
                    "from_call": vars_of([50.0]),
                    "from_return": vars_of([40.0]),
                    "with_steps": vars_of([46.0]),
                    "pipe": vars_of([45.0]),
                }
            }
        },
    }


def vars_of(samples: list[float]) -> dict[str, Any]:
    plain: dict[str, Any] = results.plain(summarise(samples))
    return plain


def test_targets_are_judged_against_the_fastest_peer() -> None:
    found = {(v.what, v.against): v for v in verdicts(fake_results())}
    apply = found["apply, 1,000 x 64", "torch-1"]  # not the slower torch: it would be better there
    assert apply.measured == pytest.approx(2.0)
    assert not apply.met
    assert found["round, 1,000 x 64", "tf-local"].met
    assert not found["round, 1,000 x 64", "tf-server"].met
    assert found["round, 1,000 x 64", "torch"].met
    woken = "wake-up after the last apply's return"
    assert found[woken, "a pipe message"].met
    assert not found[f"{woken}, with steps()", "a pipe message"].met


def test_missed_targets_stand_first() -> None:
    met = [verdict.met for verdict in verdicts(fake_results())]
    assert met == sorted(met)
    assert len(set(met)) == 2


def test_ids_with_repeats_are_judged_by_the_clock() -> None:
    measured = {"shmacc": Measured(answer="right", turns=[[2_900_000.0, 3_100_000.0]])}
    cases = [
        results.case_record(Case("ids", operation, workload, ("shmacc",)), measured)
        for operation in (Operation.APPLY, Operation.ROUND)
        for workload in (IDS, SORTED_IDS)
    ]
    verdict, over_sorted = verdicts({"cases": cases, "scenarios": {}})
    assert over_sorted.measured == 1
    assert (verdict.what, verdict.unit) == ("apply, 50,000 x 64 zipf", "ms")
    assert verdict.measured == pytest.approx(3.0)
    assert verdict.met


def test_ratios_need_shmacc() -> None:
    assert ratios({"torch": Measured(turns=[[1.0]])}) == {}


def test_report_shows_targets_tables_and_who_is_missing(tmp_path: Path) -> None:
    path = results.save(fake_results(), tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["cases"][0]["peers"]["torch"]["median"] == 4
    # Not in this process: every later fork would copy what matplotlib takes.
    outcome = subprocess.run(
        [sys.executable, _BENCH, "report", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "MISSED" in outcome.stdout
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| torch | missing | ModuleNotFoundError |" in page
    assert "1 [1-1] x2" in page
    assert "| all | 3.5 |" in page
    assert "| 1,000 x 64 | 2 us | 2 |" in page, "in short, against the faster torch"
    for name in ("apply.svg", "round.svg"):
        assert (tmp_path / name).stat().st_size > 1000


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    results.save({"schema_version": -1}, tmp_path)
    with pytest.raises(ValueError, match="not results of version"):
        results.load(tmp_path)


def test_a_report_without_results_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "--output", str(tmp_path)])
    assert "results.json" in capsys.readouterr().err


def test_an_unknown_peer_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="no such peer: nobody"):
        known_peers(["nobody"])
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--peers", "nobody", "--output", str(tmp_path)])
    assert "no such peer: nobody" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_in_miniature_checks_the_answers(fleet: Fleet) -> None:
    assert fleet.about["no-such"]["status"] == "missing"
    assert fleet.about["shmacc"]["status"] == "measured"
    peers = ("shmacc", "numpy-fancy", "numpy-add-at", "np.add")
    operations = [op for op in Operation if op is not Operation.APPLY_NEW]
    cases = [Case("tiny", operation, TINY, peers) for operation in operations]
    cases += [Case("tiny", Operation.ROUND, TINY_DENSE, peers)]
    zipf = Workload("sparse", 50, 2, table_rows=40, order="zipf")
    cases += [Case("tiny", Operation.APPLY, zipf, peers)]
    records = [
        results.case_record(case, measured)
        for case, measured in run_cases(fleet, cases, BRIEF, quiet)
    ]
    assert len(records) == len(cases)
    for record in records:
        mine = record["peers"]["shmacc"]
        assert mine["answer"] == "right"
        assert 0 < mine["p10"] <= mine["median"] <= mine["p90"]
        assert record["ratios"]["numpy-add-at"]["median"] > 0
        assert record["peers"]["numpy-add-at"]["answer"] == "right"
        limited = "problem" in record["peers"]["np.add"]
        assert limited == (record["operation"] not in {"apply", "apply, full table"})
    assert records[-1]["peers"]["numpy-fancy"] == {"problem": "loses repeated indices"}


def measured(found: dict[str, dict[str, Any]], scenario: str, peer: str = "shmacc") -> Any:
    """What a scenario found about a peer, which had no problem."""
    of = found[scenario][peer]
    assert "problem" not in of, of["problem"]
    return of


def test_waking_is_measured_across_processes(fleet: Fleet) -> None:
    plans = {"wakeup": Plan(("shmacc", "numpy-fancy", "np.add"), steps=1, quick_steps=1)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    for peer in ("shmacc", "numpy-fancy"):
        of = measured(found, "wakeup", peer)
        assert of["from_call"]["count"] == 5
        assert of["from_call"]["median"] > of["from_return"]["median"]
    assert (of := found["wakeup"]["shmacc"])["with_steps"]["count"] == 5
    assert of["next_step"]["count"] == 4
    assert found["wakeup"]["np.add"] == {"problem": "its take cannot wait"}


def test_whole_rounds_need_torch_and_are_judged_in_pairs(fleet: Fleet) -> None:
    """Of tests/home are those that make rounds."""
    turns = [[[(1.0, 4.0), (9.0, 18.0), (2.0, 8.0)]] * len(ROUNDS)]
    found = {"realistic": {"shmacc": results.plain(summary([{"turns": of} for of in turns]))}}
    judged = verdicts({"cases": [], "scenarios": found})
    assert [(v.measured, v.limit) for v in judged] == [(0.25, limit) for *_, limit in ROUNDS]
    assert len({v.what for v in judged}) == len(ROUNDS)
    [table] = [
        t for t in all_tables(fake_results() | {"scenarios": found}) if "ealistic" in t.title
    ]
    assert [row[1] for row in table.rows] == ["2 [1.2-7.6]"] * len(ROUNDS)
    if importlib.util.find_spec("torch") is None:
        plans = {"realistic": Plan(("shmacc",), steps=1, quick_steps=1)}
        found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
        assert "torch" in found["realistic"]["shmacc"]["problem"]


def test_listing_is_judged_against_the_other_version(fleet: Fleet) -> None:
    plans = {"listing": Plan(("shmacc", "shmacc-1.0"), steps=1, quick_steps=2)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    of = measured(found, "listing")
    assert of["list_ms"]["count"] == len(of["steps"]) == 2
    found["listing"]["shmacc-1.0"] = of | {"steps": [4 * ms for ms in of["steps"]]}
    [verdict] = verdicts({"cases": [], "scenarios": found})
    assert verdict.measured == pytest.approx(0.25)
    assert verdict.met


def test_the_cost_model_is_made_of_parts(fleet: Fleet) -> None:
    plans = {"parts": Plan(("shmacc",), steps=1, quick_steps=1)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    assert measured(found, "parts")["copy"] > 0
    made = list(models(found))
    assert [model.what for model in made] == [workload.label for workload in WORKLOADS]
    assert all(model.before >= 0 and model.locked > 0 for model in made)
    table = next(t for t in all_tables(fake_results() | {"scenarios": found}) if "Cost" in t.title)
    assert len(table.rows) == len(made)


def test_the_cost_model_says_what_its_formula_says() -> None:
    alone = Model("", before=3e-6, locked=1e-6, bytes_moved=1000, measured_by_two=None)
    assert alone.rate(2) == pytest.approx(500_000)
    assert alone.rate(64) == alone.rate(16) == pytest.approx(1_000_000)
    assert alone.rate(64, lanes=8) == pytest.approx(8_000_000)
    assert alone.gigabytes(1_000_000) == pytest.approx(1)
    by_two = dataclasses.replace(alone, measured_by_two=300_000)
    assert by_two.rate(16) == alone.rate(16), "two do not fill the lock"
    full = dataclasses.replace(by_two, before=0.5e-6)
    assert full.rate(16) == pytest.approx(300_000)


def test_what_starts_after_its_time_is_measured_all_the_same() -> None:
    peer = ShmaccPeer()
    peer.open(TINY)
    try:
        member = Member(peer)
        member.use([make_gradient(TINY)])
        count, elapsed = member.apply_for(0, 1)
        assert (count, elapsed > 0) == (1, True)
    finally:
        peer.close()


def test_one_and_two_processes_are_measured_with_lanes_and_without(fleet: Fleet) -> None:
    plans = {"lanes": Plan(("shmacc",), steps=1, quick_steps=1)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    lines = measured(found, "lanes")["measured"]
    assert [(line["rows"], line["how"]) for line in lines] == [
        (rows, how) for rows in (10, 1_000, 10_000, 50_000) for how in VARIANTS
    ]
    assert lines[0]["times_alone"]["median"] == 1
    assert all(line["applies_per_second"] > 0 for line in lines)
    judged = verdicts({"cases": [], "scenarios": found})
    gains = {
        line["rows"]: line["times_alone"]["median"]
        for line in lines
        if line["how"] == "2 processes, 2 lanes"
    }
    assert {(v.limit, v.measured) for v in judged} == {
        (1 / limit, 1 / gains[rows]) for rows, limit in LANES_GAIN.items()
    }
    table = next(
        t for t in all_tables(fake_results() | {"scenarios": found}) if t.title.startswith("One")
    )
    assert len(table.rows) == len(lines)


def test_many_tensors_are_measured_as_a_group_and_singly(fleet: Fleet) -> None:
    plans = {"many_tensors": Plan(("shmacc",), steps=1, quick_steps=1)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    of = measured(found, "many_tensors")
    assert of["tensors"] == 16
    assert 52 <= of["bytes"] / 1024 <= 68
    assert of["group"]["count"] == of["singles"]["count"] == 5
    assert 0 < of["group_bytes"] < of["singles_bytes"]
    judged = verdicts({"cases": [], "scenarios": found})
    assert [(v.limit, v.unit) for v in judged] == [(25, "us"), (400, "KiB")]
    table = next(
        t for t in all_tables(fake_results() | {"scenarios": found}) if "tensors" in t.title
    )
    assert len(table.rows) == 2


def test_arrays_of_others_are_measured_against_numpys(fleet: Fleet) -> None:
    plans = {"arrays_in": Plan(("shmacc",), steps=1, quick_steps=1)}
    found = dict(run_scenarios(fleet, plans, quick=True, tell=quiet))
    lines = measured(found, "arrays_in")["measured"]
    assert "lists" in lines[0]["what"]  # the others are of packages that need not be here
    assert all(line["apply"]["count"] == line["other"]["count"] == 5 for line in lines)
    judged = verdicts({"cases": [], "scenarios": found})
    assert [(v.limit, v.measured) for v in judged] == [
        (2, line["ratio"]["median"]) for line in lines
    ]
    table = next(
        t for t in all_tables(fake_results() | {"scenarios": found}) if "of others" in t.title
    )
    assert len(table.rows) == len(lines)


def test_ids_are_judged_by_the_clock_and_by_the_same_ids_sorted() -> None:
    cases = []
    for workload, us in ((IDS, 3200.0), (SORTED_IDS, 1600.0)):
        measured = {"shmacc": Measured(answer="right", turns=[[us * 1000]])}
        case = Case("ids", Operation.APPLY, workload, ("shmacc",))
        cases.append(results.case_record(case, measured))
    judged = verdicts({"cases": cases, "scenarios": {}})
    assert [(v.against, v.measured, v.met) for v in judged] == [
        ("", 3.2, False),
        ("the same sorted", 2.0, False),
    ]


def test_a_dead_peer_is_a_result_and_is_started_again() -> None:
    with Fleet.of(["np.add"]) as alone:
        member = alone.members["np.add"]
        with pytest.raises(PeerFailedError, match="no workload is open"):
            member.ask("begin", "apply")
        member.process.kill()
        with pytest.raises(PeerFailedError):
            member.ask("open", TINY)
        [again] = alone.ready(["np.add"]).values()
        assert again is not member
        assert again.ask("open", TINY) == "no take"


def test_instructions_are_summed_by_object() -> None:
    lines = """positions: line
events: Ir
ob=(1) /usr/lib/python3
fn=(1) main
10 5
+2 7
cob=(2) /site/shmacc/_core.so
cfn=(2) apply
calls=1 20
12 1000
ob=(2)
fn=(2)
20 900
* 100
ob=(1)
fn=(1)
-3 4
"""
    costs = cost_by_object(line + "\n" for line in lines.splitlines())
    assert costs == {"/usr/lib/python3": 16, "/site/shmacc/_core.so": 1000}


def test_a_call_that_became_heavier_is_seen() -> None:
    before = {"a": Count(1000, 100), "b": Count(1000, 100), "gone": Count(1, 1)}
    assert heavier({"a": Count(1019, 102), "b": Count(1000, 100), "new": Count(9, 9)}, before) == []
    assert heavier({"a": Count(1021, 100), "b": Count(1000, 103)}, before) == ["a", "b"]
