"""`shmacc.run`: a chief and workers in processes that are started again if they are killed.

The rest of the library works without it: in threads, in asyncio, and with other launchers.
"""

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from shmacc import _child_errors
from shmacc._base import names
from shmacc._base.shown import shown
from shmacc._run import cleaner
from shmacc._run.child import Call, Surroundings, open_standard_streams
from shmacc._run.children import Interrupted, Limits, Run
from shmacc._run.namespaces import Surrounded, of_children
from shmacc._run.signals import ENDING, callers_signals
from shmacc._run.spawning import Starter
from shmacc._values import arguments
from shmacc.errors import CancelledError, FailedPreconditionError, InvalidArgumentError

_Result = TypeVar("_Result")

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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
    threads: int | Literal["share"] | None = None,
    cpus: Literal["spread"] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
) -> _Result:
    """Call ``chief(*args)`` and ``worker(rank, *args)`` in child processes; return chief's result.

    A child that is killed by a signal is started again with the same rank: at once the first time,
    then after pauses of up to 5 seconds. A child that raises ends the run. A worker that returns
    has finished; what it returns is not sent. When the chief has returned, workers have `grace`
    seconds to return. The number of workers does not change.

    The children have their own namespace (``SHMACC_NAMESPACE``) inside this process's, so a
    program's names never collide with those of another run. At the end, all names in the namespace
    are removed, and the processes that the children have started are killed.

    In a child the environment has ``SHMACC_ROLE`` (``chief`` or ``worker``), ``SHMACC_RANK`` (-1 in
    the chief) and ``SHMACC_WORKERS``, all of them set before the function is called. Logger
    ``shmacc`` warns of each process that is started again, and says at level INFO which process has
    started and finished. `run` prints nothing.

    It may be called in any thread. In the main thread, SIGINT, SIGTERM and SIGHUP of this process
    are passed on to the children, and take effect here when the children have ended; a second
    signal kills the children. SIGUSR1 and SIGUSR2 are passed on to children that have a handler;
    Ctrl-Z stops the children, too. Your own handlers are called within 0.1 seconds; an exception
    from a handler ends the run and is raised. Afterwards handlers and mask are restored. If this
    process is killed, the children and what they started are killed, and the names are removed.

    It is called like ``torch.multiprocessing.spawn``, and restarts like torchrun. It needs no
    rendezvous: processes find each other by the names of segments.

    Args:
        chief: A function that children can import: at the top level of a module or program.
        worker: Such a function, too; None: there are no workers.
        workers: How many processes call `worker`, with ranks from 0.
        args: Arguments of both functions; they must pickle.
        restarts: How often each process may be started again within 60 seconds.
        restart_on: ``"failure"``: a process that raises, or exits with another status than 0, is
            started again, too.
        context: The start method of multiprocessing: ``"spawn"``, ``"forkserver"`` or ``"fork"``.
        grace: Seconds from the chief's return to SIGTERM, and from SIGTERM to SIGKILL.
        name: The children's namespace, inside this process's. A run with a name removes its names
            only if it ends well: after Ctrl-C, an error, or a kill of everything, the same call
            goes on with the run.
        threads: How many threads NumPy, torch and others may use in each child; ``"share"``: the
            processors that this process may use, divided by `workers`. It sets OMP_NUM_THREADS,
            OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and NUMEXPR_NUM_THREADS before the child is
            executed, so `context` must be ``"spawn"``. None: as in this process.
        cpus: ``"spread"``: each worker gets a share of this process's processors, which no other
            worker uses. None: as in this process.
        log_dir: A folder, which is made if it is not there. What a child prints is appended to
            ``chief.out``, ``chief.err``, ``worker-0.out``, ... in it. None: to this process's
            output.

    Raises:
        InvalidArgumentError: A bad argument, or a function that children cannot import.
        FailedPreconditionError: A run of that name is under way; or a child imports the program,
            which calls `run` outside of ``if __name__ == "__main__":``; or this process is a daemon
            of multiprocessing, such as a Pool's worker; or the chief's result does not pickle, or
            could not be sent.
        WorkerDiedError: A process was killed more often than `restarts`, or exited with another
            status than 0; or the chief exited without a result. The message names role and rank.
        CancelledError: SIGINT, SIGTERM or SIGHUP came, and this process's handler did not raise.
        OSError: The first start of a process failed, or `log_dir` cannot be written to.
        BaseException: What `chief` or `worker` raised, with the child's traceback as a note; or
            what a handler of this process raised. In place of an exception that does not unpickle,
            a RuntimeError with its type and message.
    """
    if _child_errors.is_unpickling():
        raise FailedPreconditionError(
            "shmacc.run was called while a child imports the program: call it under "
            "`if __name__ == '__main__':`"
        )
    workers = count(workers, "workers")
    if (worker is None) != (workers == 0):
        raise InvalidArgumentError(
            "worker and workers belong together, a function and in how many processes it is "
            f"called, but they were {worker!r} and {workers}"
        )
    asked = limits(restarts, restart_on, grace)
    args = tuple(args)
    calls = [Call("chief", -1, chief, args)]
    if worker is not None:
        calls += [Call("worker", rank, worker, (rank, *args)) for rank in range(workers)]
    before, shares = variables(threads, workers), processors(cpus, workers)
    if before and context != "spawn":
        raise InvalidArgumentError(
            "threads needs context='spawn': in a child that is forked, NumPy is loaded already and "
            f"reads no variables any more; but context was {shown(context)}"
        )

    def arranged(call: Call, surroundings: Surroundings) -> Surroundings:
        cpus, output = shares.get(call.rank), log_files(log_dir, call)
        return surroundings._replace(before=before, cpus=cpus, output=output)

    result: _Result = supervise(calls, context, asked, name, arranged)
    return result


