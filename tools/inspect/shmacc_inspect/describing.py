"""A segment in full, as the elements of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_inspect import formatting, naming, page
from shmacc_inspect.output import NotShown
from shmacc_inspect.page import Cell, Column, Element, Fields, Heading, Table
from shmacc_inspect.verbs.list import STATE_STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shmacc.inspection import (
        AttachedProcess,
        Description,
        Event,
        LockState,
        MemberDescription,
        Pace,
        SlotDescription,
        Stall,
        Summary,
        ValueSummary,
        WaitingTake,
    )
    from shmacc_inspect.output import Shown

_BAR_WIDTH: Final = 20
_LATE: Final = 3  # how many late contributors are named
_NAME: Final = Column("NAME", lambda of: Cell(formatting.printable(of.name), "bold"), least=12)
_BYTES: Final = Column("BYTES", lambda of: page.size(of.bytes_used), right=True)
_MEMBER_COLUMNS: Final = (
    _NAME,
    Column("KIND", lambda of: of.kind, rank=2),
    Column("DTYPE", lambda of: of.dtype, rank=3),
    Column("SHAPE", lambda of: formatting.shape(of.shape)),
    Column("REDUCTION", lambda of: of.reduction_type, rank=4),
    Column("GRADIENTS", lambda of: str(of.count), right=True),
    Column("ROWS", lambda of: str(of.rows) if of.kind == "sparse" else "", right=True, rank=1),
)
_ARRAY_COLUMNS: Final = (
    _NAME,
    Column("DTYPE", lambda of: of.dtype, rank=2),
    Column("SHAPE", lambda of: formatting.shape(of.shape), rank=1),
    _BYTES,
    Column("VALUE", lambda of: formatting.known(of.value), right=True),
)
_PARAMETER_COLUMNS: Final = (
    _NAME,
    Column("DTYPE", lambda of: of.dtype, rank=3),
    Column("SHAPE", lambda of: formatting.shape(of.shape), rank=2),
    _BYTES,
    Column("SLOTS", lambda of: _slots(of.slots), rank=1),
    Column("OPTIMIZER", lambda of: of.optimizer or "", least=16),
)
_REGION_COLUMNS: Final = (
    Column("PART", lambda of: of.name),
    Column("OFFSET", lambda of: f"{of.offset:#x}", right=True, rank=2),
    Column("RESERVED", lambda of: page.size(of.reserved), right=True),
    Column("USED", lambda of: page.size(of.used), right=True),
    Column("FILL", lambda of: page.one_word(formatting.percent(of.used, of.reserved)), right=True,
        rank=1),
)  # fmt: skip
_ROW_COLUMNS: Final = (
    Column("ROW", lambda of: str(of.row), right=True),
    Column("GRADIENTS", lambda of: str(of.count), right=True),
)
_MOVING: Final = "gradients kept arriving while they were read: they may be in here in part"


def elements(seen: Shown | NotShown, now: float, *, layout: bool) -> Iterator[Element]:
    """Return the elements of the page; the verdict comes last, so that it is above the prompt."""
    summary = seen.summary
    if isinstance(seen, NotShown):
        yield Fields(_identity(summary, now, ""))
        return
    yield Fields([*_identity(summary, now, summary.detail), *_facts(seen, now)])
    yield from _contents(seen, layout=layout)
    if seen.events:
        yield Heading("Events", Cell("the last ones"))
        yield events(seen.events, now)
    dead = f", {summary.attached_dead} dead" if summary.attached_dead else ""
    yield Heading("Processes", Cell(f"{summary.attached_alive} alive{dead}"))
    if seen.processes:
        yield _processes(seen, now)
    if not summary.is_arrays:
        yield Heading("Line", Cell("" if seen.queue else "nobody waits"))
    if seen.queue:
        yield _queue(seen.queue, now)
    yield Heading("Verdict")
    yield Fields(_verdict(seen))


def _contents(seen: Shown, *, layout: bool) -> Iterator[Element]:
    summary = seen.summary
    if summary.is_arrays:
        yield Heading("Arrays")
        parameters = summary.kind == "parameters"
        yield Table.of(_PARAMETER_COLUMNS if parameters else _ARRAY_COLUMNS, seen.members)
    elif summary.kind == "group":
        yield Heading("Members")
        yield Table.of(_MEMBER_COLUMNS, seen.members)
    if layout:
        yield Heading("Layout", Cell(f"{formatting.size(summary.bytes_reserved)} of memory"))
        regions = [each for each in seen.regions if each.reserved or not summary.is_arrays]
        yield Table.of(_REGION_COLUMNS, regions)
    if seen.most_touched is not None:
        yield Heading("Most touched rows", Cell("" if seen.most_touched_still else _MOVING))
        yield Table.of(_ROW_COLUMNS, seen.most_touched)
    if seen.values is not None:
        still = "" if seen.values.still else f"; {_MOVING}"
        yield Heading("Values", Cell(f"of the sums{still}"))
        yield Fields(_values(seen.values))


def events(found: Sequence[Event], now: float) -> Table:
    """Return a table of the events."""
    columns = (
        Column("WHEN", lambda of: formatting.ago(of.at, now), right=True),
        Column("WHAT", lambda of: Cell(of.kind, "yellow")),
        Column("PID", lambda of: of.pid_label, right=True, rank=1),
        Column("STEP", lambda of: str(of.step), right=True, rank=2),
        Column("CONTRIBUTOR", lambda of: formatting.known(of.contributor), right=True, rank=3),
        Column("REASON", lambda of: formatting.printable(of.reason), least=20),
    )
    return Table.of(columns, found)


def condition(process: AttachedProcess) -> Cell | str:
    """Return a process's condition, as the kernel reports it; in red if it is halted."""
    halted = process.condition in {"stopped", "traced"}
    return Cell(process.condition, "bold red") if halted else process.condition


