"""`list`: one row per segment."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shmacc_inspect import failures, formatting, options, page
from shmacc_inspect.page import Cell, Column, Table

if TYPE_CHECKING:
    from shmacc import inspection
    from shmacc_inspect.output.segments import Segment

EPILOG: Final = """\b
Examples:
  shmacc-inspect list
  shmacc-inspect list 'emb*' --sort bytes --reverse
  shmacc-inspect list --orphaned --mine
  shmacc-inspect list --json | jq '.segments[] | select(.attached_dead > 0) | .name'"""

STATE_STYLES: Final = {
    "sound": "green",
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


class Sort(enum.StrEnum):
    """The sort keys of rows."""

    NAME = "name"
    STATE = "state"
    STEP = "step"
    GRADIENTS = "gradients"
    ROWS = "rows"
    BYTES = "bytes"
    ATTACHED = "attached"
    WAITING = "waiting"
    AGE = "age"


def run(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="GLOB",
            help="Only names that match.",
            autocompletion=options.complete_name,
            show_default=False,
        ),
    ] = "*",
    *,
    orphaned: Annotated[
        bool, typer.Option("--orphaned", help="Only those that no living process has attached.")
    ] = False,
    mine: Annotated[bool, typer.Option("--mine", help="Only those of this user.")] = False,
    sort: Annotated[Sort, typer.Option(help="What to sort by.")] = Sort.NAME,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="The other way round.")] = False,
    everywhere: options.AllNamespaces = False,
    json: options.Json = False,
) -> None:
    """List segments, one row each.

    A row has the segment's kind, round, attached processes, waiting takes, memory and state. A
    terminal that is too narrow gets fewer columns; a pipe gets all of them.
    """
    import os

    from shmacc import inspection  # late: see the package
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.segments import Segment, SegmentList

    found = inspection.list_segments(pattern, namespace=options.namespace(everywhere=everywhere))
    now = time.time()
    segments = [
        Segment.of(summary, now)
        for summary in found
        if not (orphaned and summary.state is not inspection.SegmentState.ORPHANED)
        and not (mine and summary.owner_uid != os.getuid())
    ]
    segments.sort(key=lambda segment: _key(segment, sort), reverse=reverse)
    space = inspection.shared_memory_space()
    removed = inspection.unlinked_memory(inspection.unlinked_uses())
    if json:
        print(to_json(SegmentList(segments, space.total, space.free, removed)))
    elif segments:
        table = Table(COLUMNS, [row(segment) for segment in segments])
        page.show([table])
        _tell_what_is_left_out(table)
    if not found and not set(pattern) & set("*?["):
        page.write_line(f"no segment is named {formatting.printable(pattern)}")
        failures.end(failures.NO_SUCH_NAME)
    if not segments and not json:
        page.write_line("no segments" if pattern == "*" else "no such segments")
    if not json:
        page.write_line(_fullness(space, removed))


def _fullness(space: inspection.Space, removed: int) -> str:
    used = space.total - space.free
    text = (
        f"shared memory: {formatting.size(used)} of {formatting.size(space.total)} used "
        f"({formatting.percent(used, space.total)})"
    )
    if removed:
        text += (
            f", {formatting.size(removed)} of it by removed segments that processes still use "
            "(`check` names them)"
        )
    return text


def row(segment: Segment) -> list[Cell]:
    """Return a segment's cells, as `COLUMNS`."""
    sparse = segment.kind == "sparse"
    return [
        Cell(segment.name, "bold"),
        Cell(segment.kind or ""),
        Cell(segment.dtype or ""),
        Cell(formatting.shape(segment.shape) if segment.kind else ""),
        Cell(segment.reduction_type or ""),
        _number(segment.step),
        _number(segment.gradients),
        _number(segment.rows if sparse else None),
        Cell("" if segment.bytes_used is None else formatting.size(segment.bytes_used)),
        Cell(formatting.size(segment.bytes_reserved)),
        _number(segment.attached_alive),
        Cell(_said(segment.attached_dead), "yellow" if segment.attached_dead else ""),
        Cell(",".join(map(str, segment.waiting_for or [])), "cyan"),
        Cell(segment.owner),
        Cell(segment.mode),
        Cell(formatting.duration(segment.age_seconds)),
        Cell(",".join(stall.kind for stall in segment.stalls), "bold red"),
        Cell(segment.state, STATE_STYLES[segment.state]),
    ]


def _said(number: int | None) -> str:
    return "" if number is None else str(number)


def _number(number: int | None) -> Cell:
    return Cell(_said(number))


def _key(segment: Segment, sort: Sort) -> tuple[Any, str]:
    waiting = segment.waiting_for or []
    keys: dict[Sort, Any] = {
        Sort.NAME: segment.name,
        Sort.STATE: segment.state,
        Sort.STEP: segment.step or 0,
        Sort.GRADIENTS: segment.gradients or 0,
        Sort.ROWS: segment.rows or 0,
        Sort.BYTES: segment.bytes_reserved,
        Sort.ATTACHED: segment.attached_alive or 0,
        Sort.WAITING: len(waiting),
        Sort.AGE: segment.age_seconds,
    }
    return keys[sort], segment.name


def _tell_what_is_left_out(table: Table) -> None:
    missing = page.left_out(table, page.Terminal.of_stdout().width)
    if missing:
        page.write_line(
            f"too narrow for all columns; left out: {', '.join(missing)} (`show NAME` has them)"
        )
