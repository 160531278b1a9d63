"""`list`: one row per segment."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc_inspect import formatting, naming, page
from shmacc_inspect.output import SegmentList, to_json
from shmacc_inspect.page import Cell, Column, Table
from shmacc_inspect.sorting import SORTS_OF_LIST

if TYPE_CHECKING:
    from shmacc.inspection import Summary
    from shmacc_inspect.output import Interval

_MENTIONED: Final = 0.01  # files of other programs are mentioned if they use more of all memory
STATE_STYLES: Final = {
    "sound": "green", "finished": "cyan", "starting": "cyan", "orphaned": "yellow",
    "damaged": "bold red", "other version": "magenta", "not ours to read": "dim",
}  # fmt: skip


def _rows(summary: Summary) -> str:
    """Return how many rows a segment has; empty for kinds without rows."""
    return formatting.known(summary.rows) if summary.kind in {"sparse", "parameters"} else ""


def _dead(summary: Summary) -> Cell:
    return Cell(formatting.known(summary.attached_dead), "yellow" if summary.attached_dead else "")


def causes(of: Summary | Interval) -> Cell:
    """Return why a segment stands still: a word for each cause; a suspicion has a question mark."""
    if of.stalls or of.suspected is None:
        return Cell(",".join(stall.kind for stall in of.stalls), "bold red")
    return Cell(f"{of.suspected.kind}?", "yellow")


COLUMNS: Final = (
    Column("NAME", lambda of: naming.cell(of.name), whole=True),
    Column("KIND", lambda of: of.kind or "", rank=10),
    Column("DTYPE", lambda of: of.dtype or "", rank=9),
    Column("SHAPE", lambda of: formatting.shape(of.shape) if of.dtype else "", rank=8),
    Column("REDUCE", lambda of: of.reduction_type or "", rank=14),
    Column("STEP", lambda of: formatting.known(of.global_step), right=True, rank=1),
    Column("GRADS", lambda of: formatting.known(of.num_accumulated), right=True, rank=3),
    Column("ROWS", _rows, right=True, rank=7),
    Column("USED", lambda of: page.size(of.bytes_used), right=True, rank=11),
    Column("RESERVED", lambda of: page.size(of.bytes_reserved), right=True, rank=6),
    Column("ALIVE", lambda of: formatting.known(of.attached_alive), right=True, rank=2),
    Column("DEAD", _dead, right=True, rank=4),
    Column("WAITS FOR", lambda of: Cell(",".join(map(str, of.waiting_for or ())), "cyan"), rank=5),
    Column("OWNER", lambda of: of.owner, rank=13),
    Column("MODE", lambda of: f"{of.mode:04o}", rank=15),
    Column("AGE", lambda of: page.duration(time.time() - of.created), right=True, rank=12),
    Column("STALL", causes),
    Column("STATE", lambda of: Cell(of.state, STATE_STYLES[of.state], of.state.replace(" ", "-"))),
)


def run(
    *,
    names: list[str],
    orphaned: bool,
    stalled: bool,
    mine: bool,
    sort: str,
    quiet: bool,
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    found = list(naming.summaries(naming.select(names, everywhere=everywhere)))
    segments = [
        summary
        for summary in found
        if not (orphaned and summary.state is not inspection.SegmentState.ORPHANED)
        and not (stalled and not summary.stalls and not summary.suspected)
        and not (mine and summary.owner_uid != os.getuid())
    ]
    by_name, key = SORTS_OF_LIST["name"], SORTS_OF_LIST[sort]
    segments.sort(key=lambda summary: (key(summary), by_name(summary)))
    space = inspection.shared_memory_space()
    removed = inspection.unlinked_memory(inspection.unlinked_uses())
    if json:
        print(to_json(SegmentList(segments, space, removed)))
    elif quiet:
        page.show(Cell(naming.word(summary.name)) for summary in segments)
    elif segments:
        table = Table.of(COLUMNS, segments)
        page.show([table])
        _tell_what_is_left_out(table)
    else:
        page.write_line("no such segments" if found or names else "no segments")
    if not (names or json or quiet):
        _tell_of_runs(found, naming.scope(everywhere=everywhere))
    unread = sum(summary.state is inspection.SegmentState.UNREADABLE for summary in found)
    if stalled and unread:
        page.write_line(f"{formatting.count_of(unread, 'segment')} could not be read: look as root")
    if not json and not quiet:
        page.write_line(_fullness(space, removed))


def _fullness(space: inspection.Space, removed: int) -> str:
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


def _tell_of_runs(found: list[Summary], scope: str | None) -> None:
    """Name the runs that have no segments yet: their processes may still be importing."""
    shown = {summary.name.namespace for summary in found}
    for run in inspection.list_runs(scope):
        if run.namespace not in shown:
            page.write_line(f"no segments yet: run {run.label}, pid {run.pid}: {run.state}")


def _tell_what_is_left_out(table: Table) -> None:
    missing = page.left_out(table, page.Terminal.of_stdout().width)
    if missing:
        page.write_line(
            f"too narrow for all columns; left out: {', '.join(missing)} (`show NAME` has them)"
        )
