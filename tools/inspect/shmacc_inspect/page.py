"""The output of verbs: headings, fields, tables; coloured on a terminal, plain in a pipe.

In a pipe, nothing is cut, coloured or left out. There an empty cell is shown as `-`, and each cell
except a line's last is one word, so that awk, sort and grep can read the output.

The types are named tuples: a dataclass takes five times as long to define, and every command waits
for that.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shmacc_inspect import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

EMPTY: Final = "-"
_GAP: Final = 2
_LABEL_WIDTH: Final = 12
_USUAL_WIDTH: Final = 80  # if a terminal does not tell its width
_LEAST_WIDTH: Final = 20  # for the text of a field
_IN_ASCII: Final = str.maketrans("█░▁▂▃▄▅▆▇…▶↑↓", "#._.:-=+*~>^v")
_PARTS: Final = re.compile(r"(\x1b\[[0-9;]*m)")
_STYLES: Final = {
    "bold": 1, "dim": 2, "reverse": 7, "red": 31, "green": 32, "yellow": 33, "magenta": 35,
    "cyan": 36,
}  # fmt: skip


class Cell(NamedTuple):
    """A piece of text, in styles such as `bold red` (ignored in a pipe).

    Attributes:
        text: The text.
        style: The styles.
        word: What tables show in a pipe instead; empty: the text with `-` for each space.
    """

    text: str
    style: str = ""
    word: str = ""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: The column's heading.
        cell: Called with a row's record; returns this column's text or `Cell` for the row.
        right: Whether it is aligned on the right, as numbers are.
        rank: On a narrow terminal, columns of the highest rank are left out first; 0: never.
        least: Before columns are left out, cells may be shortened to this many characters; 0:
            they are not shortened then.
        whole: Whether cells are never shortened, since users copy them.
    """

    title: str
    cell: Callable[[Any], Cell | str]
    right: bool = False
    rank: int = 0
    least: int = 0
    whole: bool = False


class Table(NamedTuple):
    """Rows of cells, below their columns' titles."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        records: Iterable[Any],
        style: Callable[[Any], str] = lambda _: "",
    ) -> Table:
        """Return a table with a row for each record; `style` is for cells that are mere text."""

        def cell(column: Column, record: Any) -> Cell:
            found = column.cell(record)
            return found if isinstance(found, Cell) else Cell(found, style(record))

        return cls(columns, [[cell(column, record) for column in columns] for record in records])


class Fields(NamedTuple):
    """Labels and their values."""

    items: Iterable[tuple[str, Cell]]


class Heading(NamedTuple):
    """A heading, with an empty line before it."""

    text: str
    note: Cell = Cell("")


Element = Table | Fields | Heading | Cell


class Terminal(NamedTuple):
    """The output device.

    Attributes:
        width: Characters in a line; None: no limit, in a pipe.
        colour: Whether it shows styles.
        plain: Whether it shows only ASCII.
    """

    width: int | None
    colour: bool
    plain: bool = False

    @classmethod
    def of_stdout(cls) -> Terminal:
        """Return stdout's terminal, or a device without width and colours."""
        plain = "utf" not in (sys.stdout.encoding or "").lower()
        if not is_terminal():
            return cls(None, colour=False, plain=plain)
        width = os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_WIDTH
        return cls(width, colour=not os.environ.get("NO_COLOR"), plain=plain)


