"""Shows the tables: on the terminal, and as a Markdown page beside the JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmacc_bench.tables import Table, all_tables

if TYPE_CHECKING:
    from pathlib import Path

MARKDOWN_NAME = "results.md"


def print_report(results: dict[str, Any]) -> None:
    """Print all tables."""
    print(machine_line(results))
    for table in all_tables(results):
        print_table(table)


def print_table(table: Table) -> None:
    """Print a table, its columns aligned."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{table.title}")
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    if table.note:
        print(f"({table.note})")


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


def _markdown(table: Table) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    rule = ("---",) + ("---:",) * (len(table.head) - 1)
    note = [table.note, ""] if table.note else []
    lines = [f"## {table.title}", "", *note, line(table.head), line(rule)]
    return "\n".join([*lines, *(line(row) for row in table.rows)])