def _processes(seen: Description, now: float) -> Table:
    def ago(moment: float | None) -> str:
        return formatting.ago(moment, now)

    of_gradients = [
        Column("DOING", lambda of: ("" if of.alive else "died: ") + of.activity, least=12),
        Column("APPLIED", lambda of: str(of.applied), right=True, rank=1),
        Column("DROPPED", lambda of: str(of.dropped), right=True, rank=5),
        Column("TOOK", lambda of: str(of.taken), right=True, rank=6),
        Column("LAST APPLIED", lambda of: ago(of.last_applied), right=True, rank=4),
    ]
    columns = [
        Column("PID", lambda of: Cell(of.pid_label, "bold" if of.alive else "dim"), right=True),
        Column(
            "ALIVE", lambda of: Cell("yes", "green") if of.alive else Cell("no", "yellow"), rank=2
        ),
        Column("CONDITION", condition, rank=3),
        *([] if seen.summary.is_arrays else of_gradients),
        Column("LAST SEEN", lambda of: ago(of.last_seen), right=True, rank=7),
        Column("ATTACHED", lambda of: ago(of.attached_at), right=True, rank=9),
        Column("STARTED", lambda of: ago(of.started) if of.started else "", right=True, rank=8),
        Column("COMMAND", lambda of: formatting.printable(of.command), least=20),
    ]
    processes = sorted(seen.processes, key=lambda of: (not of.alive, of.pid))
    return Table.of(columns, processes, lambda of: "" if of.alive else "dim")


def _queue(queue: Sequence[WaitingTake], now: float) -> Table:
    def remark(take: WaitingTake) -> Cell:
        if not take.alive:
            return Cell("dead: the next apply or waiting take removes it", "yellow")
        overdue = "overdue: its gradients have arrived, and it does not take them"
        return Cell(overdue if take.overdue else "", "yellow")

    columns = (
        Column("PLACE", lambda of: str(of.position), right=True, rank=1),
        Column("PID", lambda of: Cell("" if of.pid is None else of.pid_label, "bold"), right=True),
        Column("WAITS FOR", lambda of: str(of.num_required), right=True),
        Column("FOR", lambda of: page.duration(now - of.since), right=True),
        Column("REMARK", remark, least=20),
    )
    return Table.of(columns, queue)


def _identity(summary: Summary, now: float, detail: str) -> Iterator[tuple[str, Cell]]:
    yield "name", naming.cell(summary.name)
    state = summary.state + (f" ({detail})" if detail else "")
    yield "state", Cell(state, STATE_STYLES[summary.state])
    yield "file", Cell(summary.name.path)
    yield "owner", Cell(f"{summary.owner} (uid {summary.owner_uid}), mode {summary.mode:04o}")
    made = f"{formatting.date(summary.created)}, {formatting.ago(summary.created, now)}"
    yield "made", Cell(made)


