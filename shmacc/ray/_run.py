"""`shmacc.ray.run`: runs a chief and workers on a cluster, as `shmacc.run` does on one host."""

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
    """Run workers on every node of a Ray cluster, as `shmacc.run`; return what the chief returns.

    The chief runs on this process's node, and is restarted there. If the node is gone, the chief
    is restarted on another node. Each node, even if it joins later, has `workers_per_node` workers.
    Their ranks are unique in the cluster. If a node is gone, the next node that joins gets its
    workers' ranks. The cluster is the one that this process is connected to, else the one at
    ``RAY_ADDRESS``, else what ``ray.init()`` finds.

    The processes of a node have a namespace of their own inside the namespace of Ray's processes
    there. The actors that the chief makes belong to this run. At the end no process, name or actor
    of the run is left on any node; if this process is killed, this takes some seconds.

    The environment has ``SHMACC_NODE`` (the node's id, as Ray knows it) and the variables of
    `shmacc.run`, where ``SHMACC_WORKERS`` is `workers_per_node`. `shmacc.ray` connects a process of
    the run to the cluster by itself. Workers that attach to `shmacc`'s classes need no connection.
    Messages of logger ``shmacc`` name node and process. Signals are as for `shmacc.run`.

    Args:
        chief: A function. Ray pickles it by value if the program defines it; else its module must
            exist on the nodes.
        worker: A function, pickled like `chief`; it is called with its rank and `args`.
        workers_per_node: How many processes call `worker` on each node.
        args: As for `shmacc.run`, but pickled by Ray.
        restarts: As for `shmacc.run`.
        restart_on: As for `shmacc.run`.
        context: As for `shmacc.run`, but not ``"fork"``, since Ray's processes have threads.
        grace: As for `shmacc.run`.
        name: As for `shmacc.run`. To continue a run, call this again on the same cluster.
        threads: As for `shmacc.run`; each node counts its own processors.
        output: The path of a folder, which each node makes if needed. The output of each process is
            appended to ``chief.out``, ``chief.err``, ``worker-0.out``, ... in this folder. None:
            this process prints the output, with process and node before each line.

    Raises:
        InvalidArgumentError: A bad argument, or a function or argument that cannot be pickled.
        FailedPreconditionError: There is no cluster; or a node has no shmacc or another version of
            it, or no namespace although this node has one; or a run of this name is in progress; or
            the chief's result cannot be pickled.
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
    """Run the plan on the nodes of the cluster at this address; return the chief's result."""
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
    """Return a function and its arguments, pickled by Ray."""
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
    """Connect to Ray for the block, if necessary; undo Ray's change of the handler of SIGTERM."""
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
