"""The tables of a run, as text in cells: once for the terminal and for Markdown alike."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any

from shmacc_bench.cases import TORCH
from shmacc_bench.cost_model import CORES, LANES, models
from shmacc_bench.operations import Operation
from shmacc_bench.peers import MODULES
from shmacc_bench.runner import MAIN_PEER
from shmacc_bench.targets import Verdict, fastest, verdicts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NONE = "-"
FROM_HERE_WHOLE = 1000
SHORT = (TORCH, ("tf-local",), ("tf-server",), ("np.add",))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A title, a note on how to read it, the head and the rows."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def figure(value: float) -> str:
    """Return three digits that matter, without exponents."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= FROM_HERE_WHOLE else f"{rounded:g}"


def all_tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return all tables that there are figures for, the targets first."""
    found = verdicts(results)
    if found:
        yield _targets_table(found)
    yield from _short_tables(results["cases"])
    yield from case_tables(results["cases"])
    scenarios = results["scenarios"]
    for name, build in SCENARIO_TABLES.items():
        if scenarios.get(name):
            yield build(scenarios[name])
    if "measured" in scenarios.get("parts", {}).get("shmacc", {}):
        yield _cost_table(scenarios)
    yield _seconds_table(results["seconds"])
    yield _peers_table(results["peers"])


def _targets_table(found: Sequence[Verdict]) -> Table:
    rows = [
        (
            verdict.what,
            verdict.against or NONE,
            f"{figure(verdict.measured)} {verdict.unit}",
            f"<= {figure(verdict.limit)} {verdict.unit}",
            "yes" if verdict.met else "MISSED",
        )
        for verdict in found
    ]
    return Table(
        "Targets",
        "x: shmacc's time over that peer's (of several, the fastest), paired by round",
        ("row", "against", "measured", "goal", "met"),
        rows,
    )


def _short_tables(cases: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Return a table of an apply, and one of a round: a line for each workload."""
    for operation in (Operation.APPLY, Operation.ROUND):
        same = [
            case
            for case in cases
            if (case["family"], case["operation"]) == ("rows", operation.value)
            and "median" in case["peers"].get(MAIN_PEER, {})
        ]
        against = [names for names in SHORT if any(fastest(case, names) for case in same)]
        rows = [
            (
                case["workload"],
                f"{figure(case['peers'][MAIN_PEER]['median'])} us",
                *(_ratio(case, names) for names in against),
            )
            for case in same
        ]
        if rows:
            head = (operation.value, "time", *(" or ".join(names) for names in against))
            note = "shmacc's time, and the same over that of others (of two, the faster)"
            yield Table(f"In short: {operation.value}", note, head, rows)


def _ratio(case: dict[str, Any], names: Sequence[str]) -> str:
    against = fastest(case, names)
    return figure(case["ratios"][against]["median"]) if against in case["ratios"] else NONE


