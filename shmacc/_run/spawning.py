"""Starts the processes of a run through multiprocessing, but spawns them a little differently.

multiprocessing leaves a spawned child in the caller's process group, with the caller's environment
and standard input, until the child has imported the program, which may take seconds; and the parent
does not get the errors of that import. Here the child is executed with its own group and variables,
and imports the program when it can send errors (child.py). A forked child sets up both at once.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from io import BytesIO
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from typing import Any

from shmacc._base.shown import shown
from shmacc._run import child
from shmacc._run.child import Answer, Call, Packed, Program, Surroundings
from shmacc._run.signals import BY_DEFAULT, masked
from shmacc.errors import FailedPreconditionError, InvalidArgumentError


def execute(
    arguments: list[str], environment: dict[str, str], passed: list[int], **options: Any
) -> int:
    """Execute a program; return its pid.

    subprocess waits until a pipe is closed. If another thread forks meanwhile, the forked process
    keeps the pipe open as long as it lives. This function waits only for the start.

    Args:
        arguments: The program's path, then its arguments.
        environment: The program's environment variables.
        passed: Descriptors that the program inherits besides 0 to 2.
        options: Further options of `os.posix_spawn`.
    """
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, each, each) for each in passed]
    # posix_spawn closes no descriptor above the limit, which may have been lowered meanwhile.
    limit = os.sysconf("SC_OPEN_MAX")
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it is closed by now
            closed = 2 < descriptor < limit and descriptor not in passed  # noqa: PLR2004
            if closed and os.get_inheritable(descriptor):
                actions.append((os.POSIX_SPAWN_CLOSE, descriptor))
    actions += options.pop("file_actions", ())
    # Python ignores these signals; the program must not inherit that.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    return os.posix_spawn(
        arguments[0], arguments, environment, file_actions=actions, setsigdef=ignored, **options
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Popen(popen_spawn_posix.Popen):
    """A process that is executed in its own process group."""

    _fds: list[int]  # descriptors that it inherits

    def _launch(self, process_obj: Any) -> None:
        with masked(signal.SIG_BLOCK, ()):  # a tracker that starts unblocks SIGINT and SIGTERM
            tracker: Any = resource_tracker.getfd()
        preparation = spawn.get_preparation_data(process_obj.name)
        for key in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(key, None)
        data = BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        ends: list[int] = []
        try:
            for _ in range(2):
                ends.extend(os.pipe())
            self.sentinel, written, read, data_end = ends
            self.pid = execute(
                spawn.get_command_line(tracker_fd=tracker, pipe_handle=read),
                {**os.environ, **process_obj.environment},
                [*self._fds, tracker, read, written],
                setpgroup=0,
            )
            # With its own end to read from, this process would wait for a child that is dead
            # (python/cpython#118981).
            ends = [self.sentinel, data_end]
            _close(written, read)
            try:
                with open(data_end, "wb", closefd=False) as file:
                    file.write(data.getbuffer())
            except BrokenPipeError:  # it was killed before it read all: its end tells the rest
                _fetch_sigpipe()
        except BaseException:
            _close(*ends)
            raise
        self.finalizer = util.Finalize(self, _close, (self.sentinel, data_end))


def _fetch_sigpipe() -> None:
    """Fetch the signal of a failed write; `Starter.start` blocks it, as it may end the program."""
    signal.sigtimedwait({signal.SIGPIPE}, 0)


class _SpawnedProcess(context.SpawnProcess):
    """A process that is executed with the variables in `environment`."""

    environment: dict[str, str]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  multiprocessing's name
        return _Popen(process_obj)


class _ServedPopen(popen_forkserver.Popen):
    """A process that a forkserver forks."""

    def _launch(self, process_obj: Any) -> None:
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        except BrokenPipeError:
            _fetch_sigpipe()
            if self.finalizer is None:  # the forkserver has ended
                raise
            self.pid = forkserver.read_signed(self.sentinel)  # as above


class _ServedProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  as above
        return _ServedPopen(process_obj)


class Starter:
    """Starts children by one start method.

    Attributes:
        by_forkserver: Whether the children's parent is a forkserver.
    """

    def __init__(self, method: str, calls: list[Call], *, imports: bool = True) -> None:
        """Check that children can get the functions of these calls.

        Args:
            method: The start method.
            calls: The calls.
            imports: Whether a child imports the program of this process.

        Raises:
            InvalidArgumentError: Children cannot get a function, or there is no such start method.
            FailedPreconditionError: This process is not allowed to have children.
        """
        try:
            found: Any = multiprocessing.get_context(method)
        except (ValueError, TypeError):
            raise InvalidArgumentError(
                f"context must be one of {', '.join(multiprocessing.get_all_start_methods())}, "
                f"but was {shown(method)}"
            ) from None
        self.by_forkserver = method == "forkserver"
        if self.by_forkserver and getattr(sys, "frozen", False):
            raise InvalidArgumentError(
                "context='forkserver' starts a Python, and a frozen program has none: use 'spawn', "
                "with multiprocessing.freeze_support(), or 'fork'"
            )
        own = {"spawn": _SpawnedProcess, "forkserver": _ServedProcess}
        self._class: Any = own.get(method, found.Process)
        _check_callable(calls)
        _check_may_have_children()
        self._program = None if method == "fork" or not imports else _program_for(calls)

    def start(self, call: Call, surroundings: Surroundings, answer: Answer) -> Any:
        """Return a new process that makes the call."""
        started = self._class(
            target=child.main,
            name=str(call),
            args=(Packed(call, self._program), surroundings, answer),
        )
        started.environment = surroundings.environment | surroundings.before
        if self.by_forkserver:  # a forkserver lives on, and passes its mask to children
            with masked(signal.SIG_SETMASK, surroundings.mask):
                _ensure_forkserver()
        # Until the child is ready for the signals. For SIGPIPE see `_fetch_sigpipe`.
        with masked(signal.SIG_BLOCK, BY_DEFAULT | {signal.SIGPIPE}):
            try:
                started.start()
            except OSError as error:
                _close_pipes_of(error)
                raise
        # multiprocessing reaps its children now and then. It must not reap this one before the
        # child's group is killed.
        process._children.discard(started)  # type: ignore[attr-defined]  # noqa: SLF001
        return started


def _ensure_forkserver() -> None:
    """Start multiprocessing's forkserver if it does not run, also if other code has reaped it."""
    server: Any = forkserver._forkserver  # noqa: SLF001
    pid = server._forkserver_pid  # noqa: SLF001
    try:
        forkserver.ensure_running()
    except ChildProcessError:  # multiprocessing would fail with it again and again
        with server._lock:  # noqa: SLF001
            if server._forkserver_pid == pid:  # noqa: SLF001  else another thread was here
                os.close(server._forkserver_alive_fd)  # noqa: SLF001
                server._forkserver_address = server._forkserver_alive_fd = None  # noqa: SLF001
                server._forkserver_pid = None  # noqa: SLF001
        forkserver.ensure_running()