def _facts(seen: Shown, now: float) -> Iterator[tuple[str, Cell]]:
    summary, stats = seen.summary, seen.stats
    yield "kind", Cell(what(seen) + (", private" if summary.private else ""))
    if summary.capacity is not None:
        yield "capacity", Cell(f"{summary.capacity} gradients may be pending")
    if summary.kept_free:
        yield "leaves free", Cell(f"{formatting.size(summary.kept_free)} of /dev/shm, for others")
    if (summary.lanes or 1) > 1:
        held = ", ".join(
            f"{lane.number} by pid {lane.pid or '?'}" for lane in seen.lanes if lane.held
        )
        yield "lanes", Cell(f"{summary.lanes}" + (f"; held: {held}" if held else ""))
    if summary.is_arrays:
        if summary.kind == "parameters":
            yield from _of_parameters(seen, now)
        return
    yield from _of_round(seen, now)
    yield "lock", describe_lock(seen.lock, now)
    if seen.lock.held or seen.lock.in_operation:
        yield "read", Cell("without the lock: the state as last committed", "dim")
    if seen.lock.name_pid is not None:
        yield "name lock", Cell(f"held by pid {seen.lock.name_pid}, which opens or removes it")
    gradients = (
        f"{stats.applied} applied, {stats.taken} taken in {stats.takes} takes, "
        f"{stats.dropped} dropped as stale, {stats.discarded} discarded"
    )
    yield "gradients", Cell(gradients)
    yield from _pace(seen.pace)
    yield "commits", Cell(f"{seen.generation}, {_recoveries(seen)}")


def _pace(pace: Pace) -> Iterator[tuple[str, Cell]]:
    if total := pace.waiting + pace.block + pace.between:
        parts = (
            (pace.waiting, "waiting for gradients"),
            (pace.block, "in blocks of rounds"),
            (pace.between, "between rounds"),
        )
        said = ", ".join(f"{formatting.percent(part, total)} {what}" for part, what in parts)
        yield "time", Cell(f"{formatting.duration(total)}: {said}")
    if pace.late:
        said = "; ".join(
            f"{of.label}: {formatting.duration(of.seconds)} in {of.rounds}"
            for of in pace.late[:_LATE]
        )
        yield "waited for", Cell(f"contributors that came last, in so many rounds: {said}")
    if pace.unchecked:
        mean = pace.unchecked_steps / pace.unchecked
        text = (
            f"{pace.unchecked} gradients with NEVER_STALE lack at most {mean:.1f} updates each on "
            f"average, one {pace.most_unchecked_steps}"
        )
        yield "unchecked", Cell(text)


def _of_round(seen: Shown, now: float) -> Iterator[tuple[str, Cell]]:
    stats = seen.stats
    if seen.contributors:
        yield "contributors", Cell(f"{seen.contributors} in the round")
    sealed = "; sealed: applies are refused until it moves on" if stats.sealed else ""
    if seen.round_holder is not None and stats.round_since is not None:
        since = formatting.duration(now - stats.round_since)
        pid = seen.round_holder.pid_label
        sealed = f"; being closed by pid {pid}, for {since}: a round is open"
    yield "step", Cell(f"{stats.global_step}{sealed}", "yellow" if sealed else "")
    yield "round", Cell(_progress(seen))
    final = seen.final_round
    if final is not None:
        what = "is in" if final.is_in else "has begun"
        held = "" if final.held else "; no process has it open: the next one that takes gets it"
        since = formatting.duration(now - final.since)
        text = f"its update, of pid {final.pid}, {what} since {since}{held}"
        yield "final", Cell(text, "yellow" if held else "")
    shape = "" if seen.round_shape is None else f"of shape {formatting.shape(seen.round_shape)}"
    if seen.summary.kind == "sparse":
        load = "" if seen.index_load is None else f", index {seen.index_load:.0%} full"
        yield "rows", Cell(f"{seen.summary.rows} {shape}".rstrip() + load)
    elif shape:
        yield "array", Cell(shape)


def _recoveries(seen: Description) -> str:
    return formatting.count_of(seen.stats.recoveries, "recovery", "recoveries")


def what(seen: Description) -> str:
    """Return in words what a segment is."""
    summary = seen.summary
    if summary.is_arrays:
        size = formatting.size(sum(member.bytes_used for member in seen.members))
        noun = "parameter array" if summary.kind == "parameters" else "shared array"
        tables = sum(member.kind == "table" for member in seen.members)
        counts = {noun: len(seen.members) - tables, "table": tables}
        counted = [formatting.count_of(count, of) for of, count in counts.items() if count]
        return f"{' and '.join(counted)}, {size}"
    if summary.kind == "group":
        return (
            f"group of {formatting.count_of(len(seen.members), 'member')} {summary.reduction_type}"
        )
    shape = formatting.shape(summary.shape)
    return f"{summary.kind} {summary.dtype} {shape} {summary.reduction_type}"


def _progress(seen: Description) -> str:
    """Return the round's progress towards what the head of the queue waits for."""
    gradients = seen.stats.num_accumulated
    head = seen.head
    if head is None:
        return formatting.count_of(gradients, "gradient")
    of = f"{gradients} of the {head.num_required} gradients that pid {head.pid_label} waits for"
    if not page.is_terminal():
        return of
    return f"{formatting.bar(gradients, head.num_required, _BAR_WIDTH)} {of}"


