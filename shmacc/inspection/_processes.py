"""Reads about the processes of segments in ``/proc``.

The results explain; they prove nothing. Only the record lock that a process holds proves that it
lives (presence.hpp).
"""

import functools
import os

CONDITIONS = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
_CONDITION_FIELD = 0  # counted after the command's name in parentheses
_START_FIELD = 19


def condition(pid: int) -> str:
    """Return a process's state: "running", "stopped", ...; empty if it is not visible."""
    fields = _stat(pid)
    return CONDITIONS.get(fields[_CONDITION_FIELD], "?") if fields else ""


def command(pid: int) -> str:
    """Return its command line; empty if it is not visible."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_the_one(pid: int, start_ticks: int) -> bool:
    """Whether the process that has this pid now was started at these ticks."""
    fields = _stat(pid)
    return bool(fields) and int(fields[_START_FIELD]) == start_ticks


def started(start_ticks: int) -> float:
    """Return the time of a process's start, from field 22 of its stat."""
    return _boot_time() + start_ticks / os.sysconf("SC_CLK_TCK")


def others_are_visible() -> bool:
    """Whether this user may see other users' processes: a /proc mounted with hidepid hides them."""
    return os.access("/proc/1/stat", os.R_OK)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


@functools.cache
def _boot_time() -> float:
    with open("/proc/stat", encoding="utf-8") as stat:
        for line in stat:
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0
