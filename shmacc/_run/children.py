"""Watches the processes of a run, restarts those that are killed, and ends all of them.

Other code may reap the children: a launcher may let the process that calls `run` ignore SIGCHLD, or
a handler or thread of the program may wait for any child. So a pidfd tells that a child has ended,
and the child's answer tells the outcome. The exit status is asked for, too, but may be lost.

A child leads its own process group, and the whole group is ended with the child. The kernel does
not reuse a group's number while the group has a member, or while its leader is not reaped.
"""

import contextlib
import errno
import logging
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

from shmacc._run import cleaner
from shmacc._run.child import Answer, Call, Surroundings, result_of, was_raised
from shmacc._run.namespaces import Surrounded
from shmacc._run.record import State
from shmacc._run.signals import CallersSignals, masked
from shmacc._run.spawning import Starter
from shmacc.errors import WorkerDiedError

_PERIOD = 60.0  # seconds for which an end counts, and for which a failing start is retried
# Seconds before a process is started again the first, second, ... time.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
_LOOK = 0.1  # seconds between two looks at signals, and at children without a pidfd
_KILLED = 10.0  # seconds; a killed process that lives longer hangs in the kernel
_REPORT = 1.0  # seconds within which a forkserver reports the status of an ended child
_TRACED = 5.0  # seconds within which a tracer (a debugger, strace) waits for an ended child
_LOOKED_AT = os.WEXITED | os.WNOWAIT | os.WNOHANG
_LOST = 255  # multiprocessing's status of a child whose forkserver has ended
_WANTS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_log = logging.getLogger("shmacc")


class Limits(NamedTuple):
    """How often a process may be restarted, and how long the run's end may take; see `run`."""

    restarts: int
    after_failures: bool
    grace: float


class Interrupted(BaseException):
    """A signal has asked for the end of the run."""


class _Process:
    """One process of a child; a child that is restarted has several, one after the other."""

    def __init__(self, starter: Starter, call: Call, surroundings: Surroundings) -> None:
        self._by_forkserver = starter.by_forkserver
        with contextlib.ExitStack() as undo:
            self.answer = Answer(os.memfd_create("shmacc run"))
            undo.callback(self.answer.close)
            self._process = starter.start(call, surroundings, self.answer)
            undo.pop_all()
        self.pid: int = self._process.pid
        self._started = 0
        self.descriptor: int | None = None
        # This fails if the process has ended, the kernel has no pidfds, or no descriptor is free.
        with suppress(OSError):
            self._started = cleaner.started(self.pid)[1]
            self.descriptor = os.pidfd_open(self.pid)

    def lives(self) -> bool:
        if self.descriptor is not None:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            return not poll.poll(0)
        try:
            with suppress(ChildProcessError):  # a forkserver's child, or reaped by other code
                return os.waitid(os.P_PID, self.pid, _LOOKED_AT) is None
            state, ticks = cleaner.started(self.pid)
        except OSError:  # no descriptor is free: look again later
            return True
        return state not in "XZ" and self._started in {0, ticks}

    def send(self, number: int) -> None:
        """Send a signal to the process and its group, while the process lives."""
        if self.lives():
            outside = True  # it does not lead its group yet, or has left it for another one
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
                outside = os.getpgid(self.pid) != self.pid
            if outside:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for this signal."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_bytes().splitlines():
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def collect(self) -> int | None:
        """Kill the ended process's group; return the process's status, or None if lost."""
        status: int | None = None
        try:
            end, deadline = os.waitid(os.P_PID, self.pid, _LOOKED_AT), time.monotonic() + _TRACED
            cleaner.kill_group(self.pid)
            while end is None and time.monotonic() < deadline:  # a tracer waits for it first
                time.sleep(_LOOK / 10)
                end = os.waitid(os.P_PID, self.pid, _LOOKED_AT)
            if end is not None:
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                os.waitid(os.P_PID, self.pid, os.WEXITED)
        except ChildProcessError:  # a forkserver's child, or reaped by other code
            if self._by_forkserver and connection.wait([self._process.sentinel], _REPORT):
                with suppress(OSError, EOFError):  # the forkserver has ended
                    status = forkserver.read_signed(self._process.sentinel)
            # If a process has this pid now, it is new: the number was free, so the group is gone.
            if not os.path.exists(f"/proc/{self.pid}"):
                cleaner.kill_group(self.pid)
        return status

    def close(self, status: int | None) -> None:
        """Close the descriptors that `run`'s process holds for this ended process."""
        popen = self._process._popen  # noqa: SLF001  else multiprocessing asks for the status
        popen.returncode = _LOST if status is None else status
        self._process.close()
        self.answer.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


