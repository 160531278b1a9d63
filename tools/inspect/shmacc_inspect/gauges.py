"""All segments as metrics."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import ShmaccError
from shmacc_inspect import formatting, naming
from shmacc_inspect.output.metrics import Metric, Sample
from shmacc_inspect.progress import stragglers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shmacc.inspection import Description, MemberDescription, SegmentName

PREFIX: Final = "shmacc_"


@dataclass(frozen=True)
class _Definition:
    name: str
    type: str
    help: str
    read: Callable[[Description, float], float | None]


def _head_wait(seen: Description, now: float) -> float | None:
    return next((max(0.0, now - take.since) for take in seen.line if take.alive), None)


def _head_requires(seen: Description, _now: float) -> float | None:
    return next((take.num_required for take in seen.line if take.alive), None)


def _lock_held(seen: Description, now: float) -> float | None:
    if not seen.lock.held:
        return 0.0
    return None if seen.lock.since is None else max(0.0, now - seen.lock.since)


def _round_open(seen: Description, now: float) -> float:
    since = seen.stats.round_since
    return 0.0 if since is None else max(0.0, now - since)


def _doing(activity: str) -> Callable[[Description, float], float]:
    """Return what counts the living processes that do that."""
    return lambda seen, _: sum(
        process.alive and process.activity == activity for process in seen.processes
    )


def _worst_straggler(seen: Description, now: float) -> float:
    late = stragglers(seen, now)
    if any(straggler.applied for straggler in late) or not _take_waits_for_more(seen):
        late = [straggler for straggler in late if straggler.applied]  # the others may never
    return max((straggler.seconds for straggler in late), default=0.0)


def _take_waits_for_more(seen: Description) -> bool:
    head = next((take for take in seen.line if take.alive), None)
    return head is not None and seen.stats.num_accumulated < head.num_required


def _of_tables(read: Callable[[MemberDescription], int | None]) -> Callable[..., float | None]:
    """Return what adds up a number of all tables of parameters; None without any."""

    def total(seen: Description, _now: float) -> float | None:
        tables = [read(member) or 0 for member in seen.members if member.kind == "table"]
        return sum(tables) if tables else None

    return total


_DEFINITIONS: Final = (
    _Definition("step", "gauge", "The global step.", lambda seen, _: seen.stats.global_step),
    _Definition(
        "gradients",
        "gauge",
        "Gradients that wait to be taken.",
        lambda seen, _: seen.stats.num_accumulated,
    ),
    _Definition("rows", "gauge", "Distinct rows that they touch.", lambda seen, _: seen.stats.rows),
    _Definition(
        "bytes_used",
        "gauge",
        "Bytes that the round's content needs.",
        lambda seen, _: seen.summary.bytes_used,
    ),
    _Definition(
        "bytes_reserved",
        "gauge",
        "Bytes of memory that the segment occupies.",
        lambda seen, _: seen.summary.bytes_reserved,
    ),
    _Definition(
        "attached_alive",
        "gauge",
        "Living processes attached.",
        lambda seen, _: seen.summary.attached_alive,
    ),
    _Definition(
        "attached_dead",
        "gauge",
        "Dead processes whose entries have not been swept yet.",
        lambda seen, _: seen.summary.attached_dead,
    ),
    _Definition(
        "waiting", "gauge", "Takes that wait in the queue.", lambda seen, _: seen.stats.waiting
    ),
    _Definition(
        "head_requires", "gauge", "Gradients that the head of the queue waits for.", _head_requires
    ),
    _Definition("head_waits_seconds", "gauge", "How long it has waited.", _head_wait),
    _Definition(
        "waiting_for_step",
        "gauge",
        "Processes that wait for the step to move on.",
        _doing("waits for the step"),
    ),
    _Definition(
        "waiting_for_room",
        "gauge",
        "Processes whose gradients wait for room.",
        _doing("waits for room"),
    ),
    _Definition(
        "round_open_seconds",
        "gauge",
        "For how long a round has been open; 0 if none is.",
        _round_open,
    ),
    _Definition(
        "straggler_seconds",
        "gauge",
        "Longest time since a worker applied (or came), of those that have not in this round.",
        _worst_straggler,
    ),
    _Definition(
        "lock_held_seconds",
        "gauge",
        "For how long the lock's present owner has been in its operation; absent if unknown.",
        _lock_held,
    ),
    _Definition(
        "stalled",
        "gauge",
        "For how many reasons it stands still; 0 if it is not known to.",
        lambda seen, _: len(seen.summary.stalls),
    ),
    _Definition(
        "finished",
        "gauge",
        "1 if the run is over: nothing is accepted or taken any more.",
        lambda seen, _: int(seen.stats.finished),
    ),
    _Definition(
        "round_final",
        "gauge",
        "1 if the round is final, since its update has begun.",
        lambda seen, _: int(seen.final_round is not None),
    ),
    _Definition(
        "sealed",
        "gauge",
        "1 if applies at the step are refused: a round is open, or by a seal.",
        lambda seen, _: int(seen.stats.sealed),
    ),
    _Definition("applied", "counter", "Gradients accepted.", lambda seen, _: seen.stats.applied),
    _Definition(
        "applied_bytes",
        "counter",
        "Bytes of their values.",
        lambda seen, _: seen.stats.applied_bytes,
    ),
    _Definition(
        "dropped", "counter", "Gradients refused as stale.", lambda seen, _: seen.stats.dropped
    ),
    _Definition(
        "discarded",
        "counter",
        "Gradients accepted, then dropped when the step was advanced.",
        lambda seen, _: seen.stats.discarded,
    ),
    _Definition("taken", "counter", "Gradients handed out.", lambda seen, _: seen.stats.taken),
    _Definition("takes", "counter", "Takes.", lambda seen, _: seen.stats.takes),
    _Definition("updates", "counter", "Updates of parameters.", lambda seen, _: seen.stats.takes),
    _Definition(
        "table_rows", "gauge", "Rows in tables of parameters.", _of_tables(lambda of: of.rows)
    ),
    _Definition(
        "table_rows_added",
        "counter",
        "Rows that tables of parameters got.",
        _of_tables(lambda of: of.rows_added),
    ),
    _Definition(
        "table_rows_removed",
        "counter",
        "Rows that were removed from tables of parameters.",
        _of_tables(lambda of: of.rows_removed),
    ),
    _Definition(
        "recoveries",
        "counter",
        "Operations interrupted by a death, and undone.",
        lambda seen, _: seen.stats.recoveries,
    ),
)

_OF_ARRAYS: Final = frozenset(
    {
        "bytes_used",
        "bytes_reserved",
        "attached_alive",
        "attached_dead",
        "lock_held_seconds",
        "stalled",
    }
)
_OF_TABLES: Final = {"table_rows", "table_rows_added", "table_rows_removed"}
_OF_PARAMETERS: Final = _OF_ARRAYS | _OF_TABLES | {"step", "updates", "recoveries"}
_ALL: Final = frozenset(definition.name for definition in _DEFINITIONS)
_HAS: Final = {"arrays": _OF_ARRAYS, "parameters": _OF_PARAMETERS}
_OF_ACCUMULATORS: Final = _ALL - _OF_TABLES - {"updates"}


def gather(watched: Iterable[SegmentName]) -> Iterator[Metric]:
    """Yield the current metrics of these segments."""
    now = time.time()
    described: list[Description] = []
    summaries: list[inspection.Summary] = []
    for segment in watched:
        try:
            described.append(inspection.describe(segment.system_name))
            summaries.append(described[-1].summary)
        except ShmaccError:  # gone, damaged, not ours: shown by the states
            summaries += naming.summaries([segment])
    for definition in _DEFINITIONS:
        suffix = "_total" if definition.type == "counter" else ""
        samples = []
        for seen in described:
            if definition.name not in _HAS.get(seen.summary.kind or "", _OF_ACCUMULATORS):
                continue
            value = definition.read(seen, now)
            if value is not None:
                name = PREFIX + definition.name + suffix
                samples.append(Sample(name, _labels(seen.summary), float(value)))
        yield Metric(PREFIX + definition.name, definition.type, definition.help, samples)
    yield _stalls(described)
    yield _failures(described)
    yield _info(summaries)
    yield _states(summaries)
    yield _space()
    yield from _removed(summaries)


def _labels(summary: inspection.Summary) -> dict[str, str]:
    return {"name": summary.name.shared_name, "namespace": summary.name.namespace or ""}


def _stalls(described: list[Description]) -> Metric:
    name = PREFIX + "stall"
    samples = [
        Sample(name, {**_labels(seen.summary), "kind": kind}, 1.0)
        for seen in described
        for kind in sorted({stall.kind.value for stall in seen.summary.stalls})
    ]
    return Metric(name, "gauge", "Why a segment stands still; always 1.", samples)


def _failures(described: list[Description]) -> Metric:
    name = PREFIX + "failure_timestamp_seconds"
    last = {}  # of each process and exception
    for seen in described:
        for event in seen.events:
            if event.kind == "failed":
                labels = {
                    **_labels(seen.summary),
                    "pid": event.pid_label,
                    "reason": formatting.printable(event.reason),
                }
                last[tuple(labels.values())] = Sample(name, labels, event.at)
    return Metric(name, "gauge", "When a process failed, and with what.", list(last.values()))


def _info(summaries: Sequence[inspection.Summary]) -> Metric:
    name = PREFIX + "segment_info"
    samples = [
        Sample(
            name,
            {
                **_labels(summary),
                "state": summary.state.value,
                "kind": summary.kind or "",
                "dtype": summary.dtype or "",
                "reduction_type": summary.reduction_type or "",
                "owner": summary.owner,
            },
            1.0,
        )
        for summary in summaries
    ]
    return Metric(name, "gauge", "What a segment is; always 1.", samples)


def _states(summaries: Sequence[inspection.Summary]) -> Metric:
    counts = collections.Counter(summary.state for summary in summaries)
    name = PREFIX + "segments"
    samples = [
        Sample(name, {"state": state.value}, float(counts[state]))
        for state in inspection.SegmentState
    ]
    return Metric(name, "gauge", "Segments in each state.", samples)


def _space() -> Metric:
    space = inspection.shared_memory_space()
    name = PREFIX + "shared_memory_bytes"
    samples = [
        Sample(name, {"kind": "total"}, float(space.total)),
        Sample(name, {"kind": "free"}, float(space.free)),
    ]
    return Metric(name, "gauge", "Shared memory of this machine or container.", samples)


def _removed(summaries: Sequence[inspection.Summary]) -> Iterator[Metric]:
    uses = inspection.unlinked_uses()
    name = PREFIX + "removed_but_used_bytes"
    yield Metric(
        name,
        "gauge",
        "Memory of removed segments that processes still have open.",
        [Sample(name, {}, float(inspection.unlinked_memory(uses)))],
    )
    name = PREFIX + "removed_under_users"
    users = collections.Counter(use.name for use in uses if use.under_users)
    users.update({summary.name: 0 for summary in summaries})
    yield Metric(
        name,
        "gauge",
        "Processes that use a segment whose name was removed under them (rm, RemoveIPC).",
        [
            Sample(name, {"name": of.shared_name, "namespace": of.namespace or ""}, float(count))
            for of, count in users.items()
        ],
    )
