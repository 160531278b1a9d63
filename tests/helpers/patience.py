"""Fails a test if a wait of the library lasts too long: a process watches the test's segments.

The watching process finds the waits by `shmacc.inspection`, in all processes of the test, however
they were started. The waits themselves need no timeouts. The test fails at once, with an error that
names the waiting process, what it waits for, and the counters. A test whose waits may last longer
says how many seconds: ``@pytest.mark.patience(60)``.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, Self

from shmacc import inspection
from shmacc._base import names
from shmacc._base.layout import UNDER_THE_LOCK, Activity
from shmacc.errors import ShmaccError

_PERIOD: Final = 0.5
_TOO_LONG: Final = signal.SIGRTMIN + 3
_NO_WAITS: Final = UNDER_THE_LOCK | {Activity.IDLE, Activity.UPDATES, Activity.WAITS_IN_QUEUE}


class Watchdog:
    """Starts the watching process, and handles the signal by which it fails a test."""

    def __enter__(self) -> Self:
        self._before = signal.signal(_TOO_LONG, self._fail)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        signal.signal(_TOO_LONG, self._before)

    def watch(self, namespace: str, seconds: float) -> None:
        """From now on watch this namespace; ``""``: no namespace."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([namespace, seconds])}\n".encode())
        self._process.stdin.flush()

    def _fail(self, _signal: int, _frame: FrameType | None) -> None:
        assert self._process.stdout is not None
        namespace, waits = json.loads(self._process.stdout.readline())
        if namespace == os.environ.get(names.NAMESPACE_VARIABLE):  # else the watched test has ended
            raise AssertionError(f"a wait lasts too long: {waits}")


def waits_longer_than(seconds: float, namespace: str) -> Iterator[str]:
    """Describe each wait that has lasted longer than this, with the segment's counters."""
    for name in inspection.list_names(namespace=namespace):
        with contextlib.suppress(ShmaccError):  # the segment is gone, or damaged on purpose
            yield from _of_segment(inspection.describe(name.system_name), time.time() - seconds)


def _of_segment(seen: inspection.Description, until: float) -> Iterator[str]:
    stats = seen.stats
    counters = (
        f"{stats.applied} applied, {stats.dropped} dropped, "
        f"{stats.num_accumulated} pending, step {stats.global_step}"
    )
    takes = {
        take.entry: f"for {take.num_required} gradients"
        for take in seen.queue
        if take.alive and take.since < until
    }
    for process in seen.processes:
        what = takes.get(process.entry, "")
        if process.activity not in _NO_WAITS and process.last_seen < until:
            what = process.activity.removeprefix("waits ")
        if what and process.alive and process.condition != "stopped":
            yield f"pid {process.pid} waits {what} in {seen.summary.name.shared_name}: {counters}"


def main(watched: int) -> None:
    """Watch the namespace that standard input named last, until standard input is closed."""
    namespace, seconds, began, text = "", 0.0, 0.0, b""
    while True:
        if select.select([0], [], [], _PERIOD)[0]:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            if lines:
                (namespace, seconds), began = json.loads(lines[-1]), time.monotonic()
        elif namespace and time.monotonic() - began > seconds:
            waits = "; ".join(waits_longer_than(seconds, namespace))
            if waits:
                os.write(1, json.dumps([namespace, waits]).encode() + b"\n")
                os.kill(watched, _TOO_LONG)
                namespace = ""


if __name__ == "__main__":
    main(int(sys.argv[1]))
