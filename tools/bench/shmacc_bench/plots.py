"""The plots of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from shmacc_bench.operations import Operation
from shmacc_bench.peers import LIMITS, MODULES
from shmacc_bench.targets import limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

# So that two runs of the same results write the same bytes, and a diff shows what was measured.
mpl.rcParams["svg.hashsalt"] = "shmacc"
mpl.rcParams["svg.fonttype"] = "none"  # text is text, which can be found, copied and compared
mpl.rcParams["font.size"] = 9

COLOURS = dict(
    zip(
        MODULES,
        (
            "#d62728",
            "#f2a3a3",
            "#1f77b4",
            "#7fb4de",
            "#ff7f0e",
            "#ffbb78",
            "#2ca02c",
            "#98df8a",
            "#9467bd",
            "#8c564b",
            "#444444",
            "#999999",
        ),
        strict=True,
    )
)


def draw(results: dict[str, Any], directory: Path) -> list[Path]:
    """Draw every plot that there are figures for; return the files."""
    written: list[Path] = []
    rows = [case for case in results["cases"] if case["family"] == "rows"]
    for operation, name in (
        (Operation.APPLY, "apply"),
        (Operation.ROUND, "round"),
    ):
        cases = [case for case in rows if case["operation"] == operation.value]
        if cases:
            written.append(_save(_bars(cases, operation.value), directory, name))
    growth = [case for case in results["cases"] if case["family"] == "growth"]
    if growth:
        written.append(_save(_growth(growth), directory, "growth"))
    scenarios = results["scenarios"]
    if any("measured" in of for of in scenarios.get("throughput", {}).values()):
        written.append(_save(_throughput(scenarios["throughput"]), directory, "throughput"))
    return written


def _save(figure: Figure, directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.svg"
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return path


def _measured(cases: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in MODULES if any("median" in c["peers"].get(name, {}) for c in cases)]


def _bars(cases: Sequence[dict[str, Any]], title: str) -> Figure:
    names = _measured(cases)
    figure = Figure(figsize=(11, 4.2))
    axes = figure.subplots()
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        at, medians, low, high = [], [], [], []
        for group, case in enumerate(cases):
            peer = case["peers"].get(name, {})
            if "median" in peer:
                at.append(group + (place - (len(names) - 1) / 2) * width)
                medians.append(peer["median"])
                low.append(max(0.0, peer["median"] - peer["p10"]))
                high.append(max(0.0, peer["p90"] - peer["median"]))
        axes.bar(
            at,
            medians,
            width,
            yerr=(low, high),
            label=name,
            color=COLOURS[name],
            hatch="//" if name in LIMITS else None,
            error_kw={"lw": 0.6},
        )
    for group, case in enumerate(cases):
        limit = limit_of(case)
        if limit is not None:
            label = "_another_target" if group else "target"  # one entry in the legend
            axes.hlines(limit, group - 0.45, group - 0.3, "black", lw=1.5, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [case["workload"] for case in cases])
    axes.set_ylabel("microseconds (median, p10-p90)")
    axes.set_title(f"{title}: rows x float32, a table of 1,000,000 rows; lower is better")
    _finish(axes)
    return figure


def _growth(cases: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for name in _measured(cases):
        points = [
            (case["parameters"]["table_rows"], case["peers"][name]["median"])
            for case in cases
            if "median" in case["peers"].get(name, {})
        ]
        style = ":" if name in LIMITS else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", label=name, color=COLOURS[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows that are in the accumulator")
    axes.set_ylabel("microseconds (median)")
    axes.set_title("One apply of 1,000 x 8 as the table grows")
    _finish(axes)
    return figure


def _throughput(found: dict[str, Any]) -> Figure:
    lines = [(name, line) for name, of in found.items() for line in of.get("measured", ())]
    sizes = sorted({line["rows"] for _, line in lines})
    patterns = sorted({line["pattern"] for _, line in lines})
    figure = Figure(figsize=(11, 3.2 * len(sizes)))
    grid = figure.subplots(len(sizes), len(patterns), squeeze=False, sharex=True)
    for row, size in enumerate(sizes):
        for column, pattern in enumerate(patterns):
            axes = grid[row][column]
            for name in found:
                points = [
                    (line["processes"], line["applies_per_second"])
                    for of, line in lines
                    if (of, line["rows"], line["pattern"]) == (name, size, pattern)
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), marker="o", label=name, color=COLOURS[name]
                    )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            counts = sorted({line["processes"] for _, line in lines})
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_title(f"{size:,} x 64, {pattern} rows")
            axes.set_xlabel("processes that apply at once")
            axes.set_ylabel("applies a second, together")
            _finish(axes)
    return figure


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
