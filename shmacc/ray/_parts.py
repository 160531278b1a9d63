"""The actors' config, how actors are found, and the records that a chief gets."""

import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc._accumulators.taken import GroupTaken
from shmacc._base import names
from shmacc._multihost.messages import Opened, Share, Timing
from shmacc._parameters.copies import Recipe
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values.specs import TensorSpec
from shmacc.errors import DeadlineExceededError, FailedPreconditionError
from shmacc.ray._head import MOMENT, answer_of_head, shown, soon
from shmacc.ray._waits import PATIENCE, until_asked

if TYPE_CHECKING:
    from shmacc._base.array_types import IndexArray

NAMESPACE = "shmacc"
"""Ray's namespace of the actors; has nothing to do with SHMACC_NAMESPACE."""

_namespaces: dict[str, str | None] = {}  # by node, as far as this process has asked

DIED = ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError
"""What a call raises if its actor has died; OutOfMemoryError: Ray's memory monitor killed it."""

LOST = (
    *DIED,
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.ActorUnschedulableError,
)
"""What a call raises if its actor has died, is out of reach, or never got a place on its node."""


@dataclass(frozen=True)
class Source:
    """Where a node gets a change from. Ray would fetch a bare reference before the owner's call."""

    ref: Any  # Ray's reference to the change


@dataclass(frozen=True)
class CopyConfig:
    """What every node's copy of the parameters is like."""

    name: str  # its shared_name
    recipe: Recipe  # its arrays and tables
    mode: int | None
    owners: Owners
    home: str  # the node of the chief that made the parameters: its copy is there already
    replace: bool  # whether the other nodes' copies of earlier are removed

    def options(self, if_exists: IfExists) -> Options:
        return Options(
            mode=self.mode, owners=self.owners, if_exists=if_exists, unlink_on_close=False
        )


@dataclass(frozen=True)
class Config:
    """All that the parts of a group must know, as the first chief gave it."""

    name: str  # the group's shared_name
    members: dict[str, TensorSpec]
    reduction: str  # of members without their own
    options: dict[str, Any]  # for the segments: mode, owners, if_exists, lanes, capacity
    shards: int  # how many there are
    hosts: frozenset[str] | None  # the ids of the nodes that take part; None: all
    timing: Timing
    number: int  # unique: by it a segment is known to be this group's
    copy: CopyConfig | None = None  # the parameters that the group belongs to; None: it has none

    @property
    def parameters(self) -> str | None:
        """The shared_name of the parameters that the group belongs to; None: it has none."""
        return None if self.copy is None else self.copy.name

    def actor(self, part: str) -> str:
        return f"{self.name}/{part}"


def counters_of(name: str) -> str:
    """Return the shared_name of a group's counters on its node."""
    return f"{name}.forwarder"


def find(config: Config, part: str) -> Any | None:
    """Return the handle of an actor; None: there is none now, or Ray's head does not say at once.

    For callers that look again: a forwarder, whose thread must not wait, and a chief in a round.
    """
    try:
        return find_actor(config.actor(part), -math.inf, late=True)
    except DeadlineExceededError:
        return None


def find_actor(name: str, until: float | None = None, *, late: bool = False) -> Any | None:
    """Return the handle of an actor of that name; None: there is none now.

    `until` and `late` are as for `answer_of_head`; a moment is waited in any case.
    """

    def ask() -> Any | None:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    end = None if until is None else max(until, soon(MOMENT))
    return answer_of_head(f"actor {name}", ask, end, late=late)


def make_actor(
    kind: Any, name: str, node: str, *args: Any, until: float | None = None, **options: Any
) -> Any:
    """Make an actor on a node, or find the one of that name, which need not be on this node.

    If Ray's head has not answered by `until`, the actor may still be made.
    """
    made = kind.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        **options,
    )
    return answer_of_head(f"new actor {name}", lambda: made.remote(*args), until)


def check_connected(until: float | None = None) -> None:
    """Refuse a process that is not connected to Ray, or whose namespace is not that of its node."""
    if not ray.is_initialized():
        raise FailedPreconditionError("Connect to a Ray cluster first: ray.init()")
    context, ours = ray.get_runtime_context(), names.current_namespace()
    if context.worker.mode == ray.WORKER_MODE:
        return  # Ray on this node has started this process, with its own namespace
    node = context.get_node_id()

    def ask() -> None:
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(names.current_namespace).options(num_cpus=0, scheduling_strategy=here)
        # Ray asks its head about a function that is new to it.
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
        accumulated: How many of its gradients count.
        problem: Why it has no part in the group; the owner tries again.
        step: The step of its segment; None: it has none yet.
    """

    alive: bool
    accumulated: int
    problem: str | None = None
    step: int | None = None


State = tuple[int | None, int, dict[str, HostState], dict[str, int]]
"""The owner's step, if it knows one; how many gradients there are, the hosts, the counters."""


class IncompleteError(Exception):
    """A shard does not have all pieces of a round, or is lost."""


class Shard:
    """A part of a round, which stays at its shard: rows whose numbers hash to the shard.

    Attributes:
        number: The shard's number.
    """

    def __init__(
        self, number: int, actor: Any, opened: Opened, lost: Callable[[], Collection[str]]
    ) -> None:
        self.number = number
        self._actor = actor
        self._opened = opened
        self._lost = lost

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(taken, *args)``, called where the rows are.

        ``taken`` is a mapping as a round hands out, with this shard's rows; a large dense member is
        a run of its elements, flat. A member that has nothing at this shard is left out. The count
        and weight of a sparse member are those of hosts that have rows of it here;
        `ShardedTaken.members` has those of the whole round.

        Raises:
            Whatever the function raises. If the shard has died, RayActorError; if its node has been
            lost for a minute, DeadlineExceededError. Let the error leave the block: then the next
            round has the same gradients.
        """
        share = Share.of(self._opened, self.number)
        call = self._actor.run.remote(self.number, share, function, args)
        node, heard = self._opened.shard_hosts[self.number], time.monotonic()
        while not ray.wait([call], timeout=until_asked())[0]:
            if node not in self._lost():  # a function that keeps the GIL stops the node's heartbeat
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE:
                raise DeadlineExceededError(
                    f"Shard {self.number} on node {shown(node)} does not answer: it is stopped, or "
                    "cut off"
                )
        try:
            return ray.get(call)
        except IncompleteError:
            raise ray.exceptions.RayActorError(
                error_msg=f"The host of shard {self.number} has its part no more: it was started "
                "again, or the round has ended"
            ) from None

    def fetch(self) -> GroupTaken:
        """Return this part of the round."""
        taken: GroupTaken = self.run(lambda taken: taken)
        return taken


class ShardedTaken:
    """A round that was not fetched: for tables that no chief can hold.

    Attributes:
        count: How many gradients were reduced.
        step: The step that the round closes.
        weight: The total weight of these gradients.
        contributors: int64, ascending: the contributors that gradients named.
        members: From member to the count and weight of its gradients.
        shards: The parts.
    """

    def __init__(
        self, opened: Opened, members: dict[str, tuple[int, int]], shards: tuple[Shard, ...]
    ) -> None:
        self.count: int = opened.count
        self.step: int = opened.step
        self.weight: int = opened.weight
        self.contributors: IndexArray = opened.contributors
        self.members = members
        self.shards = shards

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(taken, *args)`` returns at each shard; all run at once."""
        with ThreadPoolExecutor(max(1, len(self.shards))) as pool:
            return list(pool.map(lambda shard: shard.run(function, *args), self.shards))
