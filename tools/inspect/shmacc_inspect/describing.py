"""A segment in full, as the elements of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_inspect import describing_arrays, formatting, page
from shmacc_inspect.describing_arrays import describe_lock
from shmacc_inspect.page import Cell, Column, Element, Fields, Heading, Table
from shmacc_inspect.verbs.list import STATE_STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_inspect.output import contents, details
    from shmacc_inspect.output.segments import Segment, Stall

_BAR_WIDTH: Final = 20
_PROCESS_COLUMNS: Final = (
    Column("PID", right=True),
    Column("ALIVE"),
    Column("CONDITION", rank=2),
    Column("DOING", least=12),
    Column("APPLIED", right=True),
    Column("DROPPED", right=True, rank=3),
    Column("TOOK", right=True, rank=4),
    Column("LAST APPLIED", right=True, rank=1),
    Column("LAST SEEN", right=True, rank=5),
    Column("ATTACHED", right=True, rank=7),
    Column("STARTED", right=True, rank=6),
    Column("COMMAND", least=20),
)
_OF_ARRAYS: Final = (0, 1, 2, 8, 9, 10, 11)  # of these columns
_LINE_COLUMNS: Final = (
    Column("PLACE", right=True),
    Column("PID", right=True),
    Column("WAITS FOR", right=True),
    Column("FOR", right=True),
    Column("REMARK", least=20),
)
_MEMBER_COLUMNS: Final = (
    Column("NAME", least=12),
    Column("KIND"),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("REDUCTION", rank=2),
    Column("GRADIENTS", right=True),
    Column("ROWS", right=True, rank=1),
)
EVENT_COLUMNS: Final = (
    Column("WHEN", right=True),
    Column("WHAT"),
    Column("PID", right=True),
    Column("STEP", right=True),
    Column("CONTRIBUTOR", right=True, rank=1),
    Column("REASON", least=20),
)
_REGION_COLUMNS: Final = (
    Column("PART"),
    Column("OFFSET", right=True),
    Column("RESERVED", right=True),
    Column("USED", right=True),
    Column("FILL", right=True),
)
ARRAYS: Final = {"arrays", "parameters"}
_MOVING: Final = "gradients kept arriving while they were read: they may be in here in part"


def elements(answer: details.Details, now: float, *, layout: bool) -> Iterator[Element]:
    """Return the elements of the page; what somebody has to know stands last, above the prompt.

    Args:
        answer: What is shown.
        now: When that was.
        layout: Whether its memory is shown, region by region.
    """
    segment = answer.segment
    yield Fields(_facts(answer, now))
    if answer.counters is None:
        return
    arrays = segment.kind in ARRAYS
    if arrays:
        yield Heading("Arrays")
        yield describing_arrays.table(answer)
    elif segment.kind == "group":
        yield Heading("Members")
        yield Table(_MEMBER_COLUMNS, [_member_row(member) for member in answer.members])
    if layout:
        yield from _layout_elements(answer)
    yield from _examined(answer)
    if answer.events:
        yield Heading("Events", Cell("the last ones"))
        yield Table(EVENT_COLUMNS, [event_row(event, now) for event in answer.events])
    yield Heading("Processes", Cell(_census(segment)))
    if answer.processes:
        kept = _OF_ARRAYS if arrays else range(len(_PROCESS_COLUMNS))
        rows = [_process_row(process, now) for process in answer.processes]
        yield Table([_PROCESS_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows])
    if not arrays:
        yield Heading("Line", Cell("" if answer.line else "nobody waits"))
    if answer.line:
        yield Table(_LINE_COLUMNS, [_taker_row(taker) for taker in answer.line])
    yield Heading("Verdict")
    yield Fields(_verdict(answer))


def progress(gradients: int, line: list[details.Taker]) -> str:
    """Return the round's progress towards what the head of the queue waits for."""
    head = next((taker for taker in line if taker.alive), None)
    if head is None:
        return formatting.count_of(gradients, "gradient")
    pid = formatting.pid(head.pid, is_here=head.pid_is_here)
    of = f"{gradients} of the {head.num_required} gradients that pid {pid} waits for"
    if not page.is_terminal():
        return of
    return f"{formatting.bar(gradients, head.num_required, _BAR_WIDTH)} {of}"


