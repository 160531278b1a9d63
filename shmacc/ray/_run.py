"""`shmacc.ray.run`: a chief and workers on all nodes of a cluster, as `shmacc.run` on one host."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, TypeVar

import ray

from shmacc._base import names
from shmacc._base.shown import shown
from shmacc._run.children import Interrupted
from shmacc._run.record import Called
from shmacc._run.run import count, limits, variables
from shmacc._run.signals import callers_signals
from shmacc.errors import CancelledError, FailedPreconditionError, InvalidArgumentError
from shmacc.ray._exchange import Plan
from shmacc.ray._parts import check_connected, connect
from shmacc.ray._run_nodes import START, Cluster

_Result = TypeVar("_Result")

_ANSWER = 20.0  # seconds for the cluster's head to accept a connection


def run(
    chief: Callable[..., _Result],
    worker: Callable[..., object] | None = None,
    *,
    workers_per_node: int = 0,
    args: Iterable[Any] = (),
    restarts: int = 3,
    restart_on: Literal["killed", "failure"] = "killed",
    context: str = "spawn",
    grace: float = 5.0,
    name: str | None = None,
    threads: int | Literal["share"] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> _Result:
    """As `shmacc.run`, over a Ray cluster: workers on every node; return what the chief returns.

    The chief runs on this process's node, and is started again there; if that node is gone, on
    another one. Each node, also one that joins later, has `workers_per_node` workers. Their ranks
    are unique in the cluster. They stay with their place: a node that joins takes the place of one
    that is gone, if there is any. Ray is the one that this process is connected to, or that of
    ``RAY_ADDRESS``, or what ``ray.init()`` finds.

    The processes of a node have a namespace of their own inside that of Ray's processes there, and
    the actors that the chief makes are this run's. At the end no process, name or actor of the run
    is left on any node. If this process is killed, that takes some seconds.

    In the environment are ``SHMACC_NODE`` (the node's id, as Ray knows it) and what `shmacc.run`
    sets; there, ``SHMACC_WORKERS`` is `workers_per_node`. `shmacc.ray` connects a process of the
    run to the cluster by itself. Workers that attach to `shmacc`'s classes need no connection.
    Logger ``shmacc`` names node and process. Signals are as for `shmacc.run`.

    Args:
        chief: A function. Ray pickles it: by value if it is defined in the program; else its module
            must be there on the nodes.
        worker: Likewise; it is called with its rank and `args`.
        workers_per_node: How many processes call `worker` on each node.
        args: As for `shmacc.run`; Ray pickles them, too.
        restarts: As there.
        restart_on: As there.
        context: As there, but not ``"fork"``, since Ray's processes have threads.
        grace: As there.
        name: As there. To go on with a run, call this again on the same cluster.
        threads: As there; on each node by its own processors.
        output: The path of a folder, which each node makes if it is not there. What a process
            prints is appended to ``chief.out``, ``chief.err``, ``worker-0.out``, ... in it. None:
            to this process's output, each line after its process and node.

    Raises:
        InvalidArgumentError: A bad argument, or a function or argument that does not pickle.
        FailedPreconditionError: There is no cluster; or a node has no shmacc or another version of
            it, or no namespace where this one has one; or a run of that name is under way; or the
            chief's result does not pickle.
        DeadlineExceededError: A node did not start its part within two minutes.
        WorkerDiedError, CancelledError, OSError, BaseException: As for `shmacc.run`; the message
            or a note names the node.
    """
    workers = count(workers_per_node, "workers_per_node")
    if (worker is None) != (workers == 0):
        raise InvalidArgumentError(
            "worker and workers_per_node belong together, a function and in how many processes of "
            f"each node it is called, but they were {worker!r} and {workers}"
        )
    if context not in {"spawn", "forkserver"}:
        raise InvalidArgumentError(
            f"Over hosts context must be 'spawn' or 'forkserver', but was {shown(context)}"
        )
    if variables(threads, workers) and context != "spawn":
        raise InvalidArgumentError("threads needs context='spawn'")
    args = tuple(args)
    plan = Plan(
        pickled("chief", chief, args),
        worker and pickled("worker", worker, args),
        workers,
        answers=True,
        context=context,
        limits=limits(restarts, restart_on, grace),
        threads=threads,
        output=None if output is None else os.path.abspath(os.fsdecode(output)),
        called=Called.here(),
    )
    result: _Result = over_cluster(plan, name)
    return result


def over_cluster(plan: Plan, name: str | None, address: str | None = None) -> Any:
    """Do what is planned, on the nodes of the cluster at this address; return chief's result."""
    random = f"run-{os.getpid()}-{os.urandom(6).hex()}"
    run = random if name is None else names.checked_namespace(name, "name")
    with _connected(address):
        until = time.monotonic() + START
        check_connected(until)
        with callers_signals() as signals, suppress(Interrupted):
            return Cluster(run, plan, signals, named=name is not None).result(until)
    number = signals.ended_by
    raise CancelledError(f"The run was ended by {signal.Signals(number).name}").with_fields(
        signal=number
    )


def pickled(role: str, function: object, args: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments, pickled by value."""
    if not callable(function):
        raise InvalidArgumentError(f"The {role} must be a function, but was {function!r}")
    try:
        return bytes(ray.cloudpickle.dumps((function, args)))
    except Exception as error:
        raise InvalidArgumentError(
            f"The {role} {function!r} and its arguments must pickle, to be sent to the nodes: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Be connected to Ray in the block; Ray's handler of SIGTERM goes again."""
    if ray.is_initialized():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, colon, port = where.rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:  # Ray would try it for five minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
        connect(address)
    except Exception as error:
        reason = (str(error.__cause__ or error).strip() or repr(error)).splitlines()[-1]
        raise FailedPreconditionError(
            f"A Ray cluster was expected at {where}, and this process cannot connect: {reason}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    try:
        yield
    finally:
        ray.shutdown()
