"""The table and the picture of a comparison."""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from shmacc_compare.frame import Run, way_of
from shmacc_compare.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.lines import Line2D

mpl.rcParams["svg.hashsalt"] = "shmacc"  # the same results are the same bytes
mpl.rcParams["svg.fonttype"] = "none"  # text is text
mpl.rcParams["font.size"] = 9
_WAYS: Final = Path(__file__).parent / "ways"
_NO_CODE: Final = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclasses.dataclass
class Runs:
    """What a way did.

    Attributes:
        whole: Of each task the run whose time is the median.
        busy: Of each task the median of processor seconds.
        worker_killed: The run in which a worker was killed.
        chief_killed: The run in which the process that leads was.
    """

    whole: dict[str, Run] = dataclasses.field(default_factory=dict)
    busy: dict[str, float] = dataclasses.field(default_factory=dict)
    worker_killed: Run | None = None
    chief_killed: Run | None = None


@dataclasses.dataclass
class Row:
    """A way and its runs."""

    way: str
    runs: Runs


def table(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """Return the table, in Markdown."""
    titles = [TASKS[task].TITLE for task in tasks]
    head = ["", *titles, "processor time", "a worker is killed", "the chief is killed", "lines"]
    lines = [head, ["---", *["---:"] * (len(tasks) + 1), "---", "---", "---:"]]
    for row in rows:
        runs = row.runs
        times = [_time(runs.whole.get(task)) for task in tasks]
        busy = [f"{runs.busy[task]:.1f}" if task in runs.busy else "" for task in tasks]
        deaths = [outcome(run) for run in (runs.worker_killed, runs.chief_killed)]
        processors = ", ".join(one for one in busy if one) + " s"
        cells = [way_of(row.way).TITLE, *times, processors, *deaths, str(lines_of_code(row.way))]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def page(table: str, machine: str, turns: int) -> str:
    """Return the page that has the table."""
    text = (_WAYS.parent / "page.md").read_text(encoding="utf-8")
    return (
        text.replace("{table}", table.rstrip())
        .replace("{machine}", machine)
        .replace("{turns}", str(turns))
    )


def outcome(run: Run | None) -> str:
    """Return what became of training."""
    if run is None:
        return ""
    if run.stopped is not None:
        return run.stopped
    if run.killed is None:
        return "reached"
    return f"{'begins again' if run.began_again else 'goes on'}, {run.seconds:.1f} s"


def draw(rows: Sequence[Row], tasks: Sequence[str], file: Path) -> None:
    """Draw the loss over time, a line for each way."""
    figure = Figure(figsize=(4.5 * len(tasks), 3.6), layout="constrained")
    lines: dict[str, Line2D] = {}
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for colour, row in enumerate(rows):
            run = row.runs.whole.get(task)
            if run is not None and run.losses:
                moments, _, losses = zip(*run.losses, strict=True)
                title = way_of(row.way).TITLE
                lines[title] = axes.plot(moments, losses, color=f"C{colour}", linewidth=1.2)[0]
        axes.set(title=TASKS[task].TITLE, xlabel="seconds", ylabel="loss", xscale="symlog")
        axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def lines_of_code(way: str) -> int:
    """Return how many lines of a way have code: no comments, docstrings or imports of types."""
    text = (_WAYS / f"{way}.py").read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    parsed = ast.parse(text)
    statements = [node for node in ast.walk(parsed) if isinstance(node, ast.stmt)]
    for node in statements:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_of_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_text or is_of_types:
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def _time(run: Run | None) -> str:
    if run is None:
        return ""
    return run.stopped or f"{run.seconds:.1f} s"
