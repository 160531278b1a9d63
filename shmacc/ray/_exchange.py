"""The messages of `run` over hosts: what its caller wants of a node, and what the node reports.

The caller keeps sending everything that it wants, and each answer contains the node's whole state.
No call depends on an earlier one: a call may be lost, overtake others, or reach a supervisor that
Ray has restarted meanwhile. Answers contain all output that the caller has not yet seen.
"""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any, NamedTuple

import ray

from shmacc._run import carried
from shmacc._run.child import Call
from shmacc._run.children import Limits
from shmacc._run.record import Called

_PARKED = 1.0  # seconds that a call waits for something to report
_PASSED = 10.0  # seconds for the run to pass a signal on
_KEPT = 1 << 20  # bytes of output kept for the caller; processes that write more must wait


class Plan(NamedTuple):
    """The part of a run's arguments that the supervisor on each node needs."""

    chief: bytes  # a function and its arguments, pickled by value
    worker: bytes | None
    workers: int  # how many there are on each node
    answers: bool  # whether processes return results; programs do not
    context: str
    limits: Limits
    threads: Any  # as for `shmacc.run`
    output: str | None  # `log_dir` of `shmacc.run`; None: output goes to the caller
    called: Called

    def calls(self, first: int) -> list[Call]:
        """Return what to run on a node: a chief, and workers with ranks from `first` on."""
        calls = [Call("chief", -1, carried.call, (self.chief,), self.answers)]
        for rank in range(first, first + self.workers):
            args = (self.worker, rank) if self.answers else (self.worker,)
            calls.append(Call("worker", rank, carried.call, args, self.answers))
        return calls


class Wanted(NamedTuple):
    """What the caller wants of a node. Every message contains all of it."""

    turn: int = 0  # grows with each change
    first: int = 0  # the rank of the node's first worker
    finished: frozenset[int] = frozenset()  # workers that have returned, and must not start again
    leads: bool = False  # whether the chief must run on this node
    led: bool = False  # whether the chief has returned, on any node: workers may return
    ended_by: int = 0  # a signal that must end all processes; 0: none
    leaves: bool = False  # whether the node must let go of the run's names
    removes: bool | None = None  # whether it must then remove them; None: if it had none before


class Phase(IntEnum):
    """The phase of the run that a node has reached."""

    NEW = 0
    READY = 1  # the node has the run's names, and starts processes
    IDLE = 2  # the processes have ended
    GONE = 3  # the node has let go of the names


class Found(NamedTuple):
    """The state of a node, as its supervisor reports it."""

    born: int  # when its supervisor was started (time.monotonic_ns); Ray may restart it
    number: int  # grows with each change, even after a restart of the supervisor
    phase: Phase = Phase.NEW
    finished: frozenset[int] = frozenset()  # the ranks of workers that have returned
    result: bytes | None = None  # what the chief has returned there, pickled
    raised: tuple[str, bytes, int | None] | None = None
    """What ended the run there: the last line, the pickled exception, a program's exit status."""
    lines: tuple[tuple[int, int, bytes], ...] = ()
    """Output: its number; 1 for standard output, 2 for error, else a log level; the text."""


class Exchange:
    """The supervisor's side of the messages. Its run (children.py) uses it as `CallersSignals`."""

    def __init__(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.plan: Plan | None = None
        now = time.monotonic_ns()
        self.found = Found(born=now, number=now)
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0  # the size of the text in `_lines`
        self._signals: deque[tuple[int, Future[bool]]] = deque()
        self.wanted = Wanted()
        self.want(self.wanted)

    def exchange(self, wanted: Wanted, seen: int, plan: Plan | None) -> Found:
        """Accept what the caller wants; wait briefly for a state newer than `seen`; return it."""
        with self._changed:
            self.plan = self.plan or plan
            while self._lines and self._lines[0][0] <= seen:
                self._bytes -= len(self._lines.popleft()[2])
            self.want(wanted)
            self.wait_until(lambda: self.found.number > seen, _PARKED)
            return self.found._replace(lines=tuple(self._lines))

    def want(self, wanted: Wanted) -> None:
        """Accept what the caller wants; ignore a message older than the last one."""
        with self._changed:
            if wanted.turn >= self.wanted.turn:
                self.wanted, self.ended_by = wanted, wanted.ended_by
                self.over, self.in_haste = self.ended_by != 0, self.ended_by == signal.SIGKILL
            self._changed.notify_all()

    def note(self, **found: Any) -> None:
        """Note a change of the node's state, and wake calls that wait for one."""
        with self._changed:
            self.found = self.found._replace(number=self.found.number + 1, **found)
            self._changed.notify_all()

    def wait_until(self, over: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until `over()` is true, or `seconds` have passed; each change checks it again."""
        with self._changed:
            self._changed.wait_for(over, seconds)

    def write(self, number: int, text: bytes) -> int:
        """Queue output for the caller. While too much is queued, wait, unless the caller left."""
        with self._changed:
            self.wait_until(lambda: self.wanted.leaves or self._bytes < _KEPT)
            self._tell(number, text)
        return len(text)

    def log(self, record: logging.LogRecord) -> bool:
        """Queue a log record for the caller. Used as a logger's filter: False stops the record."""
        self._tell(record.levelno, logging.Formatter().format(record).encode())
        return False

    def _tell(self, kind: int, text: bytes) -> None:
        with self._changed:
            self.note()
            self._lines.append((self.found.number, kind, text))
            self._bytes += len(text)

    def tell_result(self, result: object) -> None:
        """Report the chief's result, once; report nothing if the chief returned on another node."""
        if not self.wanted.led and self.found.result is None:
            self.note(result=ray.cloudpickle.dumps(result))

    def signal(self, number: int) -> bool:
        """Pass a signal on to the processes; return whether any of them handles it."""
        if self.found.phase is not Phase.READY:
            return False
        sent: Future[bool] = Future()
        self._signals.append((number, sent))
        return sent.result(_PASSED)

    def act(self, children: Any) -> None:
        """Start and end child processes as the caller wants; report which have finished."""
        wanted, (chief, *workers) = self.wanted, children
        for child in workers:
            if child.call.rank in wanted.finished:
                child.due, child.finished = None, True
        if wanted.led:
            chief.due, chief.finished = None, True
        elif not wanted.leads:
            chief.due = None
        elif chief.process is None and not chief.ends:
            chief.due = 0.0
        while self._signals:
            number, sent = self._signals.popleft()
            stops = number in {signal.SIGTSTP, signal.SIGCONT}
            done = [(each.send if stops else each.send_if_handled)(number) for each in children]
            sent.set_result(any(done))
        finished = frozenset(child.call.rank for child in workers if child.finished)
        if finished != self.found.finished:
            self.note(finished=finished)
        if chief.finished:
            self.tell_result(chief.result)
