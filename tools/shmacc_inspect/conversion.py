"""From the library's records to the types of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmacc_inspect import output
from shmacc_inspect.naming import typed_name

if TYPE_CHECKING:
    from shmacc import inspection


def segment(summary: inspection.Summary, now: float) -> output.Segment:
    """A line of `list`."""
    return output.Segment(
        name=typed_name(summary.name),
        system_name=summary.name.system_name,
        namespace=summary.name.namespace,
        state=summary.state.value,
        detail=summary.detail,
        kind=summary.kind,
        dtype=summary.dtype,
        shape=None if summary.shape is None else list(summary.shape),
        reduction_type=summary.reduction_type,
        private=summary.private,
        step=summary.global_step,
        gradients=summary.num_accumulated,
        rows=summary.rows,
        bytes_used=summary.bytes_used,
        bytes_reserved=summary.bytes_reserved,
        attached_alive=summary.attached_alive,
        attached_dead=summary.attached_dead,
        waiting_for=None if summary.waiting_for is None else list(summary.waiting_for),
        owner=summary.owner,
        owner_uid=summary.owner_uid,
        mode=f"{summary.mode:04o}",
        created=summary.created,
        age_seconds=now - summary.created,
    )


def details(
    seen: inspection.Description,
    now: float,
    *,
    most_touched: output.Rows | None,
    values: output.Values | None,
) -> output.Details:
    """All that `show` says."""
    stats = seen.stats
    return output.Details(
        segment=segment(seen.summary, now),
        token=f"{seen.token:016x}",
        sealed=stats.sealed,
        round_shape=None if seen.round_shape is None else list(seen.round_shape),
        counters=output.Counters(
            applied=stats.applied,
            applied_bytes=stats.applied_bytes,
            dropped=stats.dropped,
            discarded=stats.discarded,
            taken=stats.taken,
            takes=stats.takes,
            recoveries=stats.recoveries,
            commits=seen.generation,
        ),
        processes=[process(entry, seen) for entry in seen.processes],
        line=line(seen, now),
        lock=lock(seen, now),
        regions=[
            output.Region(region.name, region.offset, region.reserved, region.used)
            for region in seen.regions
        ],
        index_load=seen.index_load,
        most_touched=most_touched,
        values=values,
    )


def process(entry: inspection.AttachedProcess, seen: inspection.Description) -> output.Process:
    """An attached process."""
    return output.Process(
        pid=entry.pid,
        same_pid_namespace=entry.same_pid_namespace,
        alive=entry.alive,
        condition=entry.condition,
        command=entry.command,
        activity=entry.activity,
        started=entry.started,
        attached_at=entry.attached_at,
        last_seen=entry.last_seen,
        last_applied=entry.last_applied,
        last_applied_step=entry.last_applied_step,
        applied_this_round=applied_this_round(entry, seen),
        applied=entry.applied,
        dropped=entry.dropped,
        taken=entry.taken,
    )


def applied_this_round(entry: inspection.AttachedProcess, seen: inspection.Description) -> bool:
    """Whether a gradient of this process is in the current round."""
    return seen.stats.num_accumulated > 0 and entry.last_applied_step == seen.stats.global_step


def line(seen: inspection.Description, now: float) -> list[output.Taker]:
    """The takes that wait."""
    return [
        output.Taker(
            position=take.position,
            pid=take.pid,
            num_required=take.num_required,
            waiting_seconds=max(0.0, now - take.since),
            alive=take.alive,
            overdue=take.overdue,
        )
        for take in seen.line
    ]


def lock(seen: inspection.Description, now: float) -> output.Lock:
    """The lock and who has it."""
    holder = next((p for p in seen.processes if p.alive and p.pid == seen.lock.pid), None)
    return output.Lock(
        held=seen.lock.held,
        holder_pid=seen.lock.pid,
        held_seconds=None if seen.lock.since is None else max(0.0, now - seen.lock.since),
        holder_condition=holder.condition if holder and seen.lock.held else None,
        semaphore_value=seen.lock.queue,
        in_operation=seen.lock.in_operation,
        name_holder_pid=seen.lock.name_pid,
    )


def rows(found: tuple[tuple[inspection.RowCount, ...], bool]) -> output.Rows:
    """The most touched rows."""
    touched, still = found
    return output.Rows([output.Row(row.row, row.count) for row in touched], still)


def values(found: inspection.ValueSummary) -> output.Values:
    """The summary of values."""
    return output.Values(
        numbers=found.numbers,
        norm=output.finite(found.norm),
        largest=found.largest,
        nan=found.nan,
        infinite=found.infinite,
        still=found.still,
    )


def finding(found: inspection.Finding) -> output.Finding:
    """A finding."""
    return output.Finding(found.subject, found.severity.value, found.problem, found.remedy)


def leftover(found: inspection.Leftover) -> output.Leftover:
    """A leftover."""
    return output.Leftover(found.file_name, found.why, found.age, found.bytes_reserved)
