"""Shows the tables: on the terminal, and as a Markdown page beside the JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich.box
import rich.table
from rich.markup import escape

from shmacc_bench.tables import Table, all_tables

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

MARKDOWN_NAME = "results.md"
COLOURS = {"met": "green", "MISSED": "bold red"}


def print_report(results: dict[str, Any], console: Console) -> None:
    """Print all tables."""
    console.print(machine_line(results), highlight=False)
    for table in all_tables(results):
        shown = rich.table.Table(
            title=escape(table.title),
            caption=escape(table.note) or None,
            box=rich.box.SIMPLE_HEAD,
        )
        for column, name in enumerate(table.head):
            shown.add_column(name, justify="left" if column == 0 else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*(_coloured(cell) for cell in row))
        console.print(shown)


def write_markdown(results: dict[str, Any], directory: Path) -> Path:
    """Write all tables as one page."""
    parts = ["# Benchmark results", machine_line(results)]
    parts += [_markdown(table) for table in all_tables(results)]
    path = directory / MARKDOWN_NAME
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def machine_line(results: dict[str, Any]) -> str:
    """Return what it was measured on, in one sentence."""
    machine = results["machine"]
    kind = "a quick run" if results["quick"] else "a full run"
    return (
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, {machine['date']}; {kind}; "
        f"load {machine['load_before']} before."
    )


def _coloured(cell: str) -> str:
    colour = COLOURS.get(cell)
    return f"[{colour}]{cell}[/{colour}]" if colour else escape(cell)


def _markdown(table: Table) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    rule = ("---",) + ("---:",) * (len(table.head) - 1)
    note = [table.note, ""] if table.note else []
    lines = [f"## {table.title}", "", *note, line(table.head), line(rule)]
    return "\n".join([*lines, *(line(row) for row in table.rows)])