def is_terminal() -> bool:
    """Whether stdout is a terminal that can show more than lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show(elements: Iterable[Element]) -> None:
    """Print the elements on stdout, formatted for a terminal or a pipe."""
    terminal = Terminal.of_stdout()
    for element in elements:
        for line in lines(element, terminal):
            print(line)


def size(count: int | None) -> Cell:
    """Return a number of bytes; in a pipe, in a form that `sort -h` reads."""
    return one_word("" if count is None else formatting.size(count))


def duration(seconds: float) -> Cell:
    """Return a length of time."""
    return one_word(formatting.duration(seconds))


def one_word(text: str) -> Cell:
    """Return a cell with this text; in a pipe, it is shown without its spaces."""
    return Cell(text, word=text.replace(" ", ""))


def write_line(text: str) -> None:
    """Print a message on stderr."""
    print(f"shmacc-inspect: {text}", file=sys.stderr)


def lines(element: Element, terminal: Terminal) -> list[str]:
    """Return an element of the page as lines of text."""
    match element:
        case Cell():
            return [paint(element, terminal)]
        case Heading(text, note):
            return ["", f"{paint(Cell(text, 'bold'), terminal)} {paint(note, terminal)}".rstrip()]
        case Fields(items):
            return [line for label, cell in items for line in _field(label, cell, terminal)]
        case Table():
            return _table(element, terminal)


def _field(label: str, cell: Cell, terminal: Terminal) -> Iterator[str]:
    """Yield a label and its text, which is wrapped if the terminal is too narrow."""
    texts = [cell.text or EMPTY]
    if terminal.width is not None:
        import textwrap  # late: a pipe does not need it

        room = max(_LEAST_WIDTH, terminal.width - _LABEL_WIDTH - _GAP)
        texts = textwrap.wrap(texts[0], room, break_on_hyphens=False) or texts
    head = paint(Cell(f"{label:<{_LABEL_WIDTH}}", "cyan"), terminal) + " " * _GAP
    for text in texts:
        yield head + paint(Cell(text, cell.style), terminal)
        head = " " * (_LABEL_WIDTH + _GAP)


def paint(cell: Cell, terminal: Terminal) -> str:
    """Return a piece of text in its style."""
    text = cell.text.translate(_IN_ASCII) if terminal.plain else cell.text
    if not terminal.colour or not cell.style or not text:
        return text
    codes = ";".join(str(_STYLES[word]) for word in cell.style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def crop(line: str, width: int) -> str:
    """Return a painted line, cut after `width` characters."""
    kept = []
    for part in _PARTS.split(line):
        if not part.startswith("\x1b"):
            kept.append(part[:width])
            width -= len(kept[-1])
        else:
            kept.append(part)
    return "".join(kept)


def _table(table: Table, terminal: Terminal) -> list[str]:
    if terminal.width is None:
        table = _in_words(table)
    kept, widths = fitted(table, terminal.width)
    titles = [Cell(column.title, "bold") for column in table.columns]
    return [
        (" " * _GAP).join(
            _padded(row[i], widths[i], table.columns[i], terminal, last=i == kept[-1]) for i in kept
        )
        for row in [titles, *table.rows]
    ]


def _in_words(table: Table) -> Table:
    """Return the table for a pipe: each cell is one word, except those of the last column."""
    last = len(table.columns) - 1
    return Table(
        [column._replace(title=column.title.replace(" ", "_")) for column in table.columns],
        [
            [
                Cell(cell.word or (cell.text if i == last else cell.text.replace(" ", "-")))
                for i, cell in enumerate(row)
            ]
            for row in table.rows
        ],
    )


def _padded(cell: Cell, width: int, column: Column, terminal: Terminal, *, last: bool) -> str:
    text = formatting.shorten(cell.text or (EMPTY if column.title else ""), width)
    room = " " * (width - len(text))
    painted = paint(Cell(text, cell.style if cell.text else "dim"), terminal)
    if column.right:
        return room + painted
    return painted if last else painted + room


def fitted(table: Table, width: int | None) -> tuple[list[int], dict[int, int]]:
    """Return the columns that fit into this width (None: all), and their widths.

    Columns are shortened first, to their least width. Then columns are left out: the highest rank
    first, and columns without any value even if their rank is 0. Then shortened columns get the
    remaining room. If the rest is still too wide, the widest columns are shortened, except whole
    ones: nobody can read a table whose lines are wrapped.
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
    empty = {i for i in kept if not any(row[i].text for row in table.rows)}
    while len(kept) > 1 and _total(kept, least) > width:
        worst = max(kept, key=lambda i: (table.columns[i].rank, i in empty, i))
        if table.columns[worst].rank == 0 and worst not in empty:
            break
        kept.remove(worst)
    widths = dict(least)
    cut = [i for i in kept if not table.columns[i].whole]
    while _total(kept, widths) > width and max((widths[i] for i in cut), default=0) > 1:
        widths[max(cut, key=widths.__getitem__)] -= 1
    room = max(0, width - _total(kept, widths))
    for i in kept:
        more = max(0, min(room, natural[i] - widths[i]))
        widths[i] += more
        room -= more
    return kept, widths


def left_out(table: Table, width: int | None) -> list[str]:
    """Return the titles of the columns that `fitted` leaves out."""
    kept, _ = fitted(table, width)
    return [column.title for i, column in enumerate(table.columns) if i not in kept]


def _total(kept: Sequence[int], widths: dict[int, int]) -> int:
    return sum(widths[i] + _GAP for i in kept) - _GAP