def _facts(answer: details.Details, now: float) -> Iterator[tuple[str, Cell]]:
    segment = answer.segment
    yield "name", Cell(segment.name, "bold")
    detail = f" ({segment.detail})" if segment.detail and answer.error is None else ""
    yield "state", Cell(segment.state + detail, STATE_STYLES[segment.state])
    yield "file", Cell(f"/dev/shm/{segment.system_name}")  # noqa: S108  it stands there
    yield "owner", Cell(f"{segment.owner} (uid {segment.owner_uid}), mode {segment.mode}")
    made = f"{formatting.date(segment.created)}, {formatting.duration(segment.age_seconds)} ago"
    yield "made", Cell(made)
    counters, lock = answer.counters, answer.lock
    if counters is None or lock is None:
        return
    yield from _made_as(answer)
    if segment.kind in ARRAYS:
        yield from describing_arrays.facts(answer, counters, lock, now)
        return
    sealed = "; sealed: applies are refused until it moves on" if answer.sealed else ""
    if answer.round_open_seconds is not None:
        since = formatting.duration(answer.round_open_seconds)
        pid = formatting.pid(answer.round_holder_pid, is_here=bool(answer.round_holder_pid_is_here))
        sealed = f"; being closed by pid {pid}, for {since}: a round is open"
    if answer.contributors:
        yield "contributors", Cell(f"{answer.contributors} in the round")
    yield "step", Cell(f"{segment.step}{sealed}", "yellow" if sealed else "")
    yield "round", Cell(progress(segment.gradients or 0, answer.line))
    final = answer.final_round
    if final is not None:
        what = "is in" if final.is_in else "has begun"
        held = "" if final.held else "; no process has it open: the next one that takes gets it"
        since = formatting.duration(now - final.since)
        text = f"its update, of pid {final.pid}, {what} since {since}{held}"
        yield "final", Cell(text, "yellow" if held else "")
    if segment.kind == "sparse":
        row = (
            ""
            if answer.round_shape is None
            else f" of shape {formatting.shape(answer.round_shape)}"
        )
        load = "" if answer.index_load is None else f", index {answer.index_load:.0%} full"
        yield "rows", Cell(f"{segment.rows}{row}{load}")
    elif answer.round_shape is not None:
        yield "array", Cell(f"of shape {formatting.shape(answer.round_shape)}")
    yield "lock", describe_lock(lock)
    if lock.held or lock.in_operation:
        yield "read", Cell("without the lock: the state as last committed", "dim")
    if lock.name_holder_pid is not None:
        yield "name lock", Cell(f"held by pid {lock.name_holder_pid}, which opens or removes it")
    yield (
        "gradients",
        Cell(
            f"{counters.applied} applied, {counters.taken} taken in {counters.takes} takes, "
            f"{counters.dropped} dropped as stale, {counters.discarded} discarded"
        ),
    )
    recoveries = formatting.count_of(counters.recoveries, "recovery", "recoveries")
    yield "commits", Cell(f"{counters.commits}, {recoveries}")


def _made_as(answer: details.Details) -> Iterator[tuple[str, Cell]]:
    segment = answer.segment
    private = ", private" if segment.private else ""
    yield (
        "kind",
        Cell(f"{_of_what(answer)}{private}"),
    )
    if segment.capacity is not None:
        yield "capacity", Cell(f"{segment.capacity} gradients may be pending")
    if segment.kept_free:
        yield "leaves free", Cell(f"{formatting.size(segment.kept_free)} of /dev/shm, for others")
    if (segment.lanes or 1) > 1:
        held = [
            f"{lane.number} by pid {lane.holder_pid or '?'}" for lane in answer.lanes if lane.held
        ]
        yield "lanes", Cell(f"{segment.lanes}" + (f"; held: {', '.join(held)}" if held else ""))


def _of_what(answer: details.Details) -> str:
    segment = answer.segment
    if segment.kind in ARRAYS:
        size = formatting.size(sum(member.bytes_used for member in answer.members))
        what = "parameter array" if segment.kind == "parameters" else "shared array"
        tables = sum(member.kind == "table" for member in answer.members)
        counts = {what: (segment.members or 0) - tables, "table": tables}
        counted = [formatting.count_of(count, noun) for noun, count in counts.items() if count]
        return f"{' and '.join(counted)}, {size}"
    if segment.kind == "group":
        of = formatting.count_of(segment.members or 0, "member")
        return f"group of {of} {segment.reduction_type}"
    return (
        f"{segment.kind} {segment.dtype} {formatting.shape(segment.shape)} {segment.reduction_type}"
    )


def _verdict(answer: details.Details) -> Iterator[tuple[str, Cell]]:
    segment = answer.segment
    if segment.finished:
        yield "finished", Cell("the run is over: nothing is accepted or taken any more")
    for stall in segment.stalls:
        yield "stands still", Cell(stall.problem, "bold red")
        yield "do", Cell(_remedy(stall))
    if segment.stalls:
        return
    if answer.suspected is not None:
        yield "perhaps", Cell(answer.suspected.problem, "yellow")
        yield "do", Cell(_remedy(answer.suspected))
    elif not segment.finished:
        dead = sum(not process.alive for process in answer.processes)
        died = formatting.count_of(dead, "process", "processes") + " died"
        # What their death stops is known only when the others have waited for a while.
        again = f"; {died}: look again in 10 s" if dead and segment.attached_alive else ""
        fine = f"nothing is known that makes it stand still{again}; `check` verifies more"
        yield "fine", Cell(fine)