class _Child:
    """A call, and the processes that make it one after the other; see `Call`.

    Attributes:
        call: The call.
        process: The running process; None if none runs.
        due: When to start the next process (time.monotonic); None: never.
        finished: Whether a process has returned from the call.
        result: The value that the call has returned.
        ends: When processes were killed or failed, within the last `_PERIOD`.
        wanting: Since when starts have failed for lack of a resource; None if they do not.
    """

    def __init__(self, call: Call, surroundings: Surroundings) -> None:
        self.call, self.surroundings = call, surroundings
        self.process: _Process | None = None
        self.due: float | None = 0.0
        self.finished = False
        self.result: Any = None
        self.ends: deque[float] = deque()
        self.wanting: float | None = None

    def send(self, number: int) -> None:
        """Send a signal to the child's process group."""
        if self.process is not None:
            self.process.send(number)

    def send_if_handled(self, number: int) -> bool:
        """Send a signal to the child's process if it handles the signal; return whether it does."""
        process = self.process
        if process is None or not process.lives() or not process.handles(number):
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
        return True


def count_end(ends: deque[float]) -> int:
    """Add an end at this moment; return how many ends there were within `_PERIOD`."""
    now = time.monotonic()
    ends.append(now)
    while ends[0] < now - _PERIOD:
        ends.popleft()
    return len(ends)


def too_often(count: int, restarts: int) -> str:
    """Return the part of a message that says why a process is not restarted."""
    return f"; it has ended {count} times within {_PERIOD:.0f} s, with restarts={restarts}"


