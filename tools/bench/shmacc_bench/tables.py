"""Medians, ratios of paired turns, and the tables that show them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Table:
    """A table in Markdown, and a list of its figures that miss their goals."""

    title: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # a line for each goal that was missed

    def judged(self, what: str, measured: float, goal: float | None) -> str:
        """Return the figure as a cell; note it if it is above the goal."""
        if goal is None:
            return figure(measured)
        if measured > goal:
            self.missed.append(f"{self.title}: {what}: {figure(measured)} > {figure(goal)}")
        return f"{figure(measured)} (goal {figure(goal)})"

    def compare(
        self, what: str, turns: Sequence[tuple[float, float]], goal: float | None, *beside: str
    ) -> None:
        """Add a row: our spread, the cells `beside`, the peer's spread, and the ratio."""
        mine, theirs = (spread([turn[side] for turn in turns]) for side in (0, 1))
        self.rows.append((what, mine, *beside, theirs, self.judged(what, paired(turns), goal)))

    def __str__(self) -> str:
        """Return the table in Markdown."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, ""])


def figure(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.12g}"


def spread(samples: Sequence[float]) -> str:
    """Return the median and, in brackets, the 10th and the 90th percentile."""
    low, median, high = map(figure, np.percentile(samples, (10, 50, 90)))
    return f"{median} [{low}-{high}]"


def paired(turns: Sequence[tuple[float, float]]) -> float:
    """Return the median ratio of ours to theirs.

    Both sides of a pair ran within a fraction of a second: a machine that was busy with something
    else slowed both, so this ratio is steadier than either time.
    """
    return statistics.median(ours / theirs for ours, theirs in turns)
