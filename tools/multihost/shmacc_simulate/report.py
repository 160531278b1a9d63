"""The tables and plots of what was simulated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from shmacc_simulate.scenario import Result

# So that two runs write the same bytes.
mpl.rcParams["svg.hashsalt"] = "shmacc"
mpl.rcParams["svg.fonttype"] = "none"  # text is text, which can be found, copied and compared
mpl.rcParams["font.size"] = 9

Column = tuple[str, "Callable[[Result], str]"]


def _seconds(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2f} s"


HOSTS: Column = ("hosts x workers", lambda r: f"{r.scenario.hosts} x {r.scenario.workers}")
SHARDS: Column = ("shards", lambda r: f"{r.scenario.shards}")
TABLE: Column = (
    "table",
    lambda r: f"{r.scenario.table.rows:.0e} rows, {r.scenario.table.popularity}".replace(
        "e+0", "e"
    ),
)
NAME: Column = ("what differs", lambda r: r.scenario.name)
SECONDS: Column = ("round", lambda r: _seconds(r.seconds))
WORST: Column = ("worst round", lambda r: _seconds(r.worst))
BYTES: Column = ("GB a round", lambda r: f"{r.gigabytes:.3g}" if r.rounds else "-")
MESSAGES: Column = ("messages a round", lambda r: f"{r.messages:,.0f}" if r.rounds else "-")
GRADIENTS: Column = ("gradients a round", lambda r: f"{r.gradients:,.0f}" if r.rounds else "-")
LATE: Column = ("refused as late", lambda r: f"{r.late:.0%}" if r.rounds else "-")
LOST: Column = ("accepted, but lost", lambda r: f"{r.lost:.1%}" if r.lost else "0")
DIED: Column = ("deaths", lambda r: f"{r.died} in {len(r.rounds)} rounds")
REGRANTS: Column = ("grants withdrawn, batches lost", lambda r: f"{r.regrants}")
VOIDED: Column = ("void steps", lambda r: f"{r.voided}")
GAIN: Column = (
    "gain of adding up first",
    lambda r: f"{_gain(r):.1f} x",
)
MEAN: Column = ("rows of the mean", lambda r: f"{_mean(r):.2g} GB")


def _gain(result: Result) -> float:
    scenario = result.scenario
    return scenario.workers * scenario.shipped(1) / scenario.shipped(scenario.workers)


def _mean(result: Result) -> float:
    return result.scenario.shipped(round(result.gradients)) / 1e9


def table(results: Iterable[Result], columns: Sequence[Column]) -> str:
    """Return a table."""
    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    lines += ["| " + " | ".join(shown(result) for _, shown in columns) + " |" for result in results]
    return "\n".join(lines)


def draw(lines: dict[str, list[Result]], directory: Path) -> list[Path]:
    """Draw seconds, bytes and messages of a round against hosts; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    quantities: tuple[tuple[str, str, Callable[[Result], float]], ...] = (
        ("seconds", "seconds a round", lambda result: result.seconds),
        ("bytes", "GB between hosts a round", lambda result: result.gigabytes),
        ("messages", "messages between hosts a round", lambda result: result.messages),
    )
    written = []
    for name, label, of in quantities:
        figure = Figure(figsize=(6.5, 3.6))
        axes = figure.subplots()
        for title, results in lines.items():
            points = [(r.scenario.hosts, of(r)) for r in results if not math.isinf(r.seconds)]
            axes.plot(*zip(*points, strict=True), marker="o", label=title)
        axes.set_xscale("log")
        axes.set_yscale("log")
        counts = sorted({r.scenario.hosts for results in lines.values() for r in results})
        axes.set_xticks(counts, [str(count) for count in counts], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("hosts of 32 workers")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
        figure.tight_layout()
        path = directory / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written
