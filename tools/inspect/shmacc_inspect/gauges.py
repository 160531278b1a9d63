"""All segments as metrics."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from shmacc import inspection
from shmacc.errors import ShmaccError
from shmacc_inspect import formatting, naming
from shmacc_inspect.output import Metric, Sample, descriptions
from shmacc_inspect.progress import idle_since, stragglers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shmacc.inspection import Description, SegmentName, Stall, Summary, WaitingTake

PREFIX: Final = "shmacc_"
_LATE: Final = 5  # contributors of a segment that are named: each is a series
_MOST_ROWS: Final = 1 << 22  # of tables that are compared with their index at each scrape


class _Definition(NamedTuple):
    name: str
    help: str
    read: Callable[[Description, float], float | None]  # None: no sample
    type: str = "gauge"


def _head(seen: Description) -> WaitingTake | None:
    return next((take for take in seen.queue if take.alive), None)


def _head_wait(seen: Description, now: float) -> float | None:
    head = _head(seen)
    return None if head is None else max(0.0, now - head.since)


def _head_requires(seen: Description, _now: float) -> float | None:
    head = _head(seen)
    return None if head is None else head.num_required


def _lock_held(seen: Description, now: float) -> float | None:
    if not seen.lock.held:
        return 0.0
    return None if seen.lock.since is None else max(0.0, now - seen.lock.since)


def _round_open(seen: Description, now: float) -> float:
    since = seen.stats.round_since
    return 0.0 if since is None else max(0.0, now - since)


def _doing(activity: str) -> Callable[[Description, float], float]:
    """Return a function that counts the living processes with this activity."""
    return lambda seen, _: sum(
        process.alive and process.activity == activity for process in seen.processes
    )


def _worst_straggler(seen: Description, now: float) -> float:
    late, head = stragglers(seen), _head(seen)
    waits_for_more = head is not None and seen.stats.num_accumulated < head.num_required
    if any(process.applied for process in late) or not waits_for_more:
        late = tuple(process for process in late if process.applied)  # others may never apply
    return max((max(0.0, now - idle_since(process)) for process in late), default=0.0)


def _of_tables(field: str) -> Callable[[Description, float], float | None]:
    """Return a function that sums a field over all tables of parameters; None: no tables."""

    def total(seen: Description, _now: float) -> float | None:
        tables = [getattr(member, field) for member in seen.members if member.kind == "table"]
        return sum(tables) if tables else None

    return total


def _stat(field: str, name: str = "", type: str = "gauge") -> _Definition:  # noqa: A002 - the field's name
    """Return the metric of a field of Stats, under the field's name or another one."""
    said = descriptions(inspection.Stats).get(field, "")  # empty if Python drops docstrings
    return _Definition(name or field, said, lambda seen, _: float(getattr(seen.stats, field)), type)


def _summed_up(field: str) -> _Definition:
    """Return the metric of a field of Summary."""
    said = descriptions(inspection.Summary).get(field, "")
    return _Definition(field, said, lambda seen, _: float(getattr(seen.summary, field)))


