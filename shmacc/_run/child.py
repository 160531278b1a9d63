"""The child's side of `shmacc.run`: makes one call, and sends the outcome to the parent.

The child writes the outcome into an anonymous file in memory (memfd), which the parent reads when
the child has ended. A large result in a pipe would block both processes, and a pipe would stay open
in processes that the child started. The length at the front is written last: so an outcome that a
killed child wrote only in part does not count.

A child leads its own process group, so Ctrl-C in a terminal does not reach it. It ignores the
signals with which a terminal stops a background group, and so do processes that it starts. It asks
the kernel to kill it when its parent dies (PR_SET_PDEATHSIG), then checks that the parent has not
died before. The kernel does not kill what the child started: cleaner.py does.

A forkserver's child does not ask the kernel for this: cleaner.py kills it, too. Its parent is the
forkserver, which a signal to the caller's group ends, while the child still saves its state.
"""

import ctypes
import fcntl
import os
import pickle
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import process, reduction
from typing import Any, NamedTuple

from shmacc import _child_errors
from shmacc._run import cleaner
from shmacc.errors import FailedPreconditionError

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LENGTH = 8  # bytes that hold an outcome's length

dumps: Callable[[object], bytes] = pickle.dumps  # pickles results and exceptions


class Call(NamedTuple):
    """What one child does.

    Attributes:
        role: ``chief`` or ``worker``.
        rank: The worker's rank; -1 for the chief.
        function: The function that is called.
        args: The arguments of the call.
        answers: Whether the child sends an outcome. After exec, the new program sends none.
    """

    role: str
    rank: int
    function: Callable[..., object]
    args: tuple[Any, ...]
    answers: bool = True

    def __str__(self) -> str:
        return self.role if self.rank < 0 else f"{self.role} {self.rank}"


class Surroundings(NamedTuple):
    """What a child sets up before its call.

    Attributes:
        environment: Environment variables for the call.
        before: Variables that are set when Python is executed, since packages read them early.
        parent: The pid of its parent; 0 if its parent is a forkserver.
        mask: The child's signal mask.
        cpus: The processors that it may use; None: all.
        output: For its standard output and error: paths of files to append to, or descriptors
            that it inherits; None: the parent's.
    """

    environment: dict[str, str]
    before: dict[str, str]
    parent: int
    mask: frozenset[int]
    cpus: frozenset[int] | None
    output: tuple[str, str] | tuple[int, int] | None


class Program(NamedTuple):
    """Where a child finds ``__main__``, which multiprocessing imports only if it is a file.

    Attributes:
        module: The module's name, such as ``package.__main__``; empty: no module.
        path: The program's file, or the folder or archive that contains it.
        is_main: Whether the program is the ``__main__`` of a package, folder or archive.
    """

    module: str
    path: str
    is_main: bool

    def load(self) -> None:
        """Import the program as ``__mp_main__`` (as multiprocessing does) and ``__main__``."""
        main = sys.modules["__main__"]
        # A forkserver may have imported the program; a frozen child begins by running it.
        if main.__name__ == "__mp_main__" or getattr(main, "__file__", None) == self.path:
            return
        process.current_process()._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001
        try:  # the program must not start processes while it is imported
            if self.module:
                found = runpy.run_module(self.module, run_name="__mp_main__", alter_sys=True)
            else:
                found = runpy.run_path(self.path, run_name="__mp_main__")
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]  # noqa: SLF001
        imported = types.ModuleType("__mp_main__")
        imported.__dict__.update(found)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = imported


class Packed:
    """A call that a child unpickles only when it can send errors to its parent."""

    def __init__(self, call: Call, program: Program | None) -> None:
        self._call, self._program, self._pickled = call, program, b""

    def __reduce__(self) -> tuple[Callable[..., "Packed"], tuple[Any, ...]]:
        # Pickle here: multiprocessing's queues and locks pickle only while a child is started.
        pickled = bytes(reduction.ForkingPickler.dumps(self._call[2:4]))
        return _packed, (self._call._replace(function=str, args=()), self._program, pickled)

    def call(self) -> Call:
        """Return the unpickled call."""
        if self._pickled:
            if self._program is not None:
                self._program.load()
            function, args = pickle.loads(self._pickled)  # noqa: S301  the parent wrote it
            self._call = self._call._replace(function=function, args=args)
        return self._call


def _packed(call: Call, program: Program | None, pickled: bytes) -> Packed:
    packed = Packed(call, program)
    packed._pickled = pickled  # noqa: SLF001
    return packed


