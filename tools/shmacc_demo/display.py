"""How a run looks while it goes on: a live table in a terminal, lines of text elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from shmacc_demo.plan import Plan, Progress

_PAUSE = 0.1
"""Seconds between two pictures of the live table."""

_PACE = 1.0
"""Seconds between two lines of text."""


class Display:
    """Shows each step's progress, or rather as many of them as one can read."""

    def __init__(self, console: Console, plan: Plan, *, processes: bool) -> None:
        """Show on this console; `processes`: whether there are any to tell about."""
        self._console = console
        self._plan = plan
        self._processes = processes
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._recent: deque[float] = deque(maxlen=max(1, min(50, plan.steps // 10)))
        self._due = 0.0
        self._start: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress after a step."""
        self._recent.append(progress.loss)
        last = progress.step == self._plan.steps
        now = time.perf_counter()
        if self._start is None:  # only now: how long processes take to start is not the rate
            self._start = (now, progress.words)
        if not last and now < self._due:
            return
        if self._live is not None:
            self._due = now + _PAUSE
            self._live.update(self._picture(progress, now), refresh=True)
        else:
            self._due = now + _PACE
            fields = "  ".join(f"{name} {text}" for name, text in self._fields(progress, now))
            self._console.print(fields, highlight=False, soft_wrap=True)

    def _fields(self, progress: Progress, now: float) -> list[tuple[str, str]]:
        loss = sum(self._recent) / len(self._recent)
        since, words = self._start or (now, 0.0)
        rate = (progress.words - words) / max(now - since, 1e-9)
        fields = [
            ("step", f"{progress.step:,}/{self._plan.steps:,}"),
            ("loss", f"{loss:.3f}"),
            ("words/s", f"{rate:,.0f}"),
        ]
        if self._processes:
            fields += [
                ("applied", f"{progress.applied:,}"),
                ("dropped", f"{progress.dropped:,}"),
                ("workers alive", f"{progress.alive}/{self._plan.workers}"),
            ]
        if self._plan.kill:
            fields.append(("killed", f"{progress.killed}"))
        return fields

    def _picture(self, progress: Progress, now: float) -> Table:
        fields = self._fields(progress, now)
        table = Table()
        for name, text in fields:
            table.add_column(name, justify="right", min_width=len(text))
        table.add_row(*(text for _, text in fields))
        whole = Table.grid()
        whole.add_row(table)
        whole.add_row(ProgressBar(total=self._plan.steps, completed=progress.step, width=60))
        return whole
