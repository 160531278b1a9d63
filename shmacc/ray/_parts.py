"""The actors' config, how actors are found, and the records that a chief gets."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._base import names
from shmacc._base.layout import LAYOUT_VERSION
from shmacc._multihost.messages import Timing
from shmacc._parameters.copies import Recipe
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values.specs import TensorSpec
from shmacc._version import __version__
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError
from shmacc.ray._head import MOMENT, answer_of_head, soon
from shmacc.ray._waits import wait_for_all

RUN_VARIABLE = "SHMACC_RAY_RUN"  # has a run's name, and a number for this call of `run`
ADDRESS_VARIABLE = "SHMACC_NODE_ADDRESS"  # has the address of a run's node, as Ray knows it


VERSION = __version__, LAYOUT_VERSION
_LOADED = 30.0  # seconds for a node to load the library


def namespace_of(run: str) -> str:
    """Return the Ray namespace of a run's actors, which is unrelated to SHMACC_NAMESPACE."""
    return f"shmacc.{run}" if run else "shmacc"


NAMESPACE = namespace_of(os.environ.get(RUN_VARIABLE, "").partition("/")[0])
"""The Ray namespace of the actors that this process makes or looks for."""

_BY_CLIENT = (
    "Ray Client (ray://) connects a process that may be outside of the cluster, and shmacc.ray "
    "needs the shared memory of a node: run the program on a node, or by `ray job submit`"
)

_namespaces: dict[str, str | None] = {}  # by node: its SHMACC_NAMESPACE, once it has answered

DIED = ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError
"""Errors of a call whose actor has died; OutOfMemoryError: Ray's memory monitor killed it."""

LOST = (
    *DIED,
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.ActorUnschedulableError,
)
"""Errors of a call whose actor has died, is out of reach, or was never placed on its node."""


@dataclass(frozen=True)
class Source:
    """The reference by which a node gets a change.

    An argument that is a bare reference would make Ray fetch the change to the owner's node first.
    """

    ref: Any  # Ray's reference to the change


@dataclass(frozen=True)
class CopyConfig:
    """All that a node's actor needs to make its copy of the parameters."""

    name: str  # its shared_name
    recipe: Recipe  # its arrays and tables
    home: str  # the node of the chief, which has made its copy already
    mode: int | None
    owners: Owners
    if_exists: IfExists  # what to do with copies that other nodes have from earlier
    keep: int | None = None  # bytes of updates that a node keeps; None: a quarter of the copy

    def options(self, if_exists: IfExists) -> Options:
        return Options(
            mode=self.mode, owners=self.owners, if_exists=if_exists, unlink_on_close=False
        )


@dataclass(frozen=True)
class Config:
    """The arguments of a group, from the chief that made it. All parts of the group have them."""

    name: str  # the group's shared_name
    members: dict[str, TensorSpec]
    reduction: str  # of members without their own
    options: dict[str, Any]  # for the segments: mode, owners, if_exists, lanes, capacity
    shards: int  # the number of shards
    hosts: frozenset[str] | None  # the ids of the nodes that take part; None: all
    timing: Timing
    number: int  # unique; a segment with this number belongs to this group
    copy: CopyConfig | None = None  # the parameters that the group belongs to; None: it has none
    version: tuple[str, int] = VERSION  # the chief's

    @property
    def parameters(self) -> str | None:
        """The shared_name of the parameters that the group belongs to; None: it has none."""
        return None if self.copy is None else self.copy.name

    def actor(self, part: str) -> str:
        return f"{self.name}/{part}"


def counters_of(name: str) -> str:
    """Return the shared_name of a group's counters on each node."""
    return f"{name}.forwarder"


def remove_names(config: Config) -> None:
    """Remove the names that an ended actor of this group has left here; spare other groups."""
    name = config.name
    with (
        contextlib.suppress(NotFoundError),
        SharedArrays.attach(counters_of(name), owners="any") as counters,
    ):
        if counters["group"] == config.number:  # then the segment is this group's
            with (
                contextlib.suppress(NotFoundError),
                AccumulatorGroup.attach(name, owners="any") as group,
            ):
                group.finish()  # nobody will take from it
                group.unlink()
        if config.number in {int(counters["group"]), int(counters["copy"])}:
            counters.unlink()


def find(config: Config, part: str) -> Any | None:
    """Return the handle of an actor; None: there is none now, or Ray's head is too slow to answer.

    For callers that ask again later: a forwarder, whose thread must not wait, and a chief's round.
    """
    try:
        return find_actor(config.actor(part), -math.inf, late=True)
    except DeadlineExceededError:
        return None