_OF_ALL: Final = (
    *map(_summed_up, ("bytes_used", "bytes_reserved", "attached_alive", "attached_dead")),
    _Definition(
        "lock_held_seconds",
        "For how long the lock's present owner has been in its operation; absent if unknown.",
        _lock_held,
    ),
    _Definition(
        "stalled",
        "For how many reasons it stands still; 0 if it is not known to.",
        lambda seen, _: len(seen.summary.stalls),
    ),
    _Definition(
        "perhaps_stalled",
        "1 if it perhaps stands still: others have waited for long for who may be computing.",
        lambda seen, _: seen.summary.suspected is not None,
    ),
)
_STEP: Final = _stat("global_step", "step")
_COUNTERS: Final = {name: _stat(name, type="counter") for name in inspection.Stats.COUNTERS}
_OF_ACCUMULATORS: Final = (
    _STEP,
    _stat("num_accumulated", "gradients"),
    *map(_stat, ("rows", "waiting", "finished", "sealed")),
    _Definition("head_requires", "Gradients that the queue's head waits for.", _head_requires),
    _Definition("head_waits_seconds", "How long it has waited.", _head_wait),
    _Definition(
        "waiting_for_step", "Processes that wait for the step.", _doing("waits for the step")
    ),
    _Definition(
        "waiting_for_room", "Processes whose gradients wait for room.", _doing("waits for room")
    ),
    _Definition("round_open_seconds", "How long a round has been open; 0: none is.", _round_open),
    _Definition(
        "straggler_seconds",
        "Longest time since a worker applied (or came), of those that have not in this round.",
        _worst_straggler,
    ),
    _Definition(
        "round_final",
        "1 if the round is final, since its update has begun.",
        lambda seen, _: seen.final_round is not None,
    ),
    *_COUNTERS.values(),
)
_OF_PARAMETERS: Final = (
    _STEP,
    _Definition("updates", "Updates of parameters.", _COUNTERS["takes"].read, "counter"),
    _Definition("table_rows", "Rows in tables of parameters.", _of_tables("rows")),
    _Definition("table_rows_added", "Rows that tables got.", _of_tables("rows_added"), "counter"),
    _Definition(
        "table_rows_removed", "Rows removed from tables.", _of_tables("rows_removed"), "counter"
    ),
    _COUNTERS["recoveries"],
)
_HAS: Final = {"arrays": _OF_ALL, "parameters": _OF_ALL + _OF_PARAMETERS}


def gather(watched: Iterable[SegmentName]) -> Iterator[Metric]:
    """Yield the current metrics of these segments."""
    now, look = time.time(), inspection.Look()
    described: list[Description] = []
    summaries: list[inspection.Summary] = []
    for segment in watched:
        try:
            described.append(inspection.describe(segment.system_name, look))
            summaries.append(described[-1].summary)
        except ShmaccError:  # gone, damaged or unreadable: the states show it
            summaries += naming.summaries([segment])
    found = {
        each: Metric(PREFIX + each.name, each.type, each.help, [])
        for each in (*_OF_ALL, *_OF_ACCUMULATORS, *_OF_PARAMETERS)
    }
    for seen in described:
        for definition in _HAS.get(seen.summary.kind or "", _OF_ALL + _OF_ACCUMULATORS):
            value = definition.read(seen, now)
            if value is not None:
                name = PREFIX + definition.name + ("_total" if definition.type == "counter" else "")
                found[definition].samples.append(
                    Sample(name, _labels(seen.summary.name), float(value))
                )
    yield from found.values()
    yield from _paces(described)
    yield _damage(described)
    yield _stalls(described)
    yield _failures(described)
    yield _info(summaries)
    yield _states(summaries)
    yield _space()
    yield from _removed(summaries)


def _labels(of: SegmentName) -> dict[str, str]:
    return {"name": of.shared_name, "namespace": of.namespace or ""}


