"""Wording for findings and remedies, and shell commands."""

import shlex
from collections.abc import Iterable


def command(*words: str) -> str:
    """Return a command as it can be pasted into a shell."""
    return shlex.join(words)


def memory(count: int) -> str:
    """Return bytes of memory in the unit that leaves few digits: "2.4 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:  # noqa: PLR2004  the next unit from where it is rounded
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def pids(labels: Iterable[str]) -> str:
    """Return pids as the subject of a sentence: "pid 7", "pids 7, 9"."""
    found = list(labels)
    return f"{'pid' if len(found) == 1 else 'pids'} {', '.join(found)}"


def goes_on(labels: list[str], condition: str) -> tuple[str, str | None]:
    """Return what to do about processes that are stopped or traced: in words, and as a command.

    A label with a star is of another pid namespace.
    """
    if condition == "traced":
        return "let the debugger go on", None
    if any(label.endswith("*") for label in labels):
        return "in its pid namespace: kill -CONT", None
    it = "it" if len(labels) == 1 else "them"
    return f"let {it} go on, or end {it}: an unfinished operation is undone", command(
        "kill", "-CONT", *labels
    )
