"""Processes that block others: they hold the lock, or are stopped at the head of the queue."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe
from helpers.support import until

import shmacc
from shmacc._base import names
from shmacc._base.layout import ACTIVITY_NAMES
from shmacc._segment import removal


def hold_byte(path: str, byte: int, *, pipe: Pipe) -> None:
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, byte)
    pipe.turn("held")


@contextmanager
def held(name: str, byte: int = layout.lane_byte()) -> Iterator[Apart]:
    """Let a stopped process lock a byte (default: lane 0's) until it is killed or continued.

    The process is not within an operation. Other tests stop a process within an operation.
    """
    with Apart(hold_byte, names.segment_name(name).path, byte).ready() as holder:
        holder.signal(signal.SIGSTOP)
        yield holder


def _take(name: str, num_required: int, *, pipe: Pipe) -> Any:
    acc = shmacc.attach(name)
    pipe.say("waits")
    return acc.take(num_required).count


@contextmanager
def stopped_head(name: str, num_required: int) -> Iterator[Apart]:
    """Start a process whose take waits in the queue, and stop it there."""
    with Apart(_take, name, num_required).ready() as head:
        until(lambda: sleeps_in(name, head.pid, "waits in the queue"))
        head.signal(signal.SIGSTOP)
        yield head


def sleeps_in(name: str, pid: int, doing: str) -> bool:
    """Whether the process sleeps in this wait, and so does not hold the lock.

    Its activity alone does not show this: a process still holds the lock when it joins the queue.
    """
    return activity(name, pid) == doing and sleeps(pid)


def sleeps(pid: int) -> bool:
    stats = [stat.read_text(encoding="utf-8") for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def activity(name: str, pid: int) -> str:
    """Return what an attached process is doing."""
    return next((what for own, what in activities(name) if own == pid), "not attached")


def activities(name: str) -> list[tuple[int, str]]:
    """Return the pid of each attached process, and what it is doing."""
    with closing(removal.view(names.segment_name(name))) as view:
        return [
            (process["pid"], ACTIVITY_NAMES[process["activity"]])
            for process in view.participants()
            if process["alive"]
        ]
