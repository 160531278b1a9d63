"""Draws a terminal's screen as SVG that looks the same wherever it is shown.

No font is fetched: text is set in whatever monospaced font there is, each run of it stretched to
exactly its columns, and the characters that bars are made of are drawn as rectangles, since many
fonts lack them.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyte
    from pyte.screens import Char

FONTS: Final = (
    "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,Liberation Mono,monospace"
)
CELL: Final = (8.4, 18.0)  # width and height
BASELINE: Final = 13.2
MARGIN: Final = 14.0
HEAD: Final = 34.0
PAPER: Final = "#1b1d23"
INK: Final = "#d3d7de"
FAINT: Final = "#868c98"
START: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
    f'font-family="{FONTS}" font-size="14" role="img">'
)
HEADING: Final = f'<text x="{{x:g}}" y="22" fill="{FAINT}" text-anchor="middle">{{title}}</text>'
COLOURS: Final = {
    "default": INK,
    "red": "#ef6b73",
    "green": "#8cc570",
    "brown": "#dfb65f",  # pyte's name for what terminals show as yellow
    "magenta": "#c983dd",
    "cyan": "#5bb8c4",
}
_BARS: Final = {mark: eighths / 8 for eighths, mark in enumerate("▁▂▃▄▅▆▇█", start=1)}
_SHADE: Final = "░"
_TALL: Final = 0.86  # height of a full bar in cells: lines of bars must not touch
_PIECE: Final = re.compile(r"\S+(?: \S+)*")


def svg(screen: pyte.Screen, title: str) -> str:
    """Return the picture of a screen, below a title, without empty lines at its end."""
    used = [y for y, line in enumerate(screen.display) if line.strip()]
    height = HEAD + (max(used, default=0) + 1) * CELL[1] + MARGIN
    width = screen.columns * CELL[0] + 2 * MARGIN
    parts = [
        START.format(width=width, height=height),
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>',
        HEADING.format(x=width / 2, title=escape(title)),
    ]
    for y in used:
        cells = [screen.buffer[y][x] for x in range(screen.columns)]
        parts += _line(cells, y)
    return "\n".join([*parts, "</svg>", ""])


def _line(cells: Sequence[Char], y: int) -> Iterator[str]:
    place = 0

    def look(cell: Char) -> tuple[object, ...]:
        kind = "bar" if cell.data in _BARS else "shade" if cell.data == _SHADE else "text"
        return cell.fg, cell.bold, cell.reverse, kind, cell.data if kind == "bar" else ""

    for _, run in itertools.groupby(cells, look):
        characters = list(run)
        yield from _run(characters, place, y)
        place += len(characters)


def _run(cells: list[Char], x: int, y: int) -> Iterator[str]:
    first, text = cells[0], "".join(cell.data for cell in cells)
    left, top = MARGIN + x * CELL[0], HEAD + y * CELL[1]
    width, height = len(cells) * CELL[0], CELL[1]
    colour = COLOURS.get(first.fg, INK)
    if first.data in _BARS:
        tall = height * _BARS[first.data] * _TALL
        yield _rectangle(left, top + height - tall, width, tall, colour)
    elif first.data == _SHADE:
        tall = height * _TALL
        yield _rectangle(left, top + height - tall, width, tall, colour, ' opacity="0.25"')
    elif first.reverse:
        yield _rectangle(left, top, width, height, colour)
        colour = PAPER
    if first.data in _BARS or first.data == _SHADE:
        return
    bold = ' font-weight="bold"' if first.bold else ""
    # Piece by piece, so that columns stand below each other whatever the widths of the font are.
    for piece in _PIECE.finditer(text):
        yield (
            f'<text x="{left + piece.start() * CELL[0]:g}" y="{top + BASELINE:g}" '
            f'textLength="{len(piece[0]) * CELL[0]:g}" lengthAdjust="spacingAndGlyphs" '
            f'fill="{colour}"{bold}>{escape(piece[0])}</text>'
        )


def _rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'