def supervise(
    calls: list[Call],
    context: str,
    asked: Limits,
    name: str | None,
    arranged: Callable[[Call, Surroundings], Surroundings],
    ended: Callable[[Call], None] = lambda _: None,
) -> Any:
    """Run these calls as `run` does, the chief's first; return what the chief returns.

    Args:
        calls: The calls.
        context: The start method.
        asked: How often a process may be restarted, and how long the run's end may take.
        name: The run's name.
        arranged: Adds the caller's options to a child's surroundings.
        ended: Called when a process has ended, with the call that it made.
    """
    starter = Starter(context, calls)
    roles = [str(call) for call in calls]
    with (
        _open_standard_streams(),
        callers_signals() as signals,
        suppress(Interrupted),
        of_children(name, roles, asked.restarts) as surrounded,
    ):
        run = prepared(calls, starter, asked, signals, surrounded, arranged, ended)
        try:
            return run.result()
        except BaseException as error:
            if error is run.raised:
                error.__traceback__ = None  # its note has the child's traceback
            raise
    number = signals.ended_by
    raise CancelledError(f"The run was ended by {signal.Signals(number).name}").with_fields(
        signal=number
    )


@contextmanager
def _open_standard_streams() -> Iterator[None]:
    """In the block, /dev/null is open as each standard stream that the caller has closed.

    Otherwise the run's pipes would get such numbers, and with them what a C library prints.
    """
    opened = open_standard_streams()
    try:
        yield
    finally:
        for descriptor in opened:
            with suppress(OSError):  # the program has closed it
                os.close(descriptor)


def prepared(
    calls: list[Call],
    starter: Starter,
    asked: Limits,
    signals: Any,
    surrounded: Surrounded,
    arranged: Callable[[Call, Surroundings], Surroundings],
    ended: Callable[[Call], None],
) -> Run:
    """Return a run of these calls; see `supervise`."""
    parent = 0 if starter.by_forkserver else os.getpid()
    mask = frozenset(signals.mask - ENDING)
    children = []
    for call in calls:
        environment = {
            names.NAMESPACE_VARIABLE: surrounded.namespace,
            cleaner.VARIABLE: surrounded.cleaner.mark,
            "SHMACC_WORKERS": str(len(calls) - 1),
            "SHMACC_ROLE": call.role,
            "SHMACC_RANK": str(call.rank),
        }
        surroundings = Surroundings(environment, {}, parent, mask, None, None)
        children.append((call, arranged(call, surroundings)))
    return Run(children, starter, asked, signals, surrounded, ended)


def variables(threads: object, workers: int) -> dict[str, str]:
    """Return the environment variables that limit a child's threads."""
    if threads is None:
        return {}
    if threads == "share":
        number = max(1, len(os.sched_getaffinity(0)) // max(1, workers))
    elif isinstance(threads, str) or (number := arguments.int64(threads, "threads")) < 1:
        raise InvalidArgumentError(
            f"threads must be a positive number, 'share' or None, but was {shown(threads)}"
        )
    return dict.fromkeys(_THREADS, str(number))


def processors(cpus: object, workers: int) -> dict[int, frozenset[int]]:
    """Return each worker's processors, by its rank."""
    if cpus is None:
        return {}
    if cpus != "spread":
        raise InvalidArgumentError(f"cpus must be 'spread' or None, but was {shown(cpus)}")
    usable = sorted(os.sched_getaffinity(0))
    if workers > len(usable):
        raise InvalidArgumentError(
            f"cpus='spread' needs a processor for each of {workers} workers, but this process may "
            f"use {len(usable)}"
        )
    ends = [len(usable) * rank // max(1, workers) for rank in range(workers + 1)]
    return {rank: frozenset(usable[ends[rank] : ends[rank + 1]]) for rank in range(workers)}


def log_files(log_dir: str | os.PathLike[str] | None, call: Call) -> tuple[str, str] | None:
    """Make the folder; return the files in it for a child's standard output and error."""
    if log_dir is None:
        return None
    try:
        folder = os.path.abspath(os.fsdecode(log_dir))
    except TypeError:
        raise InvalidArgumentError(
            f"log_dir must be the path of a folder, but was {shown(log_dir)}"
        ) from None
    os.makedirs(folder, exist_ok=True)
    stem = os.path.join(folder, str(call).replace(" ", "-"))
    return f"{stem}.out", f"{stem}.err"


def limits(restarts: object, restart_on: object, grace: object) -> Limits:
    """Return the limits that the caller asks for."""
    number = count(restarts, "restarts")
    if restart_on not in {"killed", "failure"}:
        raise InvalidArgumentError(
            f"restart_on must be 'killed' or 'failure', but was {shown(restart_on)}"
        )
    wait = arguments.timeout(grace, "grace")
    return Limits(number, restart_on == "failure", math.inf if wait is None else wait)


def count(value: object, what: str) -> int:
    """Return a checked number of processes or restarts."""
    number = arguments.int64(value, what)
    if number < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but was {number}")
    return number