def _close_pipes_of(error: OSError) -> None:
    """Close the pipes that multiprocessing leaves open when it cannot fork."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is popen_fork.Popen._launch.__code__:  # type: ignore[attr-defined]  # noqa: SLF001
            _close(*(end for end in frame.f_locals.values() if type(end) is int and end > 2))  # noqa: PLR2004


def _check_callable(calls: list[Call]) -> None:
    for call in calls:
        if not callable(call.function):
            raise InvalidArgumentError(
                f"The {call.role} must be a function, but was {call.function!r}"
            )


def _check_may_have_children() -> None:
    if multiprocessing.current_process().daemon:
        raise FailedPreconditionError(
            "shmacc.run was called in a daemonic process of multiprocessing, such as a worker of a "
            "Pool, which may have no children: call it in the process that made that one, or use "
            "concurrent.futures.ProcessPoolExecutor, whose workers may have some"
        )
    if getattr(sys, "frozen", False) and spawn.is_forking(sys.argv):
        raise FailedPreconditionError(
            "shmacc.run was called in a child of a frozen program: call "
            "multiprocessing.freeze_support() first in the program, or use context='fork'"
        )


def _program_for(calls: list[Call]) -> Program | None:
    """Return the program that children import."""
    own = _program()
    needed = False
    for call in calls:
        try:
            pickled = pickle.dumps(call.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"The {call.role} must be a function that a child can import, at the top level of "
                f"a module, but was {call.function!r}: {error}. Or use context='fork'"
            ) from error
        # A pickle names the module of each function in it, also of a function in a partial.
        if b"\x8c\x08__main__" in pickled:
            needed = True
            if own is None:
                raise InvalidArgumentError(
                    f"The {call.role} {call.function!r} is defined in a notebook, at a prompt or "
                    "in standard input, from which a child cannot import it: put it into a module, "
                    "or use context='fork'"
                )
    # A package's, folder's or archive's __main__ often has no guard; multiprocessing skips it, too.
    return own if needed or (own is not None and not own.is_main) else None


def _program() -> Program | None:
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if not path or os.path.basename(path).startswith("<"):  # such as <stdin>
        return None
    if process.ORIGINAL_DIR is not None:  # type: ignore[attr-defined]
        path = os.path.normpath(os.path.join(process.ORIGINAL_DIR, path))  # type: ignore[attr-defined]
    if spec is None or spec.loader is None:  # without a loader: a profiler has made the module
        return Program("", path, is_main=False)
    if spec.name == "__main__":
        return Program("", os.path.dirname(path), is_main=True)
    return Program(spec.name, path, spec.name.endswith(".__main__"))
