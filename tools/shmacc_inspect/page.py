"""The output of verbs: headings, fields, tables; coloured on a terminal, plain in a pipe.

In a pipe nothing is cut, coloured or left out, and a cell without a value is `-`, so that awk and
grep can rely on it. Rich is used for the live screen alone: importing it takes as long as a verb
does.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmacc_inspect import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EMPTY: Final = "-"
_GAP: Final = 2
_LABEL_WIDTH: Final = 12
_STYLES: Final = {  # SGR parameters
    "bold": 1,
    "dim": 2,
    "reverse": 7,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "magenta": 35,
    "cyan": 36,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text, in styles such as `bold red` (ignored in a pipe)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        right: Whether it is aligned on the right, as numbers are.
        rank: On a narrow terminal, columns of the highest rank are left out first; 0: never. least:
        Its cells may be shortened to so many characters before columns are left out; 0: never.
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
    """Labels and their values."""

    items: Iterable[tuple[str, Cell]]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading, with an empty line before it."""

    text: str
    note: Cell = field(default=Cell(""))


Element = Table | Fields | Heading | Cell


@dataclass(frozen=True, slots=True)
class Terminal:
    """The output device.

    Attributes:
        width: Characters in a line; None: unlimited.
        colour: Whether styles show.
    """

    width: int | None
    colour: bool

    @classmethod
    def of_stdout(cls) -> Terminal:
        """Return stdout's terminal, or a device without width and colours."""
        if not is_terminal():
            return cls(None, colour=False)
        width = shutil.get_terminal_size().columns
        return cls(width, colour=not os.environ.get("NO_COLOR"))


def is_terminal() -> bool:
    """Whether stdout is a terminal that can show more than lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show(elements: Iterable[Element]) -> None:
    """Print them on stdout, formatted for a terminal or a pipe."""
    terminal = Terminal.of_stdout()
    for element in elements:
        for line in lines(element, terminal):
            print(line)


def write_line(text: str) -> None:
    """Print a message on stderr."""
    print(f"shmacc-inspect: {text}", file=sys.stderr)


def lines(element: Element, terminal: Terminal) -> list[str]:
    """Return an element as lines."""
    match element:
        case Cell():
            return [paint(element, terminal)]
        case Heading(text, note):
            return ["", f"{paint(Cell(text, 'bold'), terminal)} {paint(note, terminal)}".rstrip()]
        case Fields(items):
            return [
                paint(Cell(f"{label:<{_LABEL_WIDTH}}", "cyan"), terminal)
                + " " * _GAP
                + paint(Cell(cell.text or EMPTY, cell.style), terminal)
                for label, cell in items
            ]
        case Table():
            return _table(element, terminal)


def paint(cell: Cell, terminal: Terminal) -> str:
    """Return a piece of text in its style."""
    if not terminal.colour or not cell.style or not cell.text:
        return cell.text
    codes = ";".join(str(_STYLES[word]) for word in cell.style.split())
    return f"\x1b[{codes}m{cell.text}\x1b[0m"


def _table(table: Table, terminal: Terminal) -> list[str]:
    kept, widths = fitted(table, terminal.width)
    titles = [Cell(column.title, "bold") for column in table.columns]
    return [
        (" " * _GAP).join(
            _padded(row[i], widths[i], table.columns[i], terminal, last=i == kept[-1]) for i in kept
        )
        for row in (titles, *table.rows)
    ]


def _padded(cell: Cell, width: int, column: Column, terminal: Terminal, *, last: bool) -> str:
    text = formatting.shorten(cell.text or (EMPTY if column.title else ""), width)
    room = " " * (width - len(text))
    painted = paint(Cell(text, cell.style if cell.text else "dim"), terminal)
    if column.right:
        return room + painted
    return painted if last else painted + room


def fitted(table: Table, width: int | None) -> tuple[list[int], dict[int, int]]:
    """Return the columns that fit into that width (None: all), and their widths.

    Columns are shortened first, down to their least width; then columns are left out, the highest
    rank first; then the remaining room is given back to the shortened ones.
    """
    natural = {
        i: max([len(column.title), *(len(row[i].text or EMPTY) for row in table.rows)])
        for i, column in enumerate(table.columns)
    }
    if width is None:
        return list(natural), natural
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


def left_out(table: Table, width: int | None) -> list[str]:
    """Return the titles of the columns for which there is no room."""
    kept, _ = fitted(table, width)
    return [column.title for i, column in enumerate(table.columns) if i not in kept]


def _total(kept: Sequence[int], widths: dict[int, int]) -> int:
    return sum(widths[i] + _GAP for i in kept) - _GAP
