"""Starts a chief and workers, and starts again those that are killed.

Each child leads a process group of its own (_run_child.py). So a Ctrl-C in a terminal reaches only
this process, which passes it on once; and what a child has started is ended with it. A child that
has ended is reaped only after its group was killed: until then the kernel gives its number to no
other process.

No other module imports this one: threads, asyncio and other launchers do without it.
"""

import logging
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeVar

from shmacc import _child_errors
from shmacc import _run_child as run_child
from shmacc._base import names
from shmacc._base.shown import shown
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._run_child import Call
from shmacc._segment import removal
from shmacc._values import arguments
from shmacc._values.specs import TensorSpec
from shmacc.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    WorkerDiedError,
)

_Result = TypeVar("_Result")

_PERIOD = 60.0  # seconds for which an end counts
# Seconds before a process is started again the first, second, ... time.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
# The longest wait for a sentinel: it is silent while a process lives that the child has started.
_LOOK = 0.1

_log = logging.getLogger("shmacc")


def run(
    chief: Callable[..., _Result],
    worker: Callable[..., object] | None = None,
    *,
    workers: int = 0,
    args: Iterable[Any] = (),
    restarts: int = 3,
    restart_on: Literal["killed", "failure"] = "killed",
    context: str = "spawn",
    grace: float = 5.0,
    name: str | None = None,
) -> _Result:
    """Call ``chief(*args)`` and ``worker(rank, *args)`` in child processes; return chief's result.

    A child that is killed by a signal is started again with the same rank: at once the first time,
    then after pauses of up to 5 seconds. A child that raises ends the run. A worker that returns
    has finished. When the chief has returned, workers have `grace` seconds to return.

    The children have a namespace of their own (``SHMACC_NAMESPACE``) inside this process's, so the
    names in a program never meet those of another run. At the end all names in it are removed.

    In a child the environment has ``SHMACC_ROLE`` (``chief`` or ``worker``), ``SHMACC_RANK`` (-1 in
    the chief) and ``SHMACC_WORKERS``, all of them set before the function is called. Logger
    ``shmacc`` warns of each process that is started again.

    SIGINT, SIGTERM and SIGHUP of this process are passed on to the children, and then take effect
    here. A second one kills the children. This holds for calls in the main thread. If this process
    is killed, the children are killed with it, and the names are removed within two seconds.

    It reads like ``torch.multiprocessing.spawn``, and restarts as torchrun does, without a
    rendezvous: names do that.

    Args:
        chief: A function that children can import: at the top level of a module or program.
        worker: Likewise.
        workers: How many processes call `worker`, with ranks from 0.
        args: Arguments of both functions; they must pickle.
        restarts: How often each process may be started again within 60 seconds.
        restart_on: ``"failure"``: a process that raises, or exits with another status than 0, is
            started again, too.
        context: The start method of multiprocessing: ``"spawn"``, ``"forkserver"`` or ``"fork"``.
        grace: Seconds from the chief's return to SIGTERM, and from SIGTERM to SIGKILL.
        name: The children's namespace, inside this process's. Then names are removed only after a
            run that ended well: after a Ctrl-C, an error, or a kill of everything, the same call
            goes on with the run.

    Raises:
        InvalidArgumentError: A bad argument, or a function that children cannot import.
        FailedPreconditionError: A run of that name is under way; or children import the program,
            and it calls this outside of ``if __name__ == "__main__":``.
        WorkerDiedError: A process was killed more often than `restarts`, or exited with another
            status than 0. The message names its role and rank.
        CancelledError: SIGINT, SIGTERM or SIGHUP came, and this process's handler did not raise.
        BaseException: What `chief` or `worker` raised, with the child's traceback as a note.
    """
    if _child_errors.is_unpickling():
        raise FailedPreconditionError(
            "shmacc.run was called while a child imports the program: call it under "
            "`if __name__ == '__main__':`"
        )
    workers, restarts = _count(workers, "workers"), _count(restarts, "restarts")
    if (worker is None) != (workers == 0):
        raise InvalidArgumentError(
            "worker and workers belong together, a function and in how many processes it is "
            f"called, but they were {worker!r} and {workers}"
        )
    if restart_on not in {"killed", "failure"}:
        raise InvalidArgumentError(
            f"restart_on must be 'killed' or 'failure', but was {shown(restart_on)}"
        )
    wait = arguments.timeout(grace, "grace")
    args = tuple(args)
    calls = [Call("chief", -1, chief, args)]
    if worker is not None:
        calls += [Call("worker", rank, worker, (rank, *args)) for rank in range(workers)]
    processes = _context_for(calls[:2], context)
    with _noted_signals() as signals, suppress(_Interrupted), _namespace(name) as namespace:
        environment = {names.NAMESPACE_VARIABLE: namespace, "SHMACC_WORKERS": str(workers)}
        limits = _Limits(restarts, restart_on == "failure", math.inf if wait is None else wait)
        result: _Result = _Run(calls, processes, environment, limits, signals).result()
        return result
    raise CancelledError(f"The run was ended by {signal.Signals(signals[0]).name}")