def find_actor(
    name: str, until: float | None = None, *, late: bool = False, namespace: str = NAMESPACE
) -> Any | None:
    """Return the handle of an actor of that name; None: there is none now.

    `until` and `late` are as for `answer_of_head`, but this waits at least for a moment.
    """

    def ask() -> Any | None:
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            return None

    end = None if until is None else max(until, soon(MOMENT))
    return answer_of_head(f"actor {name}", ask, end, late=late)


def make_actor(
    kind: Any,
    name: str,
    node: str,
    *args: Any,
    until: float | None = None,
    namespace: str = NAMESPACE,
    lifetime: str = "detached",
    **options: Any,
) -> Any:
    """Make an actor on a node, or find an actor of that name, which may be on another node.

    If Ray's head has not answered by `until`, the actor may still be made.
    """
    made = kind.options(
        name=name,
        namespace=namespace,
        lifetime=lifetime,
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        **options,
    )
    return answer_of_head(f"new actor {name}", lambda: made.remote(*args), until)


def on_nodes(
    nodes: Collection[str], function: Callable[..., Any], *args: Any, until: float
) -> dict[str, Any]:
    """Call a function in a task on each of these nodes; return the answers, by node.

    The result lacks nodes that were lost or did not answer by `until`.
    """

    def ask() -> dict[Any, str]:
        """Start the tasks; if the function is new to Ray, this asks Ray's head about it."""
        kind = ray.remote(num_cpus=0)(function)
        on = {n: NodeAffinitySchedulingStrategy(n, soft=False) for n in nodes}
        return {kind.options(scheduling_strategy=on[n]).remote(*args): n for n in nodes}

    found: dict[str, Any] = {}
    calls = answer_of_head(f"{function.__name__} {args}", ask, until)
    for call in wait_for_all(list(calls), until):
        try:
            found[calls[call]] = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError:
            continue
    return found


def connect(address: str | None = None) -> None:
    """Connect to the cluster at `address`, else at RAY_ADDRESS, else to the cluster of this node.

    A run over hosts sets RAY_ADDRESS in its processes to the run's cluster.

    Raises:
        FailedPreconditionError: The address begins with ``ray://``, which is for Ray Client.
    """
    if (address or os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        raise FailedPreconditionError(_BY_CLIENT)
    ray.init(address, _node_ip_address=os.environ.get(ADDRESS_VARIABLE))


def check_connected(until: float | None = None) -> None:
    """Check that this process is connected to Ray, and has the namespace of Ray on its node.

    A process of a run over hosts is connected if it is not yet.
    """
    if not ray.is_initialized():
        if RUN_VARIABLE not in os.environ:
            raise FailedPreconditionError("Connect to a Ray cluster first: ray.init()")
        connect()
    if ray.util.client.ray.is_connected():
        raise FailedPreconditionError(_BY_CLIENT)
    context, ours = ray.get_runtime_context(), names.current_namespace()
    if context.worker.mode == ray.WORKER_MODE:
        return  # Ray on this node has started this process, with its own namespace
    node = context.get_node_id()

    def ask() -> None:
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(names.current_namespace).options(num_cpus=0, scheduling_strategy=here)
        # This is in `ask`, since Ray asks its head about a function that is new to it.
        _namespaces[node] = ray.get(task.remote())

    if node not in _namespaces:
        answer_of_head("namespace", ask, until)
    theirs = _namespaces[node]
    if ours != theirs:
        raise FailedPreconditionError(
            f"{names.NAMESPACE_VARIABLE} is {ours!r} in this process, and {theirs!r} in Ray's on "
            "its node: they would not find each other's segments. Start both with the same"
        )


@dataclass(frozen=True)
class HostState:
    """A host, as the owner knows it.

    Attributes:
        alive: Whether it has reported lately.
        accumulated: How many of its gradients the next round can have.
        problem: Why it cannot take part in the group (the owner will try again); or what is wrong
            with its copy of the parameters, for example that its name was removed.
        step: The step of its segment; None: it has no segment yet.
    """

    alive: bool
    accumulated: int
    problem: str | None = None
    step: int | None = None


State = tuple[int | None, int, dict[str, HostState], dict[str, int]]
"""The owner's step (None: not known), the number of gradients, the hosts, and the counters."""


def check_version(expected: tuple[str, int]) -> None:
    """Refuse a node whose library has another version than the caller's, which is `expected`."""
    if expected != VERSION:
        raise FailedPreconditionError(
            "it has shmacc {} with layout version {}, and {} with {} is expected".format(
                *VERSION, *expected
            )
        )


def why_not(node: str) -> str | None:
    """Return why the library cannot be used on a node; None: it can, or there is no answer."""
    try:
        on_nodes({node}, check_version, VERSION, until=time.monotonic() + _LOADED)
    except Exception as error:  # noqa: BLE001  the node has raised it
        return str(error).strip().splitlines()[-1].strip()
    return None


class IncompleteError(Exception):
    """A shard does not have all pieces of a round, or is lost."""
