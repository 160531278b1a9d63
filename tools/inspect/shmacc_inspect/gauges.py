"""All segments as metrics."""

from __future__ import annotations

import collections
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from shmacc import inspection
from shmacc.errors import ShmaccError
from shmacc_inspect import naming
from shmacc_inspect.output import Metric, Sample, descriptions
from shmacc_inspect.progress import idle_since, stragglers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shmacc.inspection import Description, SegmentName, Stall, Summary

PREFIX: Final = "shmacc_"
_UNSAFE: Final = re.compile(r"[^\w.]")  # in the name of a type, which another user's program chose
_LATE: Final = 5  # how many late contributors of a segment are named: each is a series
_MOST_ROWS: Final = 1 << 22  # larger tables are not compared with their index at each scrape


class _Definition(NamedTuple):
    name: str
    help: str
    read: Callable[[Description, float], float | None]  # None: no sample
    type: str = "gauge"


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else max(0.0, now - since)


def _doing(activity: str) -> Callable[[Description, float], float]:
    """Return a function that counts the living processes with this activity."""
    return lambda seen, _: sum(
        process.alive and process.activity == activity for process in seen.processes
    )


def _worst_straggler(seen: Description, now: float) -> float:
    late, head = stragglers(seen), seen.head
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
    """Return the metric of a field of `Stats`, called `name` or like the field."""
    said = descriptions(inspection.Stats).get(field, "")  # empty if Python drops docstrings
    return _Definition(name or field, said, lambda seen, _: float(getattr(seen.stats, field)), type)


def _summed_up(field: str) -> _Definition:
    """Return the metric of a field of Summary."""
    said = descriptions(inspection.Summary).get(field, "")
    return _Definition(field, said, lambda seen, _: float(getattr(seen.summary, field)))


_OF_ALL: Final = (
    *map(_summed_up, ("bytes_used", "bytes_reserved", "attached_alive", "attached_dead")),
    _Definition("lock_held_seconds",
        "For how long the lock's present owner has been in its operation; absent if unknown.",
        lambda seen, now: _age(seen.lock.since, now) if seen.lock.held else 0.0),
    _Definition("stalled", "For how many reasons it stands still; 0 if it is not known to.",
        lambda seen, _: len(seen.summary.stalls)),
    _Definition("perhaps_stalled",
        "1 if it perhaps stands still: others have waited for long for who may be computing.",
        lambda seen, _: seen.summary.suspected is not None),
)  # fmt: skip
_STEP: Final = _stat("global_step", "step")
_COUNTERS: Final = {name: _stat(name, type="counter") for name in inspection.Stats.COUNTERS}
_OF_ACCUMULATORS: Final = (
    _STEP, _stat("num_accumulated", "gradients"),
    *map(_stat, ("rows", "waiting", "finished", "sealed")),
    _Definition("head_requires", "Gradients that the queue's head waits for.",
        lambda seen, _: seen.head.num_required if seen.head else None),
    _Definition("head_waits_seconds", "How long it has waited.",
        lambda seen, now: _age(seen.head.since if seen.head else None, now)),
    _Definition("waiting_for_step", "Processes that wait for the step.",
        _doing("waits for the step")),
    _Definition("waiting_for_room", "Processes whose gradients wait for room.",
        _doing("waits for room")),
    _Definition("round_open_seconds", "How long a round has been open; 0: none is.",
        lambda seen, now: _age(seen.stats.round_since, now) or 0.0),
    _Definition("straggler_seconds",
        "Longest time since a worker applied (or came), of those that have not in this round.",
        _worst_straggler),
    _Definition("round_final", "1 if the round is final, since its update has begun.",
        lambda seen, _: seen.final_round is not None),
    *_COUNTERS.values(),
)  # fmt: skip
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


def gather(watched: Iterable[SegmentName], runs: Iterable[inspection.Run]) -> Iterator[Metric]:
    """Yield the current metrics of these segments and runs."""
    now, look = time.time(), inspection.Look()
    described: list[Description] = []
    summaries: list[inspection.Summary] = []
    for segment in watched:
        try:
            described.append(inspection.describe(segment.system_name, look))
            summaries.append(described[-1].summary)
        except ShmaccError:  # gone, damaged or unreadable: the states show it
            summaries += naming.summaries([segment])
    for each in dict.fromkeys((*_OF_ALL, *_OF_ACCUMULATORS, *_OF_PARAMETERS)):
        values = [
            (_labels(seen.summary.name), each.read(seen, now))
            for seen in described
            if each in _HAS.get(seen.summary.kind or "", _OF_ALL + _OF_ACCUMULATORS)
        ]
        known = [(labels, value) for labels, value in values if value is not None]
        yield _metric(each.name, each.help, known, each.type)
    yield from _paces(described)
    yield _damage(described)
    yield _stalls(described)
    yield _failures(described)
    yield _info(summaries)
    yield _states(summaries)
    yield _space()
    yield from _removed(summaries)
    yield from _of_runs(list(runs))


