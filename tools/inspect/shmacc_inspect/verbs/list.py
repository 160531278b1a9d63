"""`list`: one row per segment."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import formatting, options, page
from shmacc_inspect.page import Cell, Column, Table
from shmacc_inspect.sorting import urgency

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from shmacc import inspection
    from shmacc.inspection import Summary

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
  shmacc-inspect list --quiet --orphaned 'job7-*' | xargs -r shmacc-inspect remove --yes
  shmacc-inspect list --json | jq '.segments[] | select(.attached_dead > 0) | .name'"""

_MENTIONED: Final = 0.01  # of all memory
STATE_STYLES: Final = {
    "sound": "green",
    "finished": "cyan",
    "starting": "cyan",
    "orphaned": "yellow",
    "damaged": "bold red",
    "other version": "magenta",
    "not ours to read": "dim",
}


def typed_name(name: inspection.SegmentName) -> str:
    """Return the name as `naming` has it, which is late: see the package."""
    from shmacc_inspect import naming

    return naming.typed_name(name)


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _rows(summary: Summary) -> str:
    """Return the rows of what has some: parameters do if they have tables."""
    return _number(summary.rows) if summary.kind in {"sparse", "parameters"} else ""


def _dead(summary: Summary) -> Cell:
    return Cell(_number(summary.attached_dead), "yellow" if summary.attached_dead else "")


COLUMNS: Final = (
    Column("NAME", lambda of: Cell(typed_name(of.name), "bold"), least=16),
    Column("KIND", lambda of: of.kind or "", rank=6),
    Column("DTYPE", lambda of: of.dtype or "", rank=5),
    Column("SHAPE", lambda of: formatting.shape(of.shape) if of.dtype else "", rank=4),
    Column("REDUCE", lambda of: of.reduction_type or "", rank=10),
    Column("STEP", lambda of: _number(of.global_step), right=True),
    Column("GRADS", lambda of: _number(of.num_accumulated), right=True),
    Column("ROWS", _rows, right=True, rank=3),
    Column("USED", lambda of: page.size(of.bytes_used), right=True, rank=7),
    Column("RESERVED", lambda of: page.size(of.bytes_reserved), right=True, rank=2),
    Column("ALIVE", lambda of: _number(of.attached_alive), right=True),
    Column("DEAD", _dead, right=True),
    Column("WAITS FOR", lambda of: Cell(",".join(map(str, of.waiting_for or ())), "cyan"), rank=1),
    Column("OWNER", lambda of: of.owner, rank=9),
    Column("MODE", lambda of: f"{of.mode:04o}", rank=12),
    Column("AGE", lambda of: page.duration(time.time() - of.created), right=True, rank=8),
    Column("STALL", lambda of: Cell(",".join(stall.kind for stall in of.stalls), "bold red")),
    Column("STATE", lambda of: Cell(of.state, STATE_STYLES[of.state], of.state.replace(" ", "-"))),
)


SORTS: Final[dict[str, Callable[[Summary], Any]]] = {
    "name": lambda of: typed_name(of.name),
    "state": urgency,
    "step": lambda of: of.global_step or 0,
    "gradients": lambda of: of.num_accumulated or 0,
    "rows": lambda of: of.rows or 0,
    "bytes": lambda of: of.bytes_reserved,
    "attached": lambda of: of.attached_alive or 0,
    "waiting": lambda of: len(of.waiting_for or ()),
    "age": lambda of: -of.created,
}


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
    quiet: bool,
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    from shmacc import inspection  # late: see the package
    from shmacc_inspect import naming

    found = list(naming.summaries(naming.select(names, everywhere=everywhere)))
    segments = [
        summary
        for summary in found
        if not (orphaned and summary.state is not inspection.SegmentState.ORPHANED)
        and not (stalled and not summary.stalls)
        and not (mine and summary.owner_uid != os.getuid())
    ]
    by_name, key = SORTS["name"], SORTS[sort]
    segments.sort(key=lambda summary: (key(summary), by_name(summary)), reverse=reverse)
    space = inspection.shared_memory_space()
    removed = inspection.unlinked_memory(inspection.unlinked_uses())
    if json:
        from shmacc_inspect.output import SegmentList, to_json

        print(to_json(SegmentList(segments, space, removed)))
    elif quiet:
        page.show(Cell(by_name(summary)) for summary in segments)
    elif segments:
        table = Table.of(COLUMNS, segments)
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


def _tell_what_is_left_out(table: Table) -> None:
    missing = page.left_out(table, page.Terminal.of_stdout().width)
    if missing:
        page.write_line(
            f"too narrow for all columns; left out: {', '.join(missing)} (`show NAME` has them)"
        )