def _remedy(stall: Stall) -> str:
    return f"{stall.remedy}: {stall.command}" if stall.command else stall.remedy


def _member_row(member: contents.Member) -> list[Cell]:
    return [
        Cell(formatting.printable(member.name), "bold"),
        Cell(member.kind),
        Cell(member.dtype),
        Cell(formatting.shape(member.shape)),
        Cell(member.reduction_type),
        Cell(str(member.gradients)),
        Cell(str(member.rows) if member.kind == "sparse" else ""),
    ]


def event_row(event: details.Event, now: float) -> list[Cell]:
    """Return the cells of something that happened, as `EVENT_COLUMNS`."""
    who = "" if event.contributor is None else str(event.contributor)
    return [
        Cell(formatting.ago(event.at, now)),
        Cell(event.kind, "yellow"),
        Cell(formatting.pid(event.pid, is_here=event.pid_is_here)),
        Cell(str(event.step)),
        Cell(who),
        Cell(formatting.printable(event.reason or "")),
    ]


def _census(segment: Segment) -> str:
    dead = f", {segment.attached_dead} dead" if segment.attached_dead else ""
    return f"{segment.attached_alive} alive{dead}"


def _process_row(process: details.Process, now: float) -> list[Cell]:
    style = "" if process.alive else "dim"
    halted = process.condition in {"stopped", "traced"}
    return [
        Cell(formatting.pid(process.pid, is_here=process.pid_is_here), style or "bold"),
        Cell("yes", "green") if process.alive else Cell("no", "yellow"),
        Cell(process.condition or "", "bold red" if halted else style),
        Cell(process.activity if process.alive else f"died: {process.activity}", style),
        Cell(str(process.applied), style),
        Cell(str(process.dropped), style),
        Cell(str(process.taken), style),
        Cell(formatting.ago(process.last_applied, now), style),
        Cell(formatting.ago(process.last_seen, now), style),
        Cell(formatting.ago(process.attached_at, now), style),
        Cell("" if process.started is None else formatting.ago(process.started, now), style),
        Cell(formatting.printable(process.command or ""), style),
    ]


def _taker_row(taker: details.Taker) -> list[Cell]:
    remark = "" if taker.alive else "dead: the next apply or waiting take removes it"
    if taker.alive and taker.overdue:
        remark = "overdue: its gradients have arrived, and it does not take them"
    return [
        Cell(str(taker.position)),
        Cell(
            "" if taker.pid is None else formatting.pid(taker.pid, is_here=taker.pid_is_here),
            "bold",
        ),
        Cell(str(taker.num_required)),
        page.duration(taker.waiting_seconds),
        Cell(remark, "yellow"),
    ]


def _region_row(region: contents.Region) -> list[Cell]:
    return [
        Cell(region.name),
        Cell(f"{region.offset:#x}"),
        page.size(region.reserved),
        page.size(region.used),
        Cell(
            percent := formatting.percent(region.used, region.reserved),
            word=percent.replace(" ", ""),
        ),
    ]


def _layout_elements(answer: details.Details) -> Iterator[Element]:
    yield Heading("Layout", Cell(f"{formatting.size(answer.segment.bytes_reserved)} of memory"))
    arrays = answer.segment.kind in ARRAYS
    regions = [region for region in answer.regions if region.reserved or not arrays]
    yield Table(_REGION_COLUMNS, [_region_row(region) for region in regions])


def _examined(answer: details.Details) -> Iterator[Element]:
    if answer.most_touched is not None:
        yield from _row_elements(answer.most_touched)
    if answer.values is not None:
        yield from _value_elements(answer.values)


def _row_elements(rows: contents.Rows) -> Iterator[Element]:
    yield Heading("Most touched rows", Cell("" if rows.still else _MOVING))
    columns = (Column("ROW", right=True), Column("GRADIENTS", right=True))
    yield Table(columns, [[Cell(str(row.row)), Cell(str(row.count))] for row in rows.rows])


def _value_elements(values: contents.Values) -> Iterator[Element]:
    yield Heading("Values", Cell("of the sums" + ("" if values.still else "; " + _MOVING)))
    wrong = "bold red"
    yield Fields(
        [
            ("numbers", Cell(str(values.numbers))),
            ("norm", Cell(formatting.number(values.norm))),
            ("largest", Cell(formatting.number(values.largest))),
            ("NaN", Cell(str(values.nan), wrong if values.nan else "")),
            ("infinite", Cell(str(values.infinite), wrong if values.infinite else "")),
        ]
    )