def _labels(of: SegmentName) -> dict[str, str]:
    # Use the name as written in the file's name, which has no special characters of a shell: any
    # user may choose a name, and people paste commands from alerts.
    written = of.system_name.removeprefix("shmacc.").rpartition(":")[2]
    return {"name": written, "namespace": of.namespace or ""}


def _metric(
    name: str,
    help: str,  # noqa: A002 - the field's name
    samples: Iterable[tuple[dict[str, str], float]],
    type: str = "gauge",  # noqa: A002
) -> Metric:
    name = PREFIX + name
    of_sample = name + ("_total" if type == "counter" else "")
    found = [Sample(of_sample, labels, float(value)) for labels, value in samples]
    return Metric(name, type, help, found)


def _of_runs(runs: Sequence[inspection.Run]) -> Iterator[Metric]:
    restarts = [
        ({"run": run.namespace, "role": role.role}, role.restarts)
        for run in runs
        for role in run.roles
    ]
    said = "How often a run has started a role's process again."
    yield _metric("run_restarts", said, restarts, "counter")
    states = [
        ({"run": run.namespace, "state": state}, run.state == state)
        for run in runs
        for state in ("lives", "stopped", "gone", "unreadable")
    ]
    yield _metric("run_state", "1 for the state of the process that called a run; else 0.", states)


def _paces(described: list[Description]) -> Iterator[Metric]:
    for name, said, label, read in _PACES:
        samples = [
            (_labels(seen.summary.name) | ({label: of} if label else {}), value)
            for seen in described
            if not seen.summary.is_arrays
            for of, value in read(seen.pace)
        ]
        yield _metric(name, said, samples, "counter")


def _of_late(field: str) -> Callable[[inspection.Pace], list[tuple[str, float]]]:
    return lambda pace: [(of.label, getattr(of, field)) for of in pace.late[:_LATE]]


_PACES: Final[
    tuple[tuple[str, str, str, Callable[[inspection.Pace], list[tuple[str, float]]]], ...]
] = (
    (
        "round_seconds",
        "Seconds that takes waited for gradients, that rounds' blocks took, and between rounds.",
        "phase",
        lambda pace: [(phase, getattr(pace, phase)) for phase in ("waiting", "block", "between")],
    ),
    (
        "late_seconds",
        f"How much later than the others those came that rounds waited for, the latest {_LATE}.",
        "contributor",
        _of_late("seconds"),
    ),
    ("late_rounds", "How many rounds waited for each of these.", "contributor", _of_late("rounds")),
    (
        "unchecked",
        "Gradients accepted with NEVER_STALE, except each process's first.",
        "",
        lambda pace: [("", pace.unchecked)],
    ),
    (
        "unchecked_steps",
        "Steps since their processes' gradients before: at most so many updates they lack.",
        "",
        lambda pace: [("", pace.unchecked_steps)],
    ),
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
    return _metric("table_faults", said, samples)


def _stalls(described: list[Description]) -> Metric:
    samples = [
        ({**_labels(seen.summary.name), "kind": kind}, 1.0)
        for seen in described
        for kind in sorted({stall.kind.value for stall in _causes(seen.summary)})
    ]
    return _metric("stall", "Why a segment stands still, or perhaps does; always 1.", samples)


def _causes(summary: Summary) -> list[Stall]:
    return [*summary.stalls, *([summary.suspected] if summary.suspected else [])]


def _failures(described: list[Description]) -> Metric:
    # Report the last failure of each process and type of exception, without the exception's text:
    # it has byte counts and file names, so each new text would begin a new series.
    last = {}
    for seen in described:
        for event in seen.events:
            if event.kind == "failed":
                labels = {
                    **_labels(seen.summary.name),
                    "pid": event.pid_label,
                    "reason": _UNSAFE.sub("?", event.reason.partition(":")[0]),
                }
                last[tuple(labels.values())] = labels, event.at
    said = "When a process failed, and with which type of exception."
    return _metric("failure_timestamp_seconds", said, last.values())


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
    return _metric("segment_info", "What a segment is; always 1.", samples)


def _states(summaries: Sequence[inspection.Summary]) -> Metric:
    counts = collections.Counter(summary.state for summary in summaries)
    samples = [({"state": state.value}, float(counts[state])) for state in inspection.SegmentState]
    return _metric("segments", "Segments in each state.", samples)


def _space() -> Metric:
    space = inspection.shared_memory_space()
    samples = [({"kind": "total"}, float(space.total)), ({"kind": "free"}, float(space.free))]
    said = "Shared memory of this machine or container."
    return _metric("shared_memory_bytes", said, samples)


def _removed(summaries: Sequence[inspection.Summary]) -> Iterator[Metric]:
    uses = inspection.unlinked_uses()
    said = "Memory of removed segments that processes still have open."
    memory = float(inspection.unlinked_memory(uses))
    yield _metric("removed_but_used_bytes", said, [({}, memory)])
    users = collections.Counter(use.name for use in uses if use.under_users)
    users.update({summary.name: 0 for summary in summaries})
    said = "Processes that use a segment whose name was removed under them (rm, RemoveIPC)."
    samples = [(_labels(of), float(count)) for of, count in users.items()]
    yield _metric("removed_under_users", said, samples)
