"""Starts the processes of a run, watches them, starts again those that are killed, and ends all.

Each child leads a process group of its own (child.py). So a Ctrl-C in a terminal reaches only the
run's process, which passes it on once; and what a child has started is ended with it. A child that
has ended is reaped only after its group was killed: until then the kernel gives its number to no
other process.
"""

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from shmacc._run import child as child_side
from shmacc._run.child import Call
from shmacc.errors import WorkerDiedError

_PERIOD = 60.0  # seconds for which an end counts
# Seconds before a process is started again the first, second, ... time.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
# Seconds between two looks at the children. A sentinel does not tell of a child's end while a
# process lives that the child has started, since that inherited the sentinel's pipe.
_LOOK = 0.1

_log = logging.getLogger("shmacc")


class Limits(NamedTuple):
    """How often a process is started again, and how long the end waits; see `run`."""

    restarts: int
    after_failures: bool
    grace: float


class Interrupted(BaseException):
    """Ends the run when a signal has come."""


class _Child:
    """A process that makes a call, and those that take its place one after the other.

    Attributes:
        call: What it does.
        process: It runs; None: none does.
        due: When to start the next one (time.monotonic); None: not at all.
        finished: Whether one has returned.
        value: What it has returned.
        ends: When it was killed or failed, of the last `_PERIOD`.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.process: Any = None
        self.due: float | None = 0.0
        self.finished = False
        self.value: Any = None
        self.ends: deque[float] = deque()

    def start(self, context: Any, environment: dict[str, str]) -> None:
        """Start its process."""
        self.answer = child_side.Answer(os.memfd_create("shmacc run"))
        method = context.get_start_method()
        parent = None if method == "forkserver" else os.getpid()
        self.process = context.Process(
            target=child_side.main,
            name=str(self.call),
            args=(self.call, environment, parent, self.answer),
        )
        if method == "fork":  # a signal waits until the child has handlers of its own
            signal.pthread_sigmask(signal.SIG_BLOCK, tuple(child_side.handlers))
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, tuple(child_side.handlers))
        self.due = None

    def send(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.process is None or self.process.pid is None:
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it does not lead its group yet, or has ended
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def has_ended(self) -> bool:
        """Return whether its process has ended; then it is reaped, and its group killed."""
        try:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.send(signal.SIGKILL)
        except ChildProcessError:  # a forkserver's, or reaped: its number may be another's
            if self.process.exitcode is None:
                return False
        self.process.join()
        return True

    def count_end(self) -> int:
        """Return how often it has ended within `_PERIOD`, with this end."""
        now = time.monotonic()
        self.ends.append(now)
        while self.ends[0] < now - _PERIOD:
            self.ends.popleft()
        return len(self.ends)


class Run:
    """The processes of one run."""

    def __init__(
        self,
        calls: list[Call],
        context: Any,
        environment: dict[str, str],
        limits: Limits,
        signals: list[int],
    ) -> None:
        self._children = [_Child(call) for call in calls]
        self._context, self._environment = context, environment
        self._limits, self._signals = limits, signals
        self._memory_kills = _memory_kills()

    def result(self) -> Any:
        """Run all; return what the chief returns. Afterwards no process of it is left."""
        chief = self._children[0]
        try:
            self._watch(lambda: chief.finished)
            for child in self._children:
                child.due = None  # none is started again now
            self._watch(self._all_have_ended, self._limits.grace)
        finally:
            self._end()
        return chief.value

    def _all_have_ended(self) -> bool:
        return all(child.process is None for child in self._children)

    def _watch(self, over: Callable[[], bool], seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            if self._signals:
                raise Interrupted
            for child in self._children:
                if child.process is not None:
                    if child.has_ended():
                        self._judge(child)
                elif child.due is not None and time.monotonic() >= child.due:
                    child.start(self._context, self._environment)
            self._sleep()

    def _sleep(self) -> None:
        sentinels = [child.process.sentinel for child in self._children if child.process]
        connection.wait(sentinels, _LOOK)

    def _judge(self, child: _Child) -> None:
        """Let a child whose process has ended finish, or be started again; or end the run."""
        process, child.process = child.process, None
        answer = child.answer.read()
        value, error = answer or (None, None)
        if error is None and (answer or process.exitcode == 0):
            child.value, child.finished = value, True
            return
        killed = error is None and process.exitcode < 0
        may_start_again = killed or self._limits.after_failures
        if may_start_again and self._children[0].finished:
            return  # it is not needed any more
        what = f"{child.call} (pid {process.pid}) {self._told(process.exitcode, error)}"
        count = child.count_end()
        restarts = self._limits.restarts
        if count <= restarts and may_start_again:
            child.due = time.monotonic() + _PAUSES[min(count, len(_PAUSES)) - 1]
            _log.warning("%s, and is started again (%d of %d)", what, count, restarts)
            return
        if error is not None:
            raise error
        if killed:
            what += f"; it has ended {count} times within {_PERIOD:.0f} s, with restarts={restarts}"
        status = None if killed else SystemExit(process.exitcode)
        # The command ends with this status (command.py).
        raise WorkerDiedError(what).with_fields(pids=(process.pid,), reasons=(what,)) from status

    def _told(self, status: int, error: BaseException | None) -> str:
        if error is not None:
            return f"raised {type(error).__qualname__}: {error}"
        if status >= 0:
            return f"exited with status {status}"
        try:
            told = f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # most of the real-time signals have no name
            told = f"was killed by signal {-status}"
        before, self._memory_kills = self._memory_kills, _memory_kills()
        if self._memory_kills > before:
            told += " (its control group has counted a kill for want of memory)"
        return told

    def _end(self) -> None:
        """End all processes that are left: by the signal that came, by SIGTERM, by SIGKILL."""
        for number in (*self._signals[:1], signal.SIGTERM, signal.SIGKILL):
            for child in self._children:
                child.send(number)
            deadline = time.monotonic() + self._limits.grace
            while time.monotonic() < deadline or number == signal.SIGKILL:
                for child in self._children:
                    if child.process is not None and (
                        child.process.pid is None or child.has_ended()
                    ):
                        child.process = None
                        child.answer.close()
                if self._all_have_ended():
                    return
                # A second signal: do not wait longer, but go on to a harder one.
                if len(self._signals) > 1 and number != signal.SIGKILL:
                    break
                self._sleep()


def _memory_kills() -> int:
    """Return how many processes of this control group were killed for want of memory, ever."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                counts = Path(f"/sys/fs/cgroup{path}/memory.events")
            elif controllers == "memory":  # version 1
                counts = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
            else:
                continue
            for counted in counts.read_text(encoding="utf-8").splitlines():
                if counted.startswith("oom_kill "):
                    return int(counted.split()[1])
    return 0
