"""Formats numbers, times and names, and parses durations."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNT_UNITS: Final = ("", "k", "M", "G", "T", "P", "E")
_STEP: Final = 1024
_THOUSAND: Final = 1000
_TEN: Final = 10
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.ASCII)
_MINUTE: Final = 60
_LONG_IN_SECONDS: Final = 120
_SPARKS: Final = "▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    """Return a number of bytes in the unit that needs few digits: `2.4 MiB`."""
    value, unit = float(count), 0
    while value >= _STEP - 0.5 and unit < len(_BYTE_UNITS) - 1:
        value /= _STEP
        unit += 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def amount(count: float) -> str:
    """Return a count that may be large, in few digits: `1234567` is `1.23M`."""
    value, unit = float(count), 0
    while abs(value) >= _THOUSAND - 0.5 and unit < len(_COUNT_UNITS) - 1:
        value /= _THOUSAND
        unit += 1
    if unit == 0:
        return f"{value:.0f}"
    return f"{value:.3g}{_COUNT_UNITS[unit]}"


def rate(per_second: float | None) -> str:
    """Return a rate per second: `12`, `3.4`, `1.2k`; `-` if it is not known yet."""
    if per_second is None:
        return "-"
    if 0 < per_second < _TEN:
        return f"{per_second:.1f}"
    return amount(per_second)


def size_rate(per_second: float | None) -> str:
    """Return bytes per second; `-` if that is not known yet."""
    return "-" if per_second is None else size(per_second)


def duration(seconds: float) -> str:
    """Return a length of time in one or two units: `3.2 s`, `5 min`, `2 h 10 min`, `3 d 4 h`."""
    seconds = max(seconds, 0.0)
    if seconds < _LONG_IN_SECONDS:
        return f"{seconds:.1f} s" if seconds < _MINUTE else f"{seconds:.0f} s"
    minutes = int(seconds // _MINUTE)
    if minutes < _SECONDS["h"] // _MINUTE:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, _MINUTE)
    if hours < _SECONDS["d"] // _SECONDS["h"]:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def ago(moment: float | None, now: float) -> str:
    """Return how long ago a moment was; `never` for None."""
    return "never" if moment is None else f"{duration(now - moment)} ago"


def date(moment: float) -> str:
    """Return a moment, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h` or `3d`.

    Raises:
        ValueError: The text is no length of time.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a length of time, such as 90, 90s, 10m, 2h or 3d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def shape(dims: Sequence[int | None] | None) -> str:
    """Return a shape as TensorFlow writes it; `<unknown>` for an unknown rank."""
    if dims is None:
        return "<unknown>"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in dims) + "]"


def known(value: int | None) -> str:
    """Return a number, or nothing for None."""
    return "" if value is None else str(value)


def percent(part: float, whole: float) -> str:
    """Return a part of a whole in percent; `-` if the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def count_of(how_many: int, what: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 segment`, `2 segments`."""
    return f"{how_many} {what if how_many == 1 else plural or what + 's'}"


def printable(text: str) -> str:
    """Replace control characters: a command line may contain any."""
    return "".join(char if char.isprintable() else "?" for char in text)


def shorten(text: str, width: int) -> str:
    """Cut to at most `width` characters, in the middle, since names differ at both ends."""
    if len(text) <= width:
        return text
    keep = max(width - 1, 0)
    tail = keep // 2
    return text[: keep - tail] + "…" + (text[-tail:] if tail else "")


def bar(part: float, whole: float, width: int) -> str:
    """Return progress as a bar."""
    filled = 0 if whole <= 0 else min(width, int(width * part / whole))
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Iterable[float | None], width: int) -> str:
    """Return the last `width` values as a row of bars, scaled to the highest value."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    top = max(known, default=0.0)
    if top <= 0:
        return "".join(" " if value is None else _SPARKS[0] for value in shown)
    last = len(_SPARKS) - 1
    return "".join(
        " " if value is None else _SPARKS[min(last, math.ceil(value / top * last))]
        for value in shown
    )
