"""What the caller of a run over hosts wants of a node, and what the node reports to the caller.

The caller sends all that it wants again and again, and each answer says all that is so. No call
depends on an earlier one: it may be lost, overtake others, or come to a supervisor that Ray has
started again meanwhile. Only output is told once: it is kept until the caller has seen it.
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

_PARKED = 1.0  # seconds that a call waits for something to tell
_PASSED = 10.0  # seconds for the run to pass a signal on
_KEPT = 1 << 20  # bytes of output that wait for the caller; then processes wait that write


class Plan(NamedTuple):
    """What all supervisors of a run must know."""

    chief: bytes  # a function and its arguments, pickled by value
    worker: bytes | None
    workers: int  # how many there are on each node
    answers: bool  # whether processes answer; programs do not
    context: str
    limits: Limits
    threads: Any  # as for `shmacc.run`
    output: str | None  # likewise `log_dir`; None: output goes to the caller
    called: Called

    def calls(self, first: int) -> list[Call]:
        """Return the calls on a node whose first worker has this rank."""
        calls = [Call("chief", -1, carried.call, (self.chief,), self.answers)]
        for rank in range(first, first + self.workers):
            args = (self.worker, rank) if self.answers else (self.worker,)
            calls.append(Call("worker", rank, carried.call, args, self.answers))
        return calls


class Wanted(NamedTuple):
    """What the caller wants of a node."""

    turn: int = 0  # grows with each change
    first: int = 0  # the rank of the node's first worker
    finished: frozenset[int] = frozenset()  # workers that have returned: they do not start again
    leads: bool = False  # the chief is to run there
    led: bool = False  # it has returned, there or elsewhere: workers may return
    ended_by: int = 0  # a signal by which all processes are to end; 0: none
    leaves: bool = False  # the node is to let go of the run's names
    removes: bool | None = None  # and to remove them; None: if there were none before


class Phase(IntEnum):
    """How far a node is."""

    NEW = 0
    READY = 1  # it has the run's names, and starts processes
    IDLE = 2  # they have ended
    GONE = 3  # it has let go of the names


class Found(NamedTuple):
    """What is so on a node."""

    born: int  # when its supervisor was started (time.monotonic_ns); Ray may do so again
    number: int  # grows with each change, also after the supervisor was started again
    phase: Phase = Phase.NEW
    finished: frozenset[int] = frozenset()  # the ranks of workers that have returned
    result: bytes | None = None  # what the chief has returned there, pickled
    raised: tuple[str, bytes, int | None] | None = None
    """What has ended all there: the last line; the exception, pickled; the status of a program."""
    lines: tuple[tuple[int, int, bytes], ...] = ()
    """Output: a number; 1 for standard output, 2 for error, or the level of a log; the text."""


class Exchange:
    """The supervisor's side. A run (children.py) has it in the place of its caller's signals."""

    def __init__(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.plan: Plan | None = None
        now = time.monotonic_ns()
        self.found = Found(born=now, number=now)
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0  # of these
        self._signals: deque[tuple[int, Future[bool]]] = deque()
        self.wanted = Wanted()
        self.want(self.wanted)

    def exchange(self, wanted: Wanted, seen: int, plan: Plan | None) -> Found:
        """Take what is wanted; return what is so: at once if that is new, or else soon."""
        with self._changed:
            self.plan = self.plan or plan
            while self._lines and self._lines[0][0] <= seen:
                self._bytes -= len(self._lines.popleft()[2])
            self.want(wanted)
            self.wait_until(lambda: self.found.number > seen, _PARKED)
            return self.found._replace(lines=tuple(self._lines))

    def want(self, wanted: Wanted) -> None:
        """Take what is wanted, unless this came late."""
        with self._changed:
            if wanted.turn >= self.wanted.turn:
                self.wanted, self.ended_by = wanted, wanted.ended_by
                self.over, self.in_haste = self.ended_by != 0, self.ended_by == signal.SIGKILL
            self._changed.notify_all()

    def note(self, **found: Any) -> None:
        """Note a change of what is so."""
        with self._changed:
            self.found = self.found._replace(number=self.found.number + 1, **found)
            self._changed.notify_all()

    def wait_until(self, over: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until something is wanted or so."""
        with self._changed:
            self._changed.wait_for(over, seconds)

    def write(self, number: int, text: bytes) -> int:
        """Tell output; wait while there is too much of it, unless nobody may ask any more."""
        with self._changed:
            self.wait_until(lambda: self.wanted.leaves or self._bytes < _KEPT)
            self._tell(number, text)
        return len(text)

    def log(self, record: logging.LogRecord) -> bool:
        """Tell what is logged, as a logger's filter that lets nothing pass."""
        self._tell(record.levelno, logging.Formatter().format(record).encode())
        return False

    def _tell(self, kind: int, text: bytes) -> None:
        with self._changed:
            self.note()
            self._lines.append((self.found.number, kind, text))
            self._bytes += len(text)

    def tell_result(self, result: object) -> None:
        """Tell what the chief has returned, once, if it was here."""
        if not self.wanted.led and self.found.result is None:
            self.note(result=ray.cloudpickle.dumps(result))

    def signal(self, number: int) -> bool:
        """Pass a signal on; return whether a process has a handler of it."""
        if self.found.phase is not Phase.READY:
            return False
        sent: Future[bool] = Future()
        self._signals.append((number, sent))
        return sent.result(_PASSED)

    def act(self, children: Any) -> None:
        """Have the children do what is wanted, and tell which have finished."""
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
