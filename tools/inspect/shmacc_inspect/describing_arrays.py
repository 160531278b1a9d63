"""Shared arrays and parameters in full, as the elements of a page; and the lock, which all have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_inspect import formatting, page
from shmacc_inspect.page import Cell, Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_inspect.output import contents, details

_ARRAY_COLUMNS: Final = (
    Column("NAME", least=12),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("BYTES", right=True),
    Column("VALUE", right=True),
)
_PARAMETER_COLUMNS: Final = (
    Column("NAME", least=12),
    Column("DTYPE", rank=2),
    Column("SHAPE", rank=1),
    Column("BYTES", right=True),
    Column("SLOTS"),
    Column("OPTIMIZER", least=16),
)


def table(answer: details.Details) -> Table:
    """Return the arrays, and of parameters their optimizers."""
    if answer.segment.kind == "parameters":
        return Table(_PARAMETER_COLUMNS, [_parameter_row(member) for member in answer.members])
    return Table(_ARRAY_COLUMNS, [_array_row(member) for member in answer.members])


def _parameter_row(member: contents.Member) -> list[Cell]:
    slots = ", ".join(f"{slot.name} {formatting.size(slot.bytes_used)}" for slot in member.slots)
    words = ",".join(
        f"{slot.name}:{formatting.size(slot.bytes_used).replace(' ', '')}" for slot in member.slots
    )
    return [*_array_row(member)[:4], Cell(slots, word=words), Cell(member.optimizer or "")]


def _array_row(member: contents.Member) -> list[Cell]:
    return [
        Cell(formatting.printable(member.name), "bold"),
        Cell(member.dtype),
        Cell(formatting.shape(member.shape)),
        page.size(member.bytes_used),
        Cell("" if member.value is None else str(member.value)),
    ]


def facts(
    answer: details.Details, counters: details.Counters, lock: details.Lock, now: float
) -> Iterator[tuple[str, Cell]]:
    """Yield what is to be said of parameters; of shared arrays it is nothing."""
    if answer.segment.kind == "parameters":
        yield "step", Cell(f"{answer.segment.step}")
        yield "lock", describe_lock(lock)
        recoveries = formatting.count_of(counters.recoveries, "recovery", "recoveries")
        yield "updates", Cell(f"{counters.takes}, {recoveries}")
        for member in answer.members:
            if member.kind == "table":
                yield "table", Cell(_table_in_words(member))
        update = answer.update
        if update is not None:
            pid = formatting.pid(update.pid, is_here=update.pid_is_here)
            since = "" if update.since is None else f", {formatting.ago(update.since, now)}"
            text = f"one runs: pid {pid}{since}"
            if update.is_interrupted:
                text = (
                    f"one was interrupted by the death of pid {pid}{since}; the next update, "
                    "snapshot or restore puts back what it changed"
                )
            yield "update", Cell(text, "yellow")
        if answer.sealed:
            loader = formatting.pid(
                answer.round_holder_pid, is_here=bool(answer.round_holder_pid_is_here)
            )
            text = f"of a checkpoint: pid {loader}; no update until it has ended"
            if answer.round_holder_pid is None:
                text = "of a checkpoint was interrupted: no update until one has ended"
            yield "load", Cell(text, "yellow")


def _table_in_words(member: contents.Member) -> str:
    rows = formatting.count_of(member.rows, "row", "rows")
    if member.max_rows is not None:
        rows += f" of at most {member.max_rows}"
    return (
        f"{formatting.printable(member.name)}: {rows}; {member.rows_added} were added and "
        f"{member.rows_removed} removed in all; at first {member.initial}"
    )


def describe_lock(lock: details.Lock) -> Cell:
    """Describe the lock and its holder."""
    if lock.held:
        pid = formatting.pid(lock.holder_pid, is_here=lock.holder_pid_is_here)
        text = f"held by pid {pid}" if lock.holder_pid else "held"
        if lock.held_seconds is not None:
            text += f", in an operation for {formatting.duration(lock.held_seconds)}"
        halted = lock.holder_condition in {"stopped", "traced"}
        if halted:
            text += f"; the process is {lock.holder_condition}, so no process can apply or take"
        return Cell(text, "bold red" if halted else "yellow")
    if lock.in_operation:
        return Cell("free; a death interrupted an operation, the next one undoes it", "yellow")
    return Cell("free")
