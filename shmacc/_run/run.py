"""`shmacc.run`: a chief and workers in processes that are started again if they are killed.

No other module needs this one: threads, asyncio and other launchers do without it.
"""

import math
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal, TypeVar

from shmacc import _child_errors
from shmacc._base import names
from shmacc._base.shown import shown
from shmacc._run import child as child_side
from shmacc._run.child import Call
from shmacc._run.children import Interrupted, Limits, Run
from shmacc._run.namespaces import of_children
from shmacc._values import arguments
from shmacc.errors import CancelledError, FailedPreconditionError, InvalidArgumentError

_Result = TypeVar("_Result")


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
    with _noted_signals() as signals, suppress(Interrupted), of_children(name) as namespace:
        environment = {names.NAMESPACE_VARIABLE: namespace, "SHMACC_WORKERS": str(workers)}
        limits = Limits(restarts, restart_on == "failure", math.inf if wait is None else wait)
        result: _Result = Run(calls, processes, environment, limits, signals).result()
        return result
    raise CancelledError(f"The run was ended by {signal.Signals(signals[0]).name}")


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
        # A pickle names the module of everything in it, as of the function in a partial.
        if b"\x8c\x08__main__" in pickled and not program.get("__file__"):
            raise InvalidArgumentError(
                f"The {call.role} {call.function!r} is defined in a notebook or at a prompt, from "
                "which a child cannot import it: put it into a module, or use context='fork'"
            )
    return context


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect signals that ask for an end in a list; after the block, send the first one again."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # None: not Python's handler. What is ignored, as SIGINT by a script's background job
            # or SIGHUP under nohup, stays ignored.
            if signal.getsignal(number) not in {None, signal.SIG_IGN}:
                child_side.handlers[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        child_side.restore_handlers()
        if came:  # also if the run has ended by an error meanwhile
            signal.raise_signal(came[0])