class Run:
    """The processes of one run.

    Attributes:
        raised: The exception of a child, which `result` raises again.
    """

    def __init__(
        self,
        children: list[tuple[Call, Surroundings]],
        starter: Starter,
        limits: Limits,
        signals: CallersSignals,
        surrounded: Surrounded,
        ended: Callable[[Call], None],
    ) -> None:
        self._ended = ended
        self._children = [_Child(*each) for each in children]
        self._starter, self._limits, self._signals = starter, limits, signals
        self._cleaner, self._record = surrounded.cleaner, surrounded.record
        self._memory_kills = _memory_kills()
        self._groups: set[int] = set()
        self.raised: BaseException | None = None

    def result(self) -> Any:
        """Run all children; return the chief's result. Afterwards no process of the run is left.

        Raises:
            Interrupted: A signal has ended the run.
        """
        chief = self._children[0]
        try:
            self._watch(lambda: chief.finished)
            for child in self._children:
                child.due = None  # from now on, no child is restarted
            self._watch(self._all_have_ended, self._limits.grace)
        finally:
            self._end()
        return chief.result

    def _all_have_ended(self) -> bool:
        return all(child.process is None for child in self._children)

    def _watch(self, over: Callable[[], bool], seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            self._signals.act(self._children)
            if self._signals.over:
                raise Interrupted
            for child in self._children:
                if child.process is not None:
                    if not child.process.lives():
                        self._judge(child, child.process)
                elif child.due is not None and time.monotonic() >= child.due:
                    self._start(child)
            self._sleep()

    def _sleep(self) -> None:
        """Wait until a child ends, but at most `_LOOK` seconds."""
        poll = select.poll()
        for child in self._children:
            if child.process is not None and child.process.descriptor is not None:
                poll.register(child.process.descriptor, select.POLLIN)
        poll.poll(1000 * _LOOK)
        self._reap()

    def _reap(self) -> None:
        """Reap descendants of ended children, if this process has inherited them (as pid 1)."""
        for group in tuple(self._groups):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._groups.discard(group)

    def _start(self, child: _Child) -> None:
        try:
            child.process = _Process(self._starter, child.call, child.surroundings)
        except (OSError, EOFError, MemoryError) as error:  # EOFError: a forkserver could not fork
            passing = not isinstance(error, OSError) or error.errno in _WANTS
            now = time.monotonic()
            if not child.ends or not passing or now > (child.wanting or now) + _PERIOD:
                raise
            if child.wanting is None:
                _log.warning("%s cannot be started again yet: %s", child.call, error)
                child.wanting = now
            child.due = now + _PAUSES[1]
            return
        child.due, child.wanting = None, None
        self._note(child, State.RUNNING)
        self._cleaner.note_started(child.process.pid)
        _log.info("%s has started (pid %d)", child.call, child.process.pid)

    def _note(self, child: _Child, state: State) -> None:
        self._record.note(
            self._children.index(child),
            state,
            pid=child.process.pid if child.process else 0,
            ends=len(child.ends),
            due=None if child.due is None else child.due - time.monotonic(),
        )

    def _let_go(
        self, child: _Child, process: _Process
    ) -> tuple[int | None, tuple[Any, ...] | None]:
        """Close a child's ended process; return its status and outcome."""
        status = process.collect()
        outcome = process.answer.read()
        process.close(status)
        child.process = None
        self._note(child, State.ENDED)
        self._groups.add(process.pid)
        self._cleaner.note_ended(process.pid)
        self._ended(child.call)
        return status, outcome

    def _judge(self, child: _Child, process: _Process) -> None:
        """Decide what a process's end means: its child has finished, restarts, or ends the run."""
        status, outcome = self._let_go(child, process)
        who = f"{child.call} (pid {process.pid})"
        error: BaseException | None = None
        if outcome is not None:
            with masked(signal.SIG_SETMASK, self._signals.mask):  # unpickling may start processes
                if outcome[0] == "raised":
                    error = was_raised(who, *outcome[1:])
                else:
                    child.result, child.finished = result_of(outcome[1]), True
        elif status == 0 and (child.call.rank >= 0 or not child.call.answers):
            child.finished = True
        if child.finished:
            self._note(child, State.FINISHED)
            _log.info("%s has finished", who)
            return
        killed = error is None and (status is None or status < 0)
        may_start_again = killed or self._limits.after_failures
        if may_start_again and self._children[0].finished:
            return  # the chief has finished: the child is not needed any more
        what = f"{who} {self._told(status, outcome)}"
        count = count_end(child.ends)
        restarts = self._limits.restarts
        if count <= restarts and may_start_again:
            child.due = time.monotonic() + _PAUSES[min(count, len(_PAUSES)) - 1]
            self._note(child, State.DUE)
            again = "%s, and is started again (%d of %d)"
            _log.warning(again, what, count, restarts, exc_info=error)
            return
        if error is not None:
            self.raised = error
            raise error
        if killed:
            what += too_often(count, restarts)
        # `shmacc-run` exits with the same status (command.py).
        cause = None if killed else SystemExit(status)
        raise WorkerDiedError(what).with_fields(pids=(process.pid,), reasons=(what,)) from cause

    def _told(self, status: int | None, outcome: tuple[Any, ...] | None) -> str:
        if outcome is not None:
            return f"raised {outcome[1]}"
        if status is None:
            return "has ended, and its status is lost, by its forkserver's end or to another reaper"
        if status >= 0:
            return f"exited with status {status}" + (" and without a result" if not status else "")
        try:
            told = f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # most of the real-time signals have no name
            told = f"was killed by signal {-status}"
        before, self._memory_kills = self._memory_kills, _memory_kills()
        if self._memory_kills > before:
            told += " (its control group has counted a kill for want of memory)"
        return told

    def _end(self) -> None:
        """End the remaining processes: by the signal that came (if any), SIGTERM, then SIGKILL."""
        first = (self._signals.ended_by,) if self._signals.ended_by else ()
        for number in (*first, signal.SIGTERM, signal.SIGKILL):
            for child in self._children:
                child.send(number)
                child.send(signal.SIGCONT)  # a stopped process would not act on the signal
            last = number == signal.SIGKILL
            deadline = time.monotonic() + (_KILLED if last else self._limits.grace)
            while time.monotonic() < deadline:
                for child in self._children:
                    if child.process is not None and not child.process.lives():
                        self._let_go(child, child.process)
                if self._all_have_ended():
                    while self._groups and time.monotonic() < deadline:
                        self._reap()
                    return
                self._signals.act(self._children)
                if self._signals.in_haste and not last:
                    break
                self._sleep()
        left = [child.process.pid for child in self._children if child.process is not None]
        _log.error("The kernel does not end these processes, which were killed: %s", left)


def _memory_kills() -> int:
    """Return how many processes of this control group were ever killed for lack of memory."""
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
