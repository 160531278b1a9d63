"""`list`: one row per segment."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import formatting, options, page
from shmacc_inspect.page import Cell, Column, Table
from shmacc_inspect.sorting import urgency

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc import inspection
    from shmacc_inspect.output.segments import Segment

DESCRIPTION: Final = """\
List segments, one row each.

A row has the segment's kind, round, attached processes, waiting takes, memory and state. A terminal
that is too narrow gets fewer columns; a pipe gets all of them, each one word."""
EXAMPLES: Final = """\
Examples:
  shmacc-inspect list
  shmacc-inspect list 'emb*' --sort bytes --reverse
  shmacc-inspect list --orphaned --mine
  shmacc-inspect list --stalled
  shmacc-inspect list --columns name,reserved --bytes --no-header | sort -nk2
  shmacc-inspect list --quiet --orphaned 'job7-*' | xargs -r shmacc-inspect remove --yes
  shmacc-inspect list --json | jq '.segments[] | select(.attached_dead > 0) | .name'"""

STATE_STYLES: Final = {
    "sound": "green",
    "finished": "cyan",
    "starting": "cyan",
    "orphaned": "yellow",
    "damaged": "bold red",
    "other version": "magenta",
    "not ours to read": "dim",
}
COLUMNS: Final = (
    Column("NAME", least=16),
    Column("KIND", rank=6),
    Column("DTYPE", rank=5),
    Column("SHAPE", rank=4),
    Column("REDUCE", rank=10),
    Column("STEP", right=True),
    Column("GRADS", right=True),
    Column("ROWS", right=True, rank=3),
    Column("USED", right=True, rank=7),
    Column("RESERVED", right=True, rank=2),
    Column("ALIVE", right=True),
    Column("DEAD", right=True),
    Column("WAITS FOR", rank=1),
    Column("OWNER", rank=9),
    Column("MODE", rank=12),
    Column("AGE", right=True, rank=8),
    Column("STALL"),
    Column("STATE"),
)


SORTS: Final[dict[str, Callable[[Segment], Any]]] = {
    "name": lambda segment: segment.name,
    "state": urgency,
    "step": lambda segment: segment.step or 0,
    "gradients": lambda segment: segment.gradients or 0,
    "rows": lambda segment: segment.rows or 0,
    "bytes": lambda segment: segment.bytes_reserved,
    "attached": lambda segment: segment.attached_alive or 0,
    "waiting": lambda segment: len(segment.waiting_for or []),
    "age": lambda segment: segment.age_seconds,
}


def _key(column: Column) -> str:
    return column.title.lower().replace(" ", "_")


_MENTIONED: Final = 0.01  # of all memory

COLUMN_KEYS: Final = tuple(map(_key, COLUMNS))


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_names(parser, without="all")
    parser.add_argument(
        "--orphaned", action="store_true", help="only those that no living process has attached"
    )
    parser.add_argument("--stalled", action="store_true", help="only those that stand still")
    parser.add_argument("--mine", action="store_true", help="only those of this user")
    parser.add_argument("--sort", choices=SORTS, default="name", help="what to sort by (name)")
    parser.add_argument("-r", "--reverse", action="store_true", help="the other way round")
    parser.add_argument(
        "-c",
        "--columns",
        metavar="TITLE,...",
        type=_columns,
        default=list(range(len(COLUMNS))),
        help="these columns only: " + ", ".join(COLUMN_KEYS),
    )
    parser.add_argument(
        "-b", "--bytes", action="store_true", help="sizes in bytes, ages in seconds"
    )
    parser.add_argument(
        "-H", "--no-header", dest="titles", action="store_false", help="without titles"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="only names, one a line")
    options.add_namespace(parser)
    options.add_json(parser)


def run(
    *,
    names: list[str],
    orphaned: bool,
    stalled: bool,
    mine: bool,
    sort: str,
    reverse: bool,
    columns: list[int],
    bytes: bool,  # noqa: A002 - the option's name
    titles: bool,
    quiet: bool,
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    from shmacc import inspection  # late: see the package
    from shmacc_inspect import naming
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.segments import Segment, SegmentList

    found = list(naming.summaries(naming.select(names, everywhere=everywhere)))
    now = time.time()
    segments = [
        Segment.of(summary, now)
        for summary in found
        if not (orphaned and summary.state is not inspection.SegmentState.ORPHANED)
        and not (stalled and not summary.stalls)
        and not (mine and summary.owner_uid != os.getuid())
    ]
    key = SORTS[sort]
    segments.sort(key=lambda segment: (key(segment), segment.name), reverse=reverse)
    space = inspection.shared_memory_space()
    removed = inspection.unlinked_memory(inspection.unlinked_uses())
    if json:
        print(to_json(SegmentList(segments, space.total, space.free, removed)))
    elif quiet:
        page.show(Cell(segment.name) for segment in segments)
    elif segments:
        rows = [row(segment, exact=bytes) for segment in segments]
        table = Table(
            [COLUMNS[i] for i in columns], [[cells[i] for i in columns] for cells in rows], titles
        )
        page.show([table])
        _tell_what_is_left_out(table)
    else:
        page.write_line("no such segments" if found or names else "no segments")
    unread = sum(summary.state is inspection.SegmentState.UNREADABLE for summary in found)
    if stalled and unread:
        page.write_line(f"{formatting.count_of(unread, 'segment')} could not be read: look as root")
    if not json and not quiet:
        page.write_line(_fullness(space, removed))


def _fullness(space: inspection.Space, removed: int) -> str:
    from shmacc import inspection  # late: see the package

    used = space.total - space.free
    text = (
        f"shared memory: {formatting.size(used)} of {formatting.size(space.total)} used "
        f"({formatting.percent(used, space.total)})"
    )
    others = inspection.others_memory()
    if others > _MENTIONED * space.total:
        text += f", {formatting.size(others)} of it by files that are not shmacc's"
    if removed:
        text += (
            f", {formatting.size(removed)} of it by removed segments that processes still use "
            "(`check -A` names them)"
        )
    return text


def _columns(text: str) -> list[int]:
    keys = COLUMN_KEYS
    asked = text.lower().split(",")
    unknown = [key for key in asked if key not in keys]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no column {unknown[0]!r}, only {', '.join(keys)}"
        )
    return [keys.index(key) for key in asked]


def row(segment: Segment, *, exact: bool) -> list[Cell]:
    """Return a segment's cells, as `COLUMNS`."""
    has_rows = segment.kind in {"sparse", "parameters"}  # the latter, if they have tables
    return [
        Cell(segment.name, "bold"),
        Cell(segment.kind or ""),
        Cell(segment.dtype or ""),
        Cell(formatting.shape(segment.shape) if segment.dtype else ""),  # else of several members
        Cell(segment.reduction_type or ""),
        _number(segment.step),
        _number(segment.gradients),
        _number(segment.rows if has_rows else None),
        page.size(segment.bytes_used, exact=exact),
        page.size(segment.bytes_reserved, exact=exact),
        _number(segment.attached_alive),
        Cell(_said(segment.attached_dead), "yellow" if segment.attached_dead else ""),
        Cell(",".join(map(str, segment.waiting_for or [])), "cyan"),
        Cell(segment.owner),
        Cell(segment.mode),
        page.duration(segment.age_seconds, exact=exact),
        Cell(",".join(stall.kind for stall in segment.stalls), "bold red"),
        Cell(segment.state, STATE_STYLES[segment.state], segment.state.replace(" ", "-")),
    ]


def _said(number: int | None) -> str:
    return "" if number is None else str(number)


def _number(number: int | None) -> Cell:
    return Cell(_said(number))


def _tell_what_is_left_out(table: Table) -> None:
    missing = page.left_out(table, page.Terminal.of_stdout().width)
    if missing:
        page.write_line(
            f"too narrow for all columns; left out: {', '.join(missing)} (`show NAME` has them)"
        )
