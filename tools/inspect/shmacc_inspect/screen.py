"""The screen of `watch`: the segments, and below them the selected one in detail."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc_inspect import formatting, live, naming, page
from shmacc_inspect.describing import condition, describe_lock, events, what
from shmacc_inspect.page import Cell, Column, Fields, Table
from shmacc_inspect.progress import applied_this_round, idle_since
from shmacc_inspect.sorting import SORTS
from shmacc_inspect.verbs.list import STATE_STYLES, causes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmacc.inspection import AttachedProcess, Description
    from shmacc_inspect.output import Interval
    from shmacc_inspect.page import Terminal
    from shmacc_inspect.progress import Course, Watch

_BOTH: Final = 60  # characters; narrower terminals show a stall's cause in place of the state
_LINES: Final = (
    ("steps/s", "steps_per_second", formatting.rate),
    ("gradients/s", "gradients_per_second", formatting.rate),
    ("bytes/s", "bytes_per_second", formatting.size_rate),
    ("drops/s", "drops_per_second", formatting.rate),
)
_LABEL: Final = 14
_VALUE: Final = 11
_ROUND_BAR: Final = 8
_LONG_IDLE: Final = 5.0  # seconds; a straggler is shown in red from here on
_LEAST_LINES: Final = 3
_LEAST_EVENTS: Final = 3
_EVENT_HEAD_LINES: Final = 2
_HEAD_LINES: Final = 7  # lines of the selected segment without its history and its processes


class Screen:
    """Draws the screen, and keeps its selection and order."""

    def __init__(self, watch: Watch, interval: float, sort: str) -> None:
        """Show the watched segments, refreshed every `interval`, ordered by `sort`."""
        self._watch = watch
        self._interval = interval
        self._sort = sort
        self._picked: str | None = None
        self._page = 1

    def press(self, key: str) -> bool:
        """Handle a key; return whether it ends the screen."""
        if key in {"q", "Q", live.CLOSED}:
            return True
        if key == "s":
            names = list(SORTS)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        else:
            self._move(key)
        return False

    def _move(self, key: str) -> None:
        courses = self._shown()
        place, last = self._place(courses), len(courses) - 1
        to = {
            live.DOWN: place + 1,
            "j": place + 1,
            live.UP: place - 1,
            "k": place - 1,
            live.PAGE_DOWN: place + self._page,
            live.PAGE_UP: place - self._page,
            live.FIRST: 0,
            live.LAST: last,
        }.get(key, int(key) - 1 if key.isdecimal() and key != "0" else None)
        if courses and to is not None:
            self._picked = courses[min(max(to, 0), last)].name.system_name

    def draw(self, terminal: Terminal, height: int) -> list[str]:
        """Return the whole screen, line by line."""
        courses = self._shown()
        place = self._place(courses)
        lines = [self._title(terminal)]
        if not courses:
            return [*lines, "", "no segments"]
        room = height - 1
        if len(courses) > 1:
            shown = max(_LEAST_LINES, min(len(courses), (room - _HEAD_LINES) // 2))
            self._page = shown
            first = min(max(0, place - shown // 2), max(0, len(courses) - shown))
            columns = _segment_columns(courses, place, both=(terminal.width or _BOTH) >= _BOTH)
            intervals = [course.latest for course in courses[first : first + shown]]
            lines += ["", *page.lines(Table.of(columns, intervals), terminal)]
            room -= 2 + len(intervals)
        return lines + list(_details(courses[place], terminal, room))

    def _shown(self) -> list[Course]:
        """Return the segments in the order of the screen."""
        key = SORTS[self._sort]
        return sorted(self._watch.courses, key=lambda course: key(course.latest))

    def _place(self, courses: list[Course]) -> int:
        names = [course.name.system_name for course in courses]
        if self._picked is None and names:
            self._picked = names[0]
        return names.index(self._picked) if self._picked in names else 0

    def _title(self, terminal: Terminal) -> str:
        there = len(self._watch.courses)
        space = inspection.shared_memory_space()
        full = formatting.percent(space.total - space.free, space.total)
        left = f"shmacc  {time.strftime('%H:%M:%S')}  every {self._interval:g} s"
        if there > 1:
            left += f"  {there} segments  by {self._sort}"
        width = terminal.width or 0
        if len(memory := f"{left}  memory {full}") + len("q quit") < width:
            left = memory
        keys_of_many = ("↑ ↓ pick  s sort  q quit", "s sort  q quit")
        fitting = [
            text
            for text in (*(keys_of_many if there > 1 else ()), "q quit")
            if len(left) + len(text) < width
        ]
        right = fitting[0] if fitting else ""
        room = max(0, width - len(left) - len(right))
        return page.paint(Cell(left + " " * room + right, "reverse"), terminal)


def _segment_columns(courses: list[Course], place: int, *, both: bool) -> list[Column]:
    """Return the columns of the table of segments; the segment at `place` is selected."""
    numbers = {course.latest.name: number for number, course in enumerate(courses)}

    def mark(now: Interval) -> Cell:
        number = numbers[now.name]
        return Cell("▶", "bold cyan") if number == place else Cell(str(number + 1), "dim")

    def name(now: Interval) -> Cell:
        return naming.cell(now.name, "bold" if numbers[now.name] == place else "")

    def summed_up(field: str) -> Callable[[Interval], str]:
        return lambda now: formatting.known(getattr(now.summary, field, None))

    def rate(field: str) -> Callable[[Interval], str]:
        return lambda now: formatting.rate(getattr(now, field))

    return [
        Column("", mark, right=True),
        Column("NAME", name, whole=True),
        Column("STEP", summed_up("global_step"), right=True, rank=1),
        Column("ROUND", _round, rank=2),
        Column("WAITED", _waited, right=True, rank=4),
        Column("BEHIND", lambda now: str(len(now.stragglers) or ""), right=True, rank=6),
        Column("LOCK", _lock, right=True, rank=5),
        Column("STEPS/S", rate("steps_per_second"), right=True, rank=8),
        Column("GRADS/S", rate("gradients_per_second"), right=True, rank=3),
        Column(
            "BYTES/S", lambda now: formatting.size_rate(now.bytes_per_second), right=True, rank=7
        ),
        Column("DROPS/S", _drops, right=True, rank=9),
        Column("ALIVE", summed_up("attached_alive"), right=True, rank=10),
        Column("STATE", _state if both else _cause_or_state),
        *([Column("STALL", causes)] if both else []),
    ]


def _state(now: Interval) -> Cell:
    return Cell(now.state, STATE_STYLES.get(now.state, "bold red"))


def _cause_or_state(now: Interval) -> Cell:
    return causes(now) if now.stalls or now.suspected else _state(now)


def _waited(now: Interval) -> Cell:
    waited = formatting.duration(now.waited) if now.head else ""
    return Cell(waited, "yellow" if now.waited > _LONG_IDLE else "")


def _lock(now: Interval) -> Cell:
    if now.lock_holder and now.lock_held > _LONG_IDLE:
        return Cell(f"{now.lock_holder} {formatting.duration(now.lock_held)}", "bold red")
    return Cell(now.lock_holder)


def _drops(now: Interval) -> Cell:
    return Cell(formatting.rate(now.drops_per_second), "yellow" if now.drops_per_second else "")


def _round(now: Interval) -> str:
    gradients = now.summary.num_accumulated if now.summary else None
    if gradients is None or now.head is None:
        return "" if gradients is None else str(gradients)
    required = now.head.num_required
    return f"{formatting.bar(gradients, required, _ROUND_BAR)} {gradients}/{required}"


def _details(course: Course, terminal: Terminal, room: int) -> Iterator[str]:
    now, seen = course.latest, course.seen
    yield ""
    name, state = naming.cell(now.name), _cause_or_state(now)
    yield f"{page.paint(name, terminal)}  {page.paint(state, terminal)}"
    if seen is None:
        yield "nothing to be seen of it"
        return
    yield from page.lines(Fields(_facts(now, seen, terminal.width or 0)), terminal)
    table = Table.of(_process_columns(now, seen), _in_order(seen, now))
    room -= _HEAD_LINES + bool(now.stalls or now.suspected)
    # Show the history only if enough lines are left for processes, which matter more.
    if room >= len(_LINES) + _LEAST_LINES and not seen.summary.is_arrays:
        room -= len(_LINES)
        for label, rate, say in _LINES:
            yield _history(label, [getattr(each, rate) for each in course.intervals], terminal, say)
    yield ""
    # Keep lines for a few events; if there are few processes, the events get the rest, too.
    kept = min(_LEAST_EVENTS, len(seen.events)) + _EVENT_HEAD_LINES if seen.events else 0
    if room - kept < _LEAST_LINES:
        kept = 0
    there = len(table.rows)
    shown = there if there <= room - kept else max(1, room - kept - 1)
    yield from page.lines(table._replace(rows=table.rows[:shown]), terminal)
    if shown < there:
        yield f"… and {there - shown} more"
        room -= 1
    left = room - shown - _EVENT_HEAD_LINES
    if kept and left > 0:
        yield ""
        yield from page.lines(events(seen.events[: -left - 1 : -1], now.time), terminal)


def _facts(now: Interval, seen: Description, width: int) -> Iterator[tuple[str, Cell]]:
    if seen.summary.is_arrays:
        yield "kind", Cell(what(seen))
    else:
        yield from _progress(now, seen, width)
    if now.stalls:
        yield "stands still", Cell(formatting.printable(now.stalls[0].problem), "bold red")
    elif now.suspected:
        yield "perhaps", Cell(formatting.printable(now.suspected.problem), "yellow")


def _progress(now: Interval, seen: Description, width: int) -> Iterator[tuple[str, Cell]]:
    yield "step", Cell(f"{seen.stats.global_step}{'  sealed' if seen.stats.sealed else ''}")
    gradients, head = seen.stats.num_accumulated, now.head
    if head is None:
        yield "round", Cell(f"{formatting.count_of(gradients, 'gradient')}; nobody waits")
    else:
        bar = formatting.bar(gradients, head.num_required, max(4, min(30, width - 70)))
        behind = f", {len(seen.queue) - 1} more in the queue" if len(seen.queue) > 1 else ""
        waited = f"pid {head.pid_label} has waited for {formatting.duration(now.waited)}{behind}"
        yield "round", Cell(f"{bar} {gradients} of {head.num_required}  {waited}", "cyan")
    yield "lock", describe_lock(seen.lock, now.time)


def _history(
    label: str, values: list[float | None], terminal: Terminal, say: Callable[[float | None], str]
) -> str:
    last = values[-1]
    style = "yellow" if label == "drops/s" and last else "green"
    room = max(10, (terminal.width or 0) - _LABEL - _VALUE - 2)
    return "".join(
        page.paint(cell, terminal)
        for cell in (
            Cell(f"{label:<{_LABEL}}", "cyan"),
            Cell(f"{say(last):>{_VALUE}}  ", "bold"),
            Cell(formatting.sparkline(values, room), style),
        )
    )


def _in_order(seen: Description, now: Interval) -> list[AttachedProcess]:
    behind = {process.entry: place for place, process in enumerate(now.stragglers)}
    return sorted(
        seen.processes,
        key=lambda process: (
            behind.get(process.entry, len(behind)),
            not process.alive,
            process.pid,
        ),
    )


def _process_columns(now: Interval, seen: Description) -> list[Column]:
    def this_round(process: AttachedProcess) -> Cell:
        if not process.alive:
            return Cell("dead", "yellow")
        if applied_this_round(process, seen):
            return Cell("applied", "green")
        if process not in now.stragglers:
            return Cell("")
        if not process.applied:
            return Cell("never", "dim")
        idle = now.time - idle_since(process)
        late = "bold red" if idle > _LONG_IDLE else "yellow"
        return Cell(f"not yet: {formatting.duration(idle)}", late)

    of_gradients = [
        Column("THIS ROUND", this_round),
        Column("DOING", lambda of: of.activity, rank=1), Column("CONDITION", condition, rank=3),
        Column("APPLIED", lambda of: str(of.applied), right=True, rank=2),
        Column("DROPPED", lambda of: Cell(str(of.dropped), "yellow" if of.dropped else ""),
            right=True, rank=4),
        Column("TOOK", lambda of: str(of.taken), right=True, rank=5),
    ]  # fmt: skip
    return [
        Column("PID", lambda of: Cell(of.pid_label, "bold"), right=True),
        *([Column("CONDITION", condition)] if seen.summary.is_arrays else of_gradients),
        Column("COMMAND", lambda of: Cell(formatting.printable(of.command), "dim"), least=12),
    ]
