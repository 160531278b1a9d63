"""`watch`: show segments live."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import failures, formatting, interrupts, naming, page, progress
from shmacc_inspect.output import to_json
from shmacc_inspect.sorting import SORTS
from shmacc_inspect.verbs.list import causes

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_inspect.output import Interval
    from shmacc_inspect.progress import Watch
    from shmacc_inspect.screen import Screen

_SHOWN_STRAGGLERS: Final = 4
_REST: Final = 1.5  # the next look waits at least 1.5 times as long as the last took


def run(
    *, names: list[str], interval: float, count: int | None, sort: str, everywhere: bool, json: bool
) -> None:
    """Run the verb."""
    watched = progress.Watch(names, everywhere=everywhere)
    signal.signal(signal.SIGTERM, interrupts.end)  # so that the terminal is restored
    if page.is_terminal() and not json:
        from shmacc_inspect.screen import Screen

        _draw(Screen(watched, interval, sort), watched, interval, count)
    else:
        _print(watched, interval, count, json=json, key=SORTS[sort])


def _print(
    watched: Watch,
    interval: float,
    count: int | None,
    *,
    json: bool,
    key: Callable[[Interval], Any],
) -> None:
    watched.look()
    due, done = time.monotonic(), 0
    while count is None or done < count:
        time.sleep(max(0.0, due + interval - time.monotonic()))
        due = max(due + interval, time.monotonic())
        for seen in sorted(watched.look(), key=key):
            print(to_json(seen, in_one_line=True) if json else line(seen))
        sys.stdout.flush()
        done += 1
        due = max(due, _rested(due) - interval)


def _rested(began: float) -> float:
    """Return when the next look may begin, after a look that began at `began` and ends now.

    A look at very many segments takes long, and looks may use at most 40 % of a core.
    """
    ended = time.monotonic()
    return ended + _REST * (ended - began)


def line(seen: Interval) -> str:
    """Return an interval as a line of text."""
    start = (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(seen.time))} {naming.word(seen.name)}"
    )
    if seen.summary is None or seen.summary.global_step is None or seen.stats is None:
        return f"{start} state={seen.state.replace(' ', '-')}"
    behind = [
        f"{process.pid_label}:{seen.time - progress.idle_since(process):.1f}s"
        if process.applied
        else f"{process.pid_label}:never"
        for process in seen.stragglers[:_SHOWN_STRAGGLERS]
    ]
    more = len(seen.stragglers) - len(behind)
    parts = {
        "step": seen.summary.global_step,
        "gradients": seen.summary.num_accumulated,
        "steps/s": formatting.rate(seen.steps_per_second),
        "gradients/s": formatting.rate(seen.gradients_per_second),
        "bytes/s": formatting.size_rate(seen.bytes_per_second).replace(" ", ""),
        "drops/s": formatting.rate(seen.drops_per_second),
        "waiting": seen.stats.waiting,
        "alive": seen.summary.attached_alive,
        "behind": ",".join([*behind, *([f"+{more}"] if more else [])]) or "-",
    }
    if seen.head is not None:
        parts["gradients"] = f"{parts['gradients']}/{seen.head.num_required}"
        parts["waited"] = f"{seen.waited:.1f}s"
    if seen.lock_holder:
        parts["lock"] = seen.lock_holder
    if seen.events:
        parts["events"] = ",".join(f"{event.kind}:{event.pid_label}" for event in seen.events)
    if cause := causes(seen).text:
        parts["stall"] = cause
    return " ".join([start, *(f"{key}={value}" for key, value in parts.items())])


def _draw(screen: Screen, watched: Watch, interval: float, count: int | None) -> None:
    from shmacc_inspect import live  # late: only a terminal needs it

    due, looks = time.monotonic(), 0
    with interrupts.raised(), live.Keys() as keyboard, live.Picture() as picture:
        while True:
            began = time.monotonic()
            if began >= due:
                if count is not None and looks > count:
                    return
                watched.look()
                looks += 1
                due = max(due + interval, _rested(began))
            picture.draw(screen.draw(*picture.terminal()))
            key = keyboard.wait(due)
            if key == live.SUSPEND:
                picture.leave()
                keyboard.rest()
                os.kill(os.getpid(), signal.SIGSTOP)
                keyboard.listen()
                picture.enter()
            elif key is not None and screen.press(key):
                failures.end(failures.FINE)
