"""The screen of `watch`: the segments, and below them the selected one in detail."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc_inspect import formatting, keys, page
from shmacc_inspect.describing import EVENT_COLUMNS, event_row
from shmacc_inspect.describing_arrays import describe_lock
from shmacc_inspect.output.details import Event, Lock, Taker, applied_this_round
from shmacc_inspect.page import Cell, Column, Fields, Table
from shmacc_inspect.sorting import SORTS
from shmacc_inspect.verbs.list import STATE_STYLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmacc.inspection import AttachedProcess, Description
    from shmacc_inspect.output.intervals import Interval
    from shmacc_inspect.page import Terminal
    from shmacc_inspect.progress import Course, Watch

_SEGMENT_COLUMNS: Final = (
    Column("", right=True),
    Column("NAME", least=12),
    Column("STEP", right=True, rank=1),
    Column("ROUND", rank=2),
    Column("WAITED", right=True, rank=4),
    Column("BEHIND", right=True, rank=6),
    Column("LOCK", right=True, rank=5),
    Column("STEPS/S", right=True, rank=8),
    Column("GRADS/S", right=True, rank=3),
    Column("BYTES/S", right=True, rank=7),
    Column("DROPS/S", right=True, rank=9),
    Column("ALIVE", right=True, rank=10),
    Column("STATE"),
    Column("STALL"),
)
_BOTH: Final = 60  # characters; on a narrower terminal a cause stands in place of the state
_PROCESS_COLUMNS: Final = (
    Column("PID", right=True),
    Column("THIS ROUND"),
    Column("DOING"),
    Column("CONDITION", rank=1),
    Column("APPLIED", right=True),
    Column("DROPPED", right=True, rank=2),
    Column("TOOK", right=True, rank=3),
    Column("COMMAND", least=12),
)
_OF_ARRAYS: Final = (0, 3, 7)  # of these columns
_LINES: Final = (
    ("steps/s", "steps_per_second", formatting.rate),
    ("gradients/s", "gradients_per_second", formatting.rate),
    ("bytes/s", "bytes_per_second", formatting.size),
    ("drops/s", "drops_per_second", formatting.rate),
)
_LABEL: Final = 14
_VALUE: Final = 11
_ROUND_BAR: Final = 8
_LONG_IDLE: Final = 5.0  # seconds; a straggler is shown in red from here on
_LEAST_LINES: Final = 3
_LEAST_EVENTS: Final = 3
_EVENT_HEAD_LINES: Final = 2
_HEAD_LINES: Final = 7  # of the selected segment: all but its history and its processes


class Screen:
    """The selection, the order, the filter, and the drawing of the screen."""

    def __init__(self, watch: Watch, interval: float, *, sort: str, reverse: bool) -> None:
        """Show what this watches, looked at so often, in this order."""
        self._watch = watch
        self._interval = interval
        self._sort = sort
        self._reverse = reverse
        self._filter = ""
        self._typing = False
        self._picked: str | None = None
        self._page = 1

    def press(self, key: str) -> bool:
        """Handle a key; return whether the screen ends."""
        if key == keys.CLOSED:
            return True
        if self._typing:
            self._type(key)
            return False
        if key in {"q", "Q"}:
            return True
        if key == "s":
            names = list(SORTS)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        elif key == "r":
            self._reverse = not self._reverse
        elif key == "/":
            self._typing = True
        elif key == keys.ESCAPE:
            self._filter = ""
        else:
            self._move(key)
        return False

    def _type(self, key: str) -> None:
        if key in {"\r", "\n"}:
            self._typing = False
        elif key == keys.ESCAPE:
            self._typing, self._filter = False, ""
        elif key in keys.ERASE:
            self._filter = self._filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self._filter += key

    def _move(self, key: str) -> None:
        courses = self._shown()
        place, last = self._place(courses), len(courses) - 1
        to = {
            keys.DOWN: place + 1,
            "j": place + 1,
            keys.UP: place - 1,
            "k": place - 1,
            keys.PAGE_DOWN: place + self._page,
            keys.PAGE_UP: place - self._page,
            keys.FIRST: 0,
            keys.LAST: last,
        }.get(key, int(key) - 1 if key.isdecimal() and key != "0" else None)
        if courses and to is not None:
            self._picked = courses[min(max(to, 0), last)].name.system_name

    def draw(self, terminal: Terminal, height: int) -> list[str]:
        """Return the whole screen, line by line."""
        courses = self._shown()
        place = self._place(courses)
        lines = [self._title(terminal, len(courses))]
        if not courses:
            return [*lines, "", "no segments" if not self._filter else "no such segments"]
        room = height - 1
        if len(self._watch.courses) > 1:
            shown = max(_LEAST_LINES, min(len(courses), (room - _HEAD_LINES) // 2))
            self._page = shown
            first = min(max(0, place - shown // 2), max(0, len(courses) - shown))
            both = (terminal.width or _BOTH) >= _BOTH
            columns = _SEGMENT_COLUMNS if both else _SEGMENT_COLUMNS[:-1]
            rows = [
                _segment_row(first + number, course, picked=first + number == place, both=both)
                for number, course in enumerate(courses[first : first + shown])
            ]
            lines += ["", *page.lines(Table(columns, rows), terminal)]
            room -= 2 + len(rows)
        return lines + list(_details(courses[place], terminal, room))

    def _shown(self) -> list[Course]:
        """Return the segments in order, without those that are filtered out."""
        key = SORTS[self._sort]
        found = [course for course in self._watch.courses if self._filter in course.latest.name]
        return sorted(found, key=lambda course: key(course.latest), reverse=self._reverse)

    def _place(self, courses: list[Course]) -> int:
        names = [course.name.system_name for course in courses]
        if self._picked is None and names:
            self._picked = names[0]
        return names.index(self._picked) if self._picked in names else 0

    def _title(self, terminal: Terminal, shown: int) -> str:
        there = len(self._watch.courses)
        space = inspection.shared_memory_space()
        full = formatting.percent(space.total - space.free, space.total)
        left = f"shmacc  {time.strftime('%H:%M:%S')}  every {self._interval:g} s"
        if there > 1:
            left += f"  {shown} of {there}" if self._filter else f"  {there} segments"
            left += f"  by {self._sort}{' reversed' if self._reverse else ''}"
        if self._typing or self._filter:
            left += f"  /{self._filter}{'_' if self._typing else ''}"
        width = terminal.width or 0
        if len(memory := f"{left}  memory {full}") + len("q quit") < width:
            left = memory
        keys_of_many = ("↑ ↓ pick  s sort  r reverse  / filter  q quit", "s sort  / filter  q quit")
        fitting = [
            text
            for text in (*(keys_of_many if there > 1 else ()), "q quit")
            if len(left) + len(text) < width
        ]
        right = fitting[0] if fitting else ""
        room = max(0, width - len(left) - len(right))
        return page.paint(Cell(left + " " * room + right, "reverse"), terminal)


def _segment_row(number: int, course: Course, *, picked: bool, both: bool) -> list[Cell]:
    now = course.latest
    mark = "▶" if picked else str(number + 1)
    late = now.waited_seconds is not None and now.waited_seconds > _LONG_IDLE
    lock = ""
    if now.lock_holder_pid is not None:
        lock = formatting.pid(now.lock_holder_pid, is_here=bool(now.lock_holder_pid_is_here))
    if now.lock_held_seconds is not None and now.lock_held_seconds > _LONG_IDLE:
        lock += f" {formatting.duration(now.lock_held_seconds)}"
    return [
        Cell(mark, "bold cyan" if picked else "dim"),
        Cell(now.name, "bold" if picked else ""),
        Cell("" if now.step is None else str(now.step)),
        Cell(_round(now)),
        Cell(
            "" if now.waited_seconds is None else formatting.duration(now.waited_seconds),
            "yellow" if late else "",
        ),
        Cell(str(len(now.stragglers)) if now.stragglers else ""),
        Cell(lock, "bold red" if " " in lock else ""),
        Cell(formatting.rate(now.steps_per_second)),
        Cell(formatting.rate(now.gradients_per_second)),
        Cell(_said(now.bytes_per_second)),
        Cell(formatting.rate(now.drops_per_second), "yellow" if now.drops_per_second else ""),
        Cell("" if now.attached_alive is None else str(now.attached_alive)),
        *([_state(now), _cause(now)] if both else [_cause(now) if now.stalls else _state(now)]),
    ]


def _state(now: Interval) -> Cell:
    return Cell(now.state, STATE_STYLES.get(now.state, "bold red"))


def _cause(now: Interval) -> Cell:
    return Cell(",".join(stall.kind for stall in now.stalls), "bold red")


def _said(per_second: float | None) -> str:
    return "-" if per_second is None else formatting.size(per_second)


def _round(now: Interval) -> str:
    if now.gradients is None:
        return ""
    if now.num_required is None:
        return f"{now.gradients}"
    bar = formatting.bar(now.gradients, now.num_required, _ROUND_BAR)
    return f"{bar} {now.gradients}/{now.num_required}"


def _details(course: Course, terminal: Terminal, room: int) -> Iterator[str]:
    now, seen = course.latest, course.seen
    yield ""
    state = _cause(now) if now.stalls else _state(now)
    yield f"{page.paint(Cell(now.name, 'bold'), terminal)}  {page.paint(state, terminal)}"
    if seen is None:
        yield "nothing to be seen of it"
        return
    yield from page.lines(Fields(_facts(now, seen, terminal.width or 0)), terminal)
    arrays = seen.summary.kind in {"arrays", "parameters"}
    kept_columns = _OF_ARRAYS if arrays else range(len(_PROCESS_COLUMNS))
    columns = [_PROCESS_COLUMNS[i] for i in kept_columns]
    cells = [_process_row(process, seen, now) for process in _in_order(seen, now)]
    rows = [[row[i] for i in kept_columns] for row in cells]
    room -= _HEAD_LINES + bool(now.stalls)
    # The processes matter more than the history.
    if room >= len(_LINES) + _LEAST_LINES and not arrays:
        room -= len(_LINES)
        for label, field, say in _LINES:
            yield _history(label, course.history(field), terminal, say)
    yield ""
    # Some events have their place beside many processes, all of them beside few.
    kept = min(_LEAST_EVENTS, len(seen.events)) + _EVENT_HEAD_LINES if seen.events else 0
    if room - kept < _LEAST_LINES:
        kept = 0
    shown = rows if len(rows) <= room - kept else rows[: max(1, room - kept - 1)]
    yield from page.lines(Table(columns, shown), terminal)
    if len(shown) < len(rows):
        yield f"… and {len(rows) - len(shown)} more"
        room -= 1
    left = room - len(shown) - _EVENT_HEAD_LINES
    if kept and left > 0:
        events = [event_row(Event.of(event), now.time) for event in reversed(seen.events)]
        yield ""
        yield from page.lines(Table(EVENT_COLUMNS, events[:left]), terminal)


def _facts(now: Interval, seen: Description, width: int) -> Iterator[tuple[str, Cell]]:
    if seen.summary.kind in {"arrays", "parameters"}:
        used = formatting.size(sum(member.bytes_used for member in seen.members))
        count = formatting.count_of(len(seen.members), "shared array")
        yield "kind", Cell(f"{count}, {used}")
    else:
        yield from _progress(now, seen, width)
    if now.stalls:
        yield "stands still", Cell(now.stalls[0].problem, "bold red")


def _progress(now: Interval, seen: Description, width: int) -> Iterator[tuple[str, Cell]]:
    yield "step", Cell(f"{now.step}{'  sealed' if seen.stats.sealed else ''}")
    line = [Taker.of(take, now.time) for take in seen.line]
    head = next((taker for taker in line if taker.alive), None)
    if head is None:
        yield "round", Cell(f"{formatting.count_of(now.gradients or 0, 'gradient')}; nobody waits")
    else:
        bar = formatting.bar(now.gradients or 0, head.num_required, max(4, min(30, width - 70)))
        behind = f", {len(line) - 1} more in the queue" if len(line) > 1 else ""
        waited = formatting.duration(head.waiting_seconds)
        text = f"{bar} {now.gradients} of {head.num_required}"
        pid = formatting.pid(head.pid, is_here=head.pid_is_here)
        yield "round", Cell(f"{text}  pid {pid} has waited for {waited}{behind}", "cyan")
    yield "lock", describe_lock(Lock.of(seen, now.time))


def _history(
    label: str, values: list[float | None], terminal: Terminal, say: Callable[[float], str]
) -> str:
    last = values[-1] if values else None
    value = "-" if last is None else say(last)
    style = "yellow" if label == "drops/s" and last else "green"
    room = max(10, (terminal.width or 0) - _LABEL - _VALUE - 2)
    return "".join(
        page.paint(cell, terminal)
        for cell in (
            Cell(f"{label:<{_LABEL}}", "cyan"),
            Cell(f"{value:>{_VALUE}}  ", "bold"),
            Cell(formatting.sparkline(values, room), style),
        )
    )


def _in_order(seen: Description, now: Interval) -> list[AttachedProcess]:
    behind = {
        (straggler.pid, straggler.pid_is_here): place
        for place, straggler in enumerate(now.stragglers)
    }
    return sorted(
        seen.processes,
        key=lambda process: (
            behind.get((process.pid, process.pid_is_here), len(behind)),
            not process.alive,
            process.pid,
        ),
    )


def _process_row(process: AttachedProcess, seen: Description, now: Interval) -> list[Cell]:
    pid = process.pid, process.pid_is_here
    straggler = next(
        (found for found in now.stragglers if (found.pid, found.pid_is_here) == pid), None
    )
    if not process.alive:
        this_round = Cell("dead", "yellow")
    elif applied_this_round(process, seen):
        this_round = Cell("applied", "green")
    elif straggler is not None and not straggler.applied:
        this_round = Cell("never", "dim")
    elif straggler is not None:
        late = "bold red" if straggler.seconds > _LONG_IDLE else "yellow"
        this_round = Cell(f"not yet: {formatting.duration(straggler.seconds)}", late)
    else:
        this_round = Cell("")
    halted = process.condition in {"stopped", "traced"}
    return [
        Cell(process.pid_label, "bold"),
        this_round,
        Cell(process.activity),
        Cell(process.condition, "bold red" if halted else ""),
        Cell(str(process.applied)),
        Cell(str(process.dropped), "yellow" if process.dropped else ""),
        Cell(str(process.taken)),
        Cell(formatting.printable(process.command), "dim"),
    ]