class _Limits(NamedTuple):
    restarts: int
    after_failures: bool
    grace: float


def _count(value: object, what: str) -> int:
    number = arguments.int64(value, what)
    if number < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but was {number}")
    return number


def _context_for(calls: list[Call], name: str) -> Any:
    """Return multiprocessing's context of that name, if its children can get these functions."""
    try:
        context: Any = multiprocessing.get_context(name)
    except (ValueError, TypeError):
        raise InvalidArgumentError(
            f"context must be one of {', '.join(multiprocessing.get_all_start_methods())}, "
            f"but was {shown(name)}"
        ) from None
    program = vars(__import__("__main__"))
    for call in calls:
        if not callable(call.function):
            raise InvalidArgumentError(
                f"The {call.role} must be a function, but was {call.function!r}"
            )
        if name == "fork":
            continue
        try:
            pickled = pickle.dumps(call.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"The {call.role} must be a function that a child can import, at the top level of "
                f"a module, but was {call.function!r}: {error}"
            ) from error
        # The pickled name of a module: also of a partial's function, of an object's class.
        if b"\x8c\x08__main__" in pickled and not program.get("__file__"):
            raise InvalidArgumentError(
                f"The {call.role} {call.function!r} is defined in a notebook or at a prompt, from "
                "which a child cannot import it: put it into a module, or use context='fork'"
            )
    return context


@contextmanager
def _namespace(name: str | None) -> Iterator[str]:
    """Yield the children's namespace; at the end, of a named one a good end, remove its names."""
    outer = names.current_namespace()
    if name is None:
        # The outer one's tail may be cut: the random number alone tells runs apart.
        own = f"run-{os.getpid()}-{os.urandom(6).hex()}"
        namespace = f"{outer[: names.LONGEST_NAMESPACE - len(own) - 1]}.{own}" if outer else own
        with _cleaner(namespace):
            try:
                yield namespace
            finally:
                removal.remove_namespace(namespace)
        return
    namespace = names.checked_namespace(name, "name")
    if outer:
        namespace = names.checked_namespace(f"{outer}.{name}", "name")
    with _only_run(name):
        yield namespace
        removal.remove_namespace(namespace)


# Of a process that removes the names if the run's process is killed: then it reads the end of its
# standard input, and nothing before. It sweeps until the kernel has killed the children, too.
_CLEANER = """
import os, sys, time
folder, *prefixes = sys.argv[1:]
if not sys.stdin.buffer.read():
    for _ in range(20):
        for name in os.listdir(folder):
            if name.startswith(tuple(prefixes)):
                try:
                    os.unlink(folder + "/" + name)
                except FileNotFoundError:
                    pass
        time.sleep(0.1)
"""


@contextmanager
def _cleaner(namespace: str) -> Iterator[None]:
    """Have the names in a namespace removed if this process is killed in the block."""
    prefix = f"{names.PREFIX}{namespace}:"
    command = [sys.executable, "-I", "-S", "-c", _CLEANER, names.SHM_DIRECTORY]
    # In a session of its own, since a terminal's Ctrl-C is not for it.
    with subprocess.Popen(  # noqa: S603  this Python, and names
        [*command, prefix, names.SEMAPHORE_FILE_PREFIX + prefix],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as cleaner:
        try:
            yield
        finally:
            with suppress(BrokenPipeError):  # it was killed
                cleaner.communicate(b"not killed")


@contextmanager
def _only_run(name: str) -> Iterator[None]:
    # The kernel proves whether the process that holds this segment still lives.
    try:
        held = SharedArrays(
            {"run": TensorSpec((), "uint8")},
            f"run.{name}",
            if_exists="replace",
            unlink_on_close=True,
        )
    except FailedPreconditionError as error:
        raise FailedPreconditionError(
            f"The run {name!r} is under way, in process {error.pids}"
        ).with_fields(pids=error.pids) from None
    with held:
        yield


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yield a list of the signals that come and ask for an end; let the first do so afterwards."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # None: not Python's handler. What is ignored, as SIGINT by a script's background job
            # or SIGHUP under nohup, stays ignored.
            if signal.getsignal(number) not in {None, signal.SIG_IGN}:
                run_child.handlers[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        run_child.restore_handlers()
        if came:  # also if the run has ended by an error meanwhile
            signal.raise_signal(came[0])


class _Interrupted(BaseException):
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
        self.answer = run_child.Answer(os.memfd_create("shmacc run"))
        method = context.get_start_method()
        parent = None if method == "forkserver" else os.getpid()
        self.process = context.Process(
            target=run_child.main,
            name=str(self.call),
            args=(self.call, environment, parent, self.answer),
        )
        if method == "fork":  # a signal waits until the child has handlers of its own
            signal.pthread_sigmask(signal.SIG_BLOCK, tuple(run_child.handlers))
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, tuple(run_child.handlers))
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


class _Run:
    def __init__(
        self,
        calls: list[Call],
        context: Any,
        environment: dict[str, str],
        limits: _Limits,
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
                raise _Interrupted
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
