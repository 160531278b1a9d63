"""What a verb shows: headings, fields, tables; coloured and fitted on a terminal, plain in a pipe.

In a pipe nothing is cut, coloured or left out, and a cell without a value is `-`, so that awk and
grep can rely on it. Rich is imported for terminals only; it takes a quarter of the time that a verb
has.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmacc_inspect import words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

EMPTY: Final = "-"
_GAP: Final = 2
_LABEL_WIDTH: Final = 12


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in a style of rich's (which a pipe ignores)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        right: Numbers stand on the right.
        rank: Where the terminal is narrow, columns of the highest rank go first; 0: stays.
        least: Its cells may be shortened to so many characters before columns go; 0: never.
    """

    title: str
    right: bool = False
    rank: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Fields:
    """Labels and what they say."""

    items: Iterable[tuple[str, Cell]]


@dataclass(frozen=True, slots=True)
class Heading:
    """Stands above something, set off by an empty line."""

    text: str
    note: Cell = field(default=Cell(""))


Element = Table | Fields | Heading | Cell


def show(elements: Iterable[Element]) -> None:
    """Prints them on stdout, as suits what stdout is."""
    if is_terminal():
        console = make_console()
        for element in elements:
            console.print(rendered(element, console.width), no_wrap=isinstance(element, Table))
    else:
        for element in elements:
            for line in plain(element):
                print(line)


def is_terminal() -> bool:
    """Whether somebody looks at stdout who can make use of more than lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def make_console() -> Console:
    """Rich's idea of stdout; it heeds NO_COLOR and the width."""
    from rich.console import Console  # late: see above

    return Console(highlight=False, emoji=False)


def tell(text: str) -> None:
    """Talk, which goes to stderr."""
    print(f"shmacc-inspect: {text}", file=sys.stderr)


# -- plain ----------------------------------------------------------------------------------------


def plain(element: Element) -> list[str]:
    """An element as lines without colours."""
    match element:
        case Cell(text):
            return [text]
        case Heading(text, note):
            return ["", f"{text} {note.text}".rstrip()]
        case Fields(items):
            return [f"{label:<{_LABEL_WIDTH}}  {cell.text or EMPTY}" for label, cell in items]
        case Table(columns, rows):
            lines = [[column.title for column in columns]]
            lines += [[cell.text or EMPTY for cell in row] for row in rows]
            widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
            return [_aligned(cells, columns, widths) for cells in lines]


def _aligned(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    parts = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return (" " * _GAP).join(parts).rstrip()


# -- rich -----------------------------------------------------------------------------------------


def rendered(element: Element, width: int) -> RenderableType:
    """An element as something that rich prints, within that width."""
    match element:
        case Cell():
            return _text(element)
        case Heading(text, note):
            from rich.text import Text  # late: see above

            return Text.assemble("\n", (text, "bold"), " ", (note.text, note.style))
        case Fields(items):
            return _rich_fields(items)
        case Table():
            return _rich_table(element, width)


def _text(cell: Cell, width: int | None = None) -> Text:
    from rich.text import Text  # late: see above

    shown = cell.text if width is None else words.shorten(cell.text, width)
    return Text(shown or EMPTY, style=cell.style if cell.text else "dim", overflow="fold")


def _rich_fields(items: Iterable[tuple[str, Cell]]) -> RenderableType:
    from rich.table import Table as Grid  # late: see above

    grid = Grid.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(style="cyan", no_wrap=True, min_width=_LABEL_WIDTH)
    grid.add_column()
    for label, cell in items:
        grid.add_row(label, _text(cell))
    return grid


def _rich_table(table: Table, width: int) -> RenderableType:
    from rich.table import Table as Grid  # late: see above

    kept, widths = fitted(table, width)
    grid = Grid(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for i in kept:
        column = table.columns[i]
        grid.add_column(
            words.shorten(column.title, widths[i]),
            justify="right" if column.right else "left",
            no_wrap=True,
            width=widths[i],
        )
    for row in table.rows:
        grid.add_row(*(_text(row[i], widths[i]) for i in kept))
    return grid


def fitted(table: Table, width: int) -> tuple[list[int], dict[int, int]]:
    """Which columns a terminal of that width can show, and how wide.

    Those that shrink give way first, as far as is bearable; then columns go, the highest rank
    first; then what room there is goes back to those that shrank.
    """
    natural = {
        i: max([len(column.title), *(len(row[i].text or EMPTY) for row in table.rows)])
        for i, column in enumerate(table.columns)
    }
    least = {
        i: min(natural[i], column.least) if column.least else natural[i]
        for i, column in enumerate(table.columns)
    }
    kept = list(range(len(table.columns)))
    while len(kept) > 1 and _total(kept, least) > width:
        worst = max(kept, key=lambda i: (table.columns[i].rank, i))
        if table.columns[worst].rank == 0:
            break
        kept.remove(worst)
    room = width - _total(kept, least)
    widths = dict(least)
    for i in kept:
        more = max(0, min(room, natural[i] - least[i]))
        widths[i] += more
        room -= more
    return kept, widths


def left_out(table: Table, width: int) -> list[str]:
    """Titles of the columns for which there is no room."""
    kept, _ = fitted(table, width)
    return [column.title for i, column in enumerate(table.columns) if i not in kept]


def _total(kept: Sequence[int], widths: dict[int, int]) -> int:
    return sum(widths[i] + _GAP for i in kept) - _GAP
