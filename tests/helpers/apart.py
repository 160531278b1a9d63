"""Runs functions in processes of their own; if a signal kills one, the test's error says so."""

import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Self

import pytest
from helpers import own_shm
from helpers.support import LONG, START_METHODS

import shmacc

needs_own_shm = pytest.mark.skipif(
    not own_shm.available(),
    reason="needs a mount namespace with a /dev/shm of its own (root, or user namespaces)",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")

every_start_method = pytest.mark.parametrize("crew", START_METHODS, indirect=True)


class Apart:
    """A process that runs one function; it and the test can talk to each other.

    Args:
        function: What to run. If it has a parameter ``pipe``, it gets the process's end of a pipe.
        shm: Size in bytes of a private /dev/shm; None: the system's.
        uid: The user id and group id that the process takes; None: unchanged.
        method: The start method of multiprocessing; None: a bare fork.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        shm: int | None = None,
        uid: int | None = None,
        method: str | None = None,
    ) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.status: int | None = None
        self._process: multiprocessing.Process | None = None
        if method is None:
            self.pid = os.fork()
            if self.pid == 0:
                self.pipe.close()
                _run_and_end(theirs, function, args, shm, uid)
        else:
            context: Any = multiprocessing.get_context(method)
            self._process = context.Process(target=_run, args=(theirs, function, args))
            self._process.start()
            self.pid = self._process.pid or 0
        theirs.close()

    def hear(self, seconds: float = LONG) -> Any:
        """Wait for the process's next message, and return it."""
        assert self.pipe.poll(seconds), f"process {self.pid} said nothing for {seconds} s"
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"the process {_how(self.wait())}") from None
        if kind == "raised":
            raise value
        return value

    def hear_descriptor(self) -> int:
        assert self.pipe.poll(LONG), f"process {self.pid} passed nothing on for {LONG} s"
        return reduction.recv_handle(self.pipe)

    def say(self, what: Any = None) -> None:
        """Send something to the process; if it ended with an exception, raise that here."""
        try:
            self.pipe.send(what)
        except BrokenPipeError:
            self.hear()
            raise

    def ready(self) -> Self:
        """Wait for the process's first message; return the process."""
        try:
            self.hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def turn(self, what: Any = None) -> Any:
        """Send something to the process, and return its answer."""
        self.say(what)
        return self.hear()

    def finish(self, what: Any = None) -> Any:
        """Send something to the process, wait for its end, and return its result."""
        self.say(what)
        return self.result()

    def result(self, seconds: float = LONG) -> Any:
        """Wait for the function's end; return its result, or raise its exception."""
        value = self.hear(seconds)
        status = self.wait()
        assert status == 0, f"the process {_how(status)} after it was done"
        return value

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal; SIGSTOP has taken effect when this returns."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)

    def wait(self) -> int:
        """Wait for the process's end; return its status, as from `os.waitpid`."""
        if self.status is None and self._process is not None:
            self._process.join()
            code = self._process.exitcode or 0
            self.status = -code if code < 0 else code << 8
        elif self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        if self.status is None:
            if self._process is not None:
                self._process.kill()
            else:
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and close the pipe, however the test ended."""
        self.kill()
        if self._process is not None:
            self._process.close()
        self.pipe.close()


def run_apart(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Run a function in a process of its own and return its result; `how` is as for `Apart`."""
    with Apart(function, *args, **how) as process:
        return process.result()


def apart(**how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process of its own; `how` is as for `Apart`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            run_apart(lambda: test(**given), **how)

        return run

    return decorate


class Crew:
    """Starts processes by one start method, and ends them when the test ends."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._members: list[Apart] = []

    def start(self, function: Callable[..., Any], *args: Any) -> Apart:
        self._members.append(Apart(function, *args, method=self._method))
        return self._members[-1]

    def end(self) -> None:
        for member in self._members:
            member.__exit__()


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _answer(pipe, lambda: call(function, args, Pipe(pipe)))
    pipe.close()


def _run_and_end(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    shm: int | None,
    uid: int | None,
) -> None:
    status = 1
    try:
        _answer(pipe, lambda: _result(pipe, function, args, shm, uid))
        status = 0
    finally:
        # The fork must never go on as a second test runner.
        os._exit(status)


def _answer(pipe: Connection, work: Callable[[], Any]) -> None:
    """Send the work's result, or its exception."""
    try:
        answer: tuple[str, Any] = ("returned", work())
    except BaseException as error:  # noqa: BLE001 - the test raises it
        told = "".join(traceback.format_exception(error))
        error.add_note(told)
        # Some exceptions cannot be pickled.
        answer = ("raised", error if _pickles(error) else AssertionError(told))
    pipe.send(answer)


def _result(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    shm: int | None,
    uid: int | None,
) -> Any:
    if shm is not None:
        own_shm.enter_own_shm(shm)
    if uid is not None:
        _import_what_is_imported_late()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    return call(function, args, Pipe(pipe))


def _import_what_is_imported_late() -> None:
    # Later, as another user, this process may be unable to read the modules' files.
    for name in dir(shmacc):
        with suppress(ImportError):  # the name needs a package that is not installed
            public = getattr(shmacc, name)
            for late in dir(public) if isinstance(public, ModuleType) else ():
                getattr(public, late)


def call(function: Callable[..., Any], args: tuple[Any, ...], pipe: "Pipe") -> Any:
    """Call a function, with the pipe if it takes one."""
    talks = "pipe" in inspect.signature(function).parameters
    return function(*args, **({"pipe": pipe} if talks else {}))


def _pickles(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever the reason
        return False
    return True


class Pipe:
    """The process's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def say_descriptor(self, fd: int) -> None:
        reduction.send_handle(self._connection, fd, os.getppid())

    def say(self, what: Any = None) -> None:
        self._connection.send(("said", what))

    def hear(self) -> Any:
        return self._connection.recv()

    def turn(self, what: Any = None) -> Any:
        """Say something to the test, and return its answer."""
        self.say(what)
        return self.hear()

    def poll(self) -> bool:
        return self._connection.poll()


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"