def _gauge(name: str, help: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:  # noqa: A002 - the field's name
    name = PREFIX + name
    return Metric(name, "gauge", help, [Sample(name, labels, value) for labels, value in samples])


def _paces(described: list[Description]) -> Iterator[Metric]:
    accumulators = [seen for seen in described if not seen.summary.is_arrays]

    def counter(
        name: str,
        said: str,
        read: Callable[[inspection.Pace], Iterable[tuple[dict[str, str], float]]],
    ) -> Metric:
        samples = [
            Sample(f"{PREFIX}{name}_total", {**_labels(seen.summary.name), **labels}, float(value))
            for seen in accumulators
            for labels, value in read(seen.pace)
        ]
        return Metric(PREFIX + name, "counter", said, samples)

    def of_late(field: str) -> Callable[[inspection.Pace], Iterable[tuple[dict[str, str], float]]]:
        return lambda pace: [
            ({"contributor": of.label}, getattr(of, field)) for of in pace.late[:_LATE]
        ]

    yield counter(
        "round_seconds",
        "Seconds that takes waited for gradients, that rounds' blocks took, and between rounds.",
        lambda pace: [
            ({"phase": phase}, getattr(pace, phase)) for phase in ("waiting", "block", "between")
        ],
    )
    yield counter(
        "late_seconds",
        f"How much later than the others those came that rounds waited for, the latest {_LATE}.",
        of_late("seconds"),
    )
    yield counter("late_rounds", "How many rounds waited for each of these.", of_late("rounds"))
    yield counter(
        "unchecked",
        "Gradients accepted with NEVER_STALE, except each process's first.",
        lambda pace: [({}, pace.unchecked)],
    )
    yield counter(
        "unchecked_steps",
        "Steps since their processes' gradients before: at most so many updates they lack.",
        lambda pace: [({}, pace.unchecked_steps)],
    )


def _damage(described: list[Description]) -> Metric:
    samples = []
    for seen in described:
        found: tuple[inspection.Finding, ...] = ()
        if seen.summary.rows:  # else there is nothing to compare
            try:
                found = inspection.damage(seen.summary.name.system_name, most_rows=_MOST_ROWS)
            except ShmaccError:  # gone meanwhile
                continue
        wrong = sum(finding.severity == inspection.Severity.WRONG for finding in found)
        if wrong == len(found):
            samples.append((_labels(seen.summary.name), float(wrong)))
    said = (
        "What is wrong between tables' rows and the index that leads to them; absent if they could "
        f"not be compared, or are more than {_MOST_ROWS}."
    )
    return _gauge("table_faults", said, samples)


def _stalls(described: list[Description]) -> Metric:
    samples = [
        ({**_labels(seen.summary.name), "kind": kind}, 1.0)
        for seen in described
        for kind in sorted({stall.kind.value for stall in _causes(seen.summary)})
    ]
    return _gauge("stall", "Why a segment stands still, or perhaps does; always 1.", samples)


def _causes(summary: Summary) -> list[Stall]:
    return [*summary.stalls, *([summary.suspected] if summary.suspected else [])]


def _failures(described: list[Description]) -> Metric:
    # The last failure of each process and type of exception. Not the whole text: it has byte counts
    # and file names, and each new one would be a series of its own.
    last = {}
    for seen in described:
        for event in seen.events:
            if event.kind == "failed":
                labels = {
                    **_labels(seen.summary.name),
                    "pid": event.pid_label,
                    "reason": formatting.printable(event.reason.partition(":")[0]),
                }
                last[tuple(labels.values())] = labels, event.at
    said = "When a process failed, and with which type of exception."
    return _gauge("failure_timestamp_seconds", said, last.values())


def _info(summaries: Sequence[inspection.Summary]) -> Metric:
    samples = [
        (
            {
                **_labels(summary.name),
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
    return _gauge("segment_info", "What a segment is; always 1.", samples)


def _states(summaries: Sequence[inspection.Summary]) -> Metric:
    counts = collections.Counter(summary.state for summary in summaries)
    samples = [({"state": state.value}, float(counts[state])) for state in inspection.SegmentState]
    return _gauge("segments", "Segments in each state.", samples)


def _space() -> Metric:
    space = inspection.shared_memory_space()
    samples = [({"kind": "total"}, float(space.total)), ({"kind": "free"}, float(space.free))]
    said = "Shared memory of this machine or container."
    return _gauge("shared_memory_bytes", said, samples)


def _removed(summaries: Sequence[inspection.Summary]) -> Iterator[Metric]:
    uses = inspection.unlinked_uses()
    said = "Memory of removed segments that processes still have open."
    memory = float(inspection.unlinked_memory(uses))
    yield _gauge("removed_but_used_bytes", said, [({}, memory)])
    users = collections.Counter(use.name for use in uses if use.under_users)
    users.update({summary.name: 0 for summary in summaries})
    said = "Processes that use a segment whose name was removed under them (rm, RemoveIPC)."
    samples = [(_labels(of), float(count)) for of, count in users.items()]
    yield _gauge("removed_under_users", said, samples)