def _of_parameters(seen: Description, now: float) -> Iterator[tuple[str, Cell]]:
    yield "step", Cell(f"{seen.summary.global_step}")
    yield "lock", describe_lock(seen.lock, now)
    yield "updates", Cell(f"{seen.stats.takes}, {_recoveries(seen)}")
    for member in seen.members:
        if member.kind == "table":
            yield "table", Cell(_table_in_words(member))
    update = seen.update
    if update is not None:
        since = "" if update.since is None else f", {formatting.ago(update.since, now)}"
        text = f"one runs: pid {update.pid_label}{since}"
        if update.is_interrupted:
            text = (
                f"one was interrupted by the death of pid {update.pid_label}{since}; the next "
                "update, snapshot or restore puts back what it changed"
            )
        yield "update", Cell(text, "yellow")
    if seen.stats.sealed:
        text = "of a checkpoint was interrupted: no update until one has ended"
        if seen.round_holder is not None:
            text = (
                f"of a checkpoint: pid {seen.round_holder.pid_label}; no update until it has ended"
            )
        yield "load", Cell(text, "yellow")


def _table_in_words(member: MemberDescription) -> str:
    rows = formatting.count_of(member.rows, "row", "rows")
    if member.max_rows is not None:
        rows += f" of at most {member.max_rows}"
    return (
        f"{formatting.printable(member.name)}: {rows}; {member.rows_added} were added and "
        f"{member.rows_removed} removed in all; at first {member.initial}"
    )


def _slots(slots: Sequence[SlotDescription]) -> Cell:
    said = [(slot.name, formatting.size(slot.bytes_used)) for slot in slots]
    words = ",".join(f"{name}:{size.replace(' ', '')}" for name, size in said)
    return Cell(", ".join(f"{name} {size}" for name, size in said), word=words)


def describe_lock(lock: LockState, now: float) -> Cell:
    """Describe the lock and its holder."""
    if lock.held:
        text = f"held by pid {lock.pid_label}" if lock.pid else "held"
        if lock.since is not None:
            text += f", in an operation for {formatting.duration(now - lock.since)}"
        halted = lock.condition in {"stopped", "traced"}
        if halted:
            text += f"; the process is {lock.condition}, so no process can apply or take"
        return Cell(text, "bold red" if halted else "yellow")
    if lock.in_operation:
        return Cell("free; a death interrupted an operation, the next one undoes it", "yellow")
    return Cell("free")


def _verdict(seen: Shown) -> Iterator[tuple[str, Cell]]:
    summary = seen.summary
    wrong = [finding for finding in seen.damage if finding.severity == "wrong"]
    for finding in wrong:
        yield "damaged", Cell(formatting.printable(finding.problem), "bold red")
        yield "do", Cell(finding.remedy)
    if summary.finished:
        yield "finished", Cell("the run is over: nothing is accepted or taken any more")
    for stall in summary.stalls:
        yield "stands still", Cell(formatting.printable(stall.problem), "bold red")
        yield "do", Cell(_remedy(stall))
    if summary.stalls:
        return
    if seen.suspected is not None:
        yield "perhaps", Cell(formatting.printable(seen.suspected.problem), "yellow")
        yield "do", Cell(_remedy(seen.suspected))
    elif not summary.attached_alive and not summary.finished:
        yield "orphaned", Cell("no living process has it attached", "yellow")
        yield "do", Cell("ask `shmacc-inspect check` whether its job can go on with it")
    elif not summary.finished and not wrong:
        dead = sum(not process.alive for process in seen.processes)
        died = formatting.count_of(dead, "process", "processes") + " died"
        # Whether deaths block the other processes is known only when these have waited for long.
        again = f"; {died}: look again in 10 s" if dead and summary.attached_alive else ""
        fine = f"nothing is known that makes it stand still{again}; `check` verifies more"
        yield "fine", Cell(fine)


def _remedy(stall: Stall) -> str:
    return f"{stall.remedy}: {stall.command}" if stall.command else stall.remedy


def _values(values: ValueSummary) -> Iterator[tuple[str, Cell]]:
    yield "numbers", Cell(str(values.numbers))
    yield "norm", Cell(f"{values.norm:.6g}")
    yield "largest", Cell(f"{values.largest:.6g}")
    yield "NaN", Cell(str(values.nan), "bold red" if values.nan else "")
    yield "infinite", Cell(str(values.infinite), "bold red" if values.infinite else "")