def case_tables(cases: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Return one table for each family and operation: a column for each workload."""
    key = operator.itemgetter("family", "operation")
    for (family, operation), group in itertools.groupby(sorted(cases, key=key), key=key):
        same = list(group)
        names = [
            name for name in MODULES if any("median" in c["peers"].get(name, {}) for c in same)
        ]
        if not names:
            continue
        rows = [(name, *(_cell(case, name) for case in same)) for name in names]
        yield Table(
            f"{family}: {operation} (us)",
            "median [p10-p90]; x: shmacc's time over this peer's, below 1 shmacc is faster; "
            "(!) the peer's answer is not the mean by rows",
            ("", *(case["workload"] for case in same)),
            rows,
        )


def _cell(case: dict[str, Any], name: str) -> str:
    peer = case["peers"].get(name, {})
    if "median" not in peer:
        return NONE
    text = f"{figure(peer['median'])} [{figure(peer['p10'])}-{figure(peer['p90'])}]"
    if peer["answer"].startswith("wrong"):
        text += " (!)"
    if name in case["ratios"]:
        text += f" x{figure(case['ratios'][name]['median'])}"
    return text


def _distribution(found: Mapping[str, float] | None) -> str:
    if not found:
        return NONE
    return f"{figure(found['median'])} [{figure(found['p10'])}-{figure(found['p90'])}]"


def _wakeup_table(found: dict[str, Any]) -> Table:
    columns = {
        "from_call": "from the call of the last apply",
        "from_return": "from its return",
        "with_steps": "from its return, in a loop over steps()",
        "next_step": "the next step there, from the take's return",
        "pipe": "limit: a pipe message",
    }
    rows = [(name, *(_distribution(of.get(key)) for key in columns)) for name, of in found.items()]
    head = ("", *columns.values())
    return Table("A waiting take returns (us)", "in another process; 10 x 64", head, rows)


def _throughput_table(found: dict[str, Any]) -> Table:
    lines: dict[tuple[int, str, int], dict[str, str]] = {}
    for name, of in found.items():
        for line in of.get("measured", ()):
            place = (line["rows"], line["pattern"], line["processes"])
            rate, fair = figure(line["applies_per_second"]), figure(line["fairness"])
            lines.setdefault(place, {})[name] = f"{rate} (fair {fair})"
    names = [name for name in found if "measured" in found[name]]
    rows = [
        (f"{rows:,} x 64 {pattern}, {n} at once", *(cells.get(name, NONE) for name in names))
        for (rows, pattern, n), cells in lines.items()
    ]
    note = "fair: the slowest process's share over the fastest's; 1 is even"
    return Table("Several processes apply (applies a second, together)", note, ("", *names), rows)


def _realistic_table(found: dict[str, Any]) -> Table:
    rows = [
        (line["what"], *(_distribution(line[key]) for key in ("shmacc", "torch", "ratio")))
        for of in found.values()
        for line in of.get("measured", ())
    ]
    note = "ids with repeats and float32; Adagrad; one thread a process; in pairs of rounds"
    head = ("", "shmacc", "torch, by hand", "paired ratio")
    return Table("Realistic rounds: workers' applies, take, update (ms)", note, head, rows)


def _listing_table(found: dict[str, Any]) -> Table:
    rows = [(name, _distribution(of.get("list_ms"))) for name, of in found.items()]
    return Table("shmacc-inspect list, 500 segments (ms)", "", ("", "median [p10-p90]"), rows)


def _cost_table(scenarios: dict[str, Any]) -> Table:
    head = (
        *("", "p (us)", "s (us)", "2 processes: measured", "2: model"),
        *(f"{n}: {how}" for n in CORES for how in ("one lock", f"{LANES} lanes (GB/s)")),
    )
    rows = []
    for model in models(scenarios):
        by_two = NONE if model.measured_by_two is None else figure(model.measured_by_two)
        cells = [figure(model.before * 1e6), figure(model.locked * 1e6), by_two]
        cells.append(figure(min(2 / (model.before + model.locked), 1 / model.locked)))
        for writers in CORES:
            rate = model.rate(writers, LANES)
            cells += [
                figure(model.rate(writers)),
                f"{figure(rate)} ({figure(model.gigabytes(rate))})",
            ]
        rows.append((model.what, *cells))
    copy = scenarios["parts"]["shmacc"]["copy"] / 1e9
    note = (
        "applies a second of as many processes, all together: min(N / (p + s), 1 / s), where p is "
        "an apply's part before the lock and s the part under it; where two processes fill the "
        "lock, what they do stands for 1 / s. GB/s: what memory must move for that; one process "
        "copies at "
        f"{figure(copy)} GB/s here, and what a socket has is the limit of these columns"
    )
    return Table("Cost model for 16 and 64 cores", note, head, rows)


def _seconds_table(seconds: dict[str, float]) -> Table:
    rows = [(name, figure(of)) for name, of in seconds.items()]
    rows.append(("all", figure(sum(seconds.values()))))
    return Table("Where the time of this run went (seconds)", "", ("", "seconds"), rows)


def _lanes_table(found: dict[str, Any]) -> Table:
    rows = [
        (
            f"{line['rows']:,} x 64, {line['how']}",
            figure(line["applies_per_second"]),
            _distribution(line["times_alone"]),
        )
        for of in found.values()
        for line in of.get("measured", ())
    ]
    head = ("", "applies/s, together", "times those of 1 process, 1 lane")
    return Table("One and two processes", "paired turns in one run", head, rows)


def _many_tensors_table(found: dict[str, Any]) -> Table:
    rows = [
        (
            f"{of['tensors']} tensors, {of['bytes'] / 1024:.0f} KiB, as {how}",
            _distribution(of[key]),
            figure(of[f"{key}_bytes"] / 1024),
            ratio,
        )
        for of in found.values()
        if "group" in of
        for key, how, ratio in (
            ("group", "a group", _distribution(of["ratio"])),
            ("singles", "an accumulator each", NONE),
        )
    ]
    head = ("", "an apply of all (us)", "shared memory (KiB)", "time over an accumulator each")
    return Table("Many tensors", "dense float32; 100 applies and a take a turn", head, rows)


def _arrays_in_table(found: dict[str, Any]) -> Table:
    rows = [
        (
            f"{line['what']}, over {line['against']}",
            _distribution(line["apply"]),
            _distribution(line["other"]),
            _distribution(line["ratio"]),
        )
        for of in found.values()
        for line in of.get("measured", ())
    ]
    head = ("", "an apply (us)", "the other (us)", "paired ratio")
    return Table("Arrays of others", "float32; calls in batches, in pairs of turns", head, rows)


def _recovery_table(found: dict[str, Any]) -> Table:
    rows = []
    for name, of in found.items():
        if "ordinary" not in of:
            continue
        after = "never: blocked" if of["blocked_for_ever"] else _distribution(of["after_kill"])
        worst = of["worst_after_kill"]
        worst_text = NONE if worst is None or of["blocked_for_ever"] else figure(worst)
        undone = NONE if of["undone"] is None else str(of["undone"])
        rows.append((name, _distribution(of["ordinary"]), after, worst_text, undone))
    head = ("", "ordinary", "after a kill", "worst", "undone")
    note = "50,000 x 64; another process was killed inside its apply"
    return Table("The next apply after a kill (us)", note, head, rows)


def _memory_table(found: dict[str, Any]) -> Table:
    def mebibytes(value: float | None) -> str:
        return NONE if value is None else figure(value / 2**20)

    rows = [
        (
            f"{name}: {line['rows']:,} x {line['width']}",
            mebibytes(line["bytes_of_rows"]),
            mebibytes(line["allocated"]),
            mebibytes(line["allocated_after_take"]),
            mebibytes(line["resident"]),
            mebibytes(line["allowed"]) if line["allocated"] else NONE,
        )
        for name, of in found.items()
        for line in of.get("measured", ())
    ]
    head = ("", "rows' own", "segment", "segment after a take", "resident", "target")
    note = "1,000,000 possible rows, these held; resident: growth of a fresh process"
    return Table("Memory (MiB)", note, head, rows)


def _startup_table(found: dict[str, Any]) -> Table:
    rows = []
    for name, of in found.items():
        if "import_ms" not in of:
            continue
        rows.append(
            (f"{name}: import and first use, over NumPy's (ms)", _distribution(of["import_ms"]))
        )
        rows.append(
            (f"{name}: import and first use, over NumPy's (MiB)", _distribution(of["import_mib"]))
        )
        if "create_us" in of:
            rows.append((f"{name}: create (us)", _distribution(of["create_us"])))
            rows.append((f"{name}: attach (us)", _distribution(of["attach_us"])))
            rows.append((f"{name}: resident memory of a handle (KiB)", figure(of["attach_kib"])))
    return Table("Start-up", "", ("", "median [p10-p90]"), rows)


def _peers_table(peers: dict[str, Any]) -> Table:
    rows = []
    for name, about in peers.items():
        if about["status"] == "measured":
            versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
            rows.append((name, versions, about["how"]))
        else:
            rows.append((name, about["status"], about["reason"]))
    return Table("Who was measured, and how", "", ("", "versions", "how"), rows)


SCENARIO_TABLES: Mapping[str, Callable[[dict[str, Any]], Table]] = {
    "wakeup": _wakeup_table,
    "throughput": _throughput_table,
    "realistic": _realistic_table,
    "listing": _listing_table,
    "lanes": _lanes_table,
    "many_tensors": _many_tensors_table,
    "arrays_in": _arrays_in_table,
    "recovery": _recovery_table,
    "memory": _memory_table,
    "startup": _startup_table,
}
