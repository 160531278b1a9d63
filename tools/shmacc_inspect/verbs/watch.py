"""`watch`: see it live."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shmacc_inspect import failures, formatting, options, page

if TYPE_CHECKING:
    from shmacc_inspect.output.intervals import Interval
    from shmacc_inspect.progress import Watch

EPILOG: Final = """\b
Examples:
  shmacc-inspect watch
  shmacc-inspect watch embeddings --interval 0.5
  shmacc-inspect watch embeddings --interval 10 --count 6 >> progress.log
  shmacc-inspect watch --json | jq 'select(.stragglers != [])'
\b
Keys: q quit; up, down, j, k, 1-9 pick a segment."""

_SHORTEST: Final = 0.05
_SHOWN_STRAGGLERS: Final = 4


def run(
    name: options.OptionalName = None,
    *,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often to look.", min=_SHORTEST)
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(help="End after so many intervals.", min=1, show_default=False),
    ] = None,
    everywhere: options.AllNamespaces = False,
    json: options.Json = False,
) -> None:
    """Watch segments live: progress, rates, drops, and stragglers.

    On a terminal, a screen with the rounds' progress towards what the waiting take requires, steps,
    gradients and bytes a second, and the processes that have not applied in this round. In a pipe,
    one line per interval and segment. A NAME that is removed is waited for.
    """
    from shmacc import inspection  # late: see the package
    from shmacc_inspect import naming, progress

    wanted = None if name is None else inspection.resolve(naming.find(name).name.system_name)
    watched = progress.Watch(wanted, options.namespace(everywhere=everywhere))
    signal.signal(signal.SIGTERM, _end)
    if page.is_terminal() and not json:
        _draw(watched, interval, count)
    else:
        _print(watched, interval, count, json=json)


def _end(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)  # so that the terminal is left in order


def _print(watched: Watch, interval: float, count: int | None, *, json: bool) -> None:
    from shmacc_inspect.output import to_json  # late: see the package

    watched.look()
    due, done = time.monotonic(), 0
    while count is None or done < count:
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        for seen in watched.look():
            print(to_json(seen, in_one_line=True) if json else line(seen))
        sys.stdout.flush()
        done += 1


def line(seen: Interval) -> str:
    """Return an interval as one line."""
    start = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(seen.time))} {seen.name}"
    if seen.step is None:
        return f"{start} state={seen.state.replace(' ', '-')}"
    required = "" if seen.num_required is None else f"/{seen.num_required}"
    behind = [
        formatting.pid(straggler.pid, is_here=straggler.pid_is_here)
        + (f":{straggler.seconds:.1f}s" if straggler.applied else ":never")
        for straggler in seen.stragglers[:_SHOWN_STRAGGLERS]
    ]
    more = len(seen.stragglers) - len(behind)
    parts = {
        "step": str(seen.step),
        "gradients": f"{seen.gradients}{required}",
        "steps/s": formatting.rate(seen.steps_per_second),
        "gradients/s": formatting.rate(seen.gradients_per_second),
        "bytes/s": "-"
        if seen.bytes_per_second is None
        else formatting.size(seen.bytes_per_second).replace(" ", ""),
        "drops/s": formatting.rate(seen.drops_per_second),
        "waiting": str(seen.waiting),
        "alive": str(seen.attached_alive),
        "behind": ",".join([*behind, *([f"+{more}"] if more else [])]) or "-",
    }
    if seen.lock_holder_pid is not None:
        parts["lock"] = formatting.pid(
            seen.lock_holder_pid, is_here=bool(seen.lock_holder_pid_is_here)
        )
    if seen.stalls:
        parts["stall"] = ",".join(stall.kind for stall in seen.stalls)
    return " ".join([start, *(f"{key}={value}" for key, value in parts.items())])


def _draw(watched: Watch, interval: float, count: int | None) -> None:
    from rich.console import Console  # late: slow to import
    from rich.live import Live
    from rich.text import Text

    from shmacc_inspect import keys
    from shmacc_inspect.screen import Screen

    screen, console = Screen(watched, interval), Console(highlight=False, emoji=False)
    due, looks = time.monotonic(), 0
    with (
        keys.Keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
    ):
        while True:
            if time.monotonic() >= due:
                if count is not None and looks > count:
                    return
                watched.look()
                looks += 1
                due = max(due + interval, time.monotonic())
            lines = screen.draw(
                page.Terminal(console.width, colour=not console.no_color), console.height
            )
            text = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")
            live.update(text, refresh=True)
            key = keyboard.wait(due)
            if key == keys.SUSPEND:
                live.stop()
                keyboard.rest()
                os.kill(os.getpid(), signal.SIGSTOP)
                keyboard.listen()
                live.start()
            elif key is not None and screen.press(key):
                failures.end(failures.FINE)