class Answer:
    """A file in memory for what a child returns or raises."""

    def __init__(self, descriptor: int) -> None:
        try:  # use a number above standard error's; exec closes the descriptor
            self._descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        finally:
            os.close(descriptor)
        self._file = os.fstat(self._descriptor)
        # /proc may be of an outer namespace of pids, where this process has another pid.
        self._parents = os.path.realpath("/proc/self") + f"/fd/{self._descriptor}"

    def __reduce__(self) -> tuple[Callable[[Any, str], "Answer"], tuple[Any, str]]:
        return _from_parent, (reduction.DupFd(self._descriptor), self._parents)

    def write(self, *outcome: object) -> None:
        """Write ("returned", result), or ("raised", last, told, pickled); see `was_raised`.

        Raises:
            OSError: The outcome could not be written; the file is left empty.
            Exception: The outcome does not pickle.
        """
        pickled, file = memoryview(pickle.dumps(outcome)), self._opened()
        try:
            os.lseek(file, _LENGTH, os.SEEK_SET)
            written = 0
            while written < len(pickled):
                written += os.write(file, pickled[written:])
            os.pwrite(file, len(pickled).to_bytes(_LENGTH, "little"), 0)
        except OSError:
            os.ftruncate(file, 0)
            raise

    def _opened(self) -> int:
        """Return the file's descriptor; open it anew if the program closed or reused the number."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self._file):
                return self._descriptor
        descriptor = os.open(self._parents, os.O_RDWR)
        if not os.path.samestat(os.fstat(descriptor), self._file):
            os.close(descriptor)
            raise OSError("the file for it was closed")
        self._descriptor = descriptor
        return descriptor

    def read(self) -> tuple[Any, ...] | None:
        """Return the outcome; None if there is none, or only a part of it."""
        length = int.from_bytes(os.pread(self._descriptor, _LENGTH, 0), "little")
        if length == 0:
            return None
        os.lseek(self._descriptor, _LENGTH, os.SEEK_SET)
        with open(self._descriptor, "rb", closefd=False) as file:
            outcome: tuple[Any, ...] = pickle.load(file)  # noqa: S301  this process's own child wrote it
        return outcome

    def close(self) -> None:
        os.close(self._descriptor)


def _from_parent(duplicate: Any, parents: str) -> Answer:
    answer = Answer(duplicate.detach())
    answer._parents = parents  # noqa: SLF001
    return answer


def main(packed: Packed, surroundings: Surroundings, answer: Answer) -> None:
    """Make the call in this process, which was just started for it."""
    os.setpgid(0, 0)
    pid = os.getpid()
    try:
        _set_up(surroundings)
        call = packed.call()
        result = call.function(*call.args)
        if os.getpid() == pid:  # else it is a fork of the child
            _return(call, result, answer)
    except SystemExit:
        raise  # its exit status is the outcome
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # no traceback: the parent shows its own
    except BaseException as error:
        _child_errors.keep(error)
        if os.getpid() != pid:
            raise
        _raise(error, answer)  # the parent shows it
        sys.exit(1)


def _set_up(surroundings: Surroundings) -> None:
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # before Python 3.12, a fork keeps an event loop's descriptor
    _connect(surroundings.output)
    os.environ.update(surroundings.environment)
    # Processes forked from here on inherit this mark. Executed programs have a variable as a mark.
    os.memfd_create(cleaner.MARK + surroundings.environment[cleaner.VARIABLE])
    if surroundings.cpus is not None:
        for thread in os.listdir("/proc/self/task"):  # loaded packages may have threads
            with suppress(ProcessLookupError):  # it has ended by now
                os.sched_setaffinity(int(thread), surroundings.cpus)
    if surroundings.parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if surroundings.parent != os.getppid():
            os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, surroundings.mask)


def open_standard_streams() -> list[int]:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed; return these."""
    opened = []
    with suppress(OSError):  # no descriptor above 2 is free: the next call that needs one says so
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004  standard error
            opened.append(descriptor)
            os.set_inheritable(descriptor, True)  # noqa: FBT003
        os.close(descriptor)
    return opened


def _connect(output: tuple[str, str] | tuple[int, int] | None) -> None:
    """Make standard input empty, and direct the output to these files."""
    # A terminal stops a background group that reads from it. multiprocessing has replaced only
    # sys.stdin, not descriptor 0.
    open_standard_streams()
    for number, to in enumerate((os.devnull, *(output or ()))):
        if isinstance(to, int):
            os.dup2(to, number)
            continue
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if number else os.O_RDONLY
        descriptor = os.open(to, flags, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _return(call: Call, result: object, answer: Answer) -> None:
    if call.rank >= 0:
        with suppress(OSError):  # a limit on file sizes: status 0 tells that it has returned
            answer.write("returned", None)  # nobody asks for what a worker returns
        return
    try:
        answer.write("returned", dumps(result))
    except Exception as error:
        what = "be written" if isinstance(error, OSError) else "be pickled"
        raise FailedPreconditionError(
            f"The result of the chief, of {type(result).__qualname__}, cannot {what}: {error}"
        ) from error


def _raise(error: BaseException, answer: Answer) -> None:
    below = error.__traceback__.tb_next if error.__traceback__ else None  # without this file
    told = traceback.TracebackException(type(error), error, below)
    last = "".join(told.format_exception_only())
    whole = "".join(told.format())
    try:
        pickled = dumps(error)
    except Exception:  # noqa: BLE001  whatever its class does
        pickled = b""
    try:
        answer.write("raised", last.strip(), whole.removesuffix(last), pickled)
    except OSError:  # a limit on file sizes, for example
        told.print()
        with suppress(OSError):  # if this fails, too, only the exit status tells
            answer.write("raised", last.strip(), "", b"")


def was_raised(child: str, last: str, told: str, pickled: bytes) -> BaseException:
    """Return the exception of a child, with its traceback as a note.

    Args:
        child: The child that raised, in words.
        last: The exception's type and message.
        told: The traceback without `last`.
        pickled: The pickled exception; empty if it does not pickle.
    """
    note = f"In {child}:\n{told}".rstrip(":\n")
    error: BaseException
    try:
        error = pickle.loads(pickled)  # noqa: S301  this process's own child wrote it
        str(error)
        error.add_note(note)  # fails if __reduce__ made no exception
    except BaseException:  # noqa: BLE001  an __init__ with other arguments, for example
        error = RuntimeError(last)
        error.add_note(note)
    return error


def result_of(pickled: bytes | None) -> Any:
    """Return what the chief has returned.

    Raises:
        FailedPreconditionError: The result does not unpickle here.
    """
    try:
        return None if pickled is None else pickle.loads(pickled)  # noqa: S301  as above
    except BaseException as error:  # even a SystemExit must not end the caller
        raise FailedPreconditionError(
            f"The result of the chief cannot be unpickled: {type(error).__qualname__}: {error}"
        ) from error
