"""Finds the parts of an existing group, and makes owners.

The owner is on the node of the chief that made it: if it were elsewhere, a cut link between these
two nodes would stop rounds for all hosts. If the owner dies, the next chief that calls it makes
another one on its own node. Ray must not restart an owner: it would choose any node. And if the
node that schedules a new owner is lost, Ray would restart the owner although it never ran: as a
restarted owner, it would not know the step, and refuse the group's first round.
"""

import contextlib
import logging
import time
from typing import Any

import ray

from shmacc._base.names import segment_name
from shmacc._segment import removal
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError, ShmaccError
from shmacc.ray._head import answer_of_head, living_nodes, shown
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import LOST, NAMESPACE, Config, counters_of, find_actor, make_actor, on_nodes
from shmacc.ray._waits import ANSWER, left_until, result_of

_logger = logging.getLogger("shmacc")

_AGAIN = 0.1  # seconds until Ray is asked to start an owner once more
_LOOK = 0.05  # seconds between two attempts to find a group
_CONFIG = 10.0  # seconds for an actor to return its group's config


def find_group(name: str, seconds: float | None, until: float) -> Config:
    """Return the config of the cluster's group of that name; wait for it as in `attach`."""
    end = time.monotonic() + (seconds or 0.0)
    while (config := find_config(name, until)) is None:
        missing = f"The cluster has no group {name!r}"
        if seconds is None:
            raise NotFoundError(missing).with_fields(shared_name=name)
        if time.monotonic() >= end:
            raise DeadlineExceededError(f"{missing}, after {seconds:g} seconds")
        time.sleep(_LOOK)
    return config


def find_config(name: str, until: float) -> Config | None:
    """Return the config of the cluster's group of that name; None: there is no such group.

    If its owner has died, the actors of its hosts know the config.
    """
    nodes = {f"{name}/host {node}": node for node in sorted(living_nodes(None, until))}
    calls: dict[Any, str] = {}
    # Ask the owner; if it does not answer in a second, ask all hosts, since some may be stopped.
    for parts, seconds, share in ([f"{name}/owner"], ANSWER, 0.5), (nodes, _CONFIG, 1.0):
        actors = {part: find_actor(part, until) for part in parts}
        calls |= {each.config.remote(): part for part, each in actors.items() if each is not None}
        now = time.monotonic()
        end = now + min(seconds, share * (until - now))
        while ended := ray.wait(list(calls), timeout=left_until(end))[0]:
            del calls[ended[0]]
            with contextlib.suppress(*LOST):
                config: Config = ray.get(ended[0])
                return config
    if calls:
        silent = [
            "its owner" if part not in nodes else shown(nodes[part]) for part in calls.values()
        ]
        raise DeadlineExceededError(
            f"These parts of {name!r} do not answer: {', '.join(silent)}. They are stopped, or "
            "their nodes are cut off"
        )
    return None


def groups_of(parameters: str, until: float) -> list[Config]:
    """Return the configs of the cluster's groups that belong to parameters of this name.

    Raises:
        DeadlineExceededError: Ray's head does not answer. (Groups that do not answer are left out.)
    """

    def ask() -> set[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        parts = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
        return {part.rpartition("/")[0] for part in parts}

    found = []
    for name in answer_of_head("groups", ask, until):
        with contextlib.suppress(DeadlineExceededError):
            config = find_config(name, until)
            if config is not None and config.parameters == parameters:
                found.append(config)
    return found


def check_unused(names: list[str], groups: list[str], nodes: set[str], until: float) -> None:
    """Refuse to replace segments that living processes use, other than the actors of `groups`.

    Raises:
        FailedPreconditionError: Processes of a node have a segment of one of `names` attached.
    """
    actors = [counters_of(group) for group in groups]
    for node, used in sorted(on_nodes(nodes, _used, names, actors, until=until).items()):
        for name, pids in used.items():
            raise FailedPreconditionError(
                f"Node {shown(node)}: {name!r} is in use by living processes: "
                f"{', '.join(f'pid {pid}' for pid in pids)}. Nothing was replaced"
            ).with_fields(segment=segment_name(name).system_name, pids=pids)


def _used(names: list[str], actors: list[str]) -> dict[str, tuple[int, ...]]:
    """Return, for each of these names that is in use on this node, the pids of its living users.

    Processes that also use one of the names in `actors` do not count: they are groups' actors.
    """

    def users(name: str) -> set[int]:
        with (
            contextlib.suppress(ShmaccError),  # the caller that opens it gets the error
            contextlib.closing(removal.view(segment_name(name))) as viewed,
        ):
            return set(removal.users(viewed))
        return set()

    theirs = set[int]().union(*map(users, actors))
    found = {name: tuple(sorted(users(name) - theirs)) for name in names}
    return {name: pids for name, pids in found.items() if pids}


def make_owner(config: Config, step: int | None, until: float) -> tuple[Any, Config, str]:
    """Make the owner on this process's node, or find it; return owner, config, and its node."""
    here = ray.get_runtime_context().get_node_id()
    while True:
        given = ray.remote(OwnerActor), config.actor("owner"), here, config, step, here
        owner = make_actor(*given, until=until, max_concurrency=10_000)
        try:
            known: tuple[Config, str] = result_of(owner.place.remote(), until)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceededError(
                f"The owner of {config.name!r} does not answer: it is just being started, or is "
                "stopped, or cut off"
            ) from None
        except LOST as error:  # the owner has died, or the node that was to schedule it
            if time.monotonic() > until:
                raise FailedPreconditionError(
                    f"Ray does not start the owner of {config.name!r}: {error}"
                ) from error
            time.sleep(_AGAIN)
        else:
            return owner, *known


def warn_of_left(name: str, nodes: list[str]) -> None:
    """Log which nodes may still have names of a removed group in /dev/shm."""
    if nodes:
        _logger.warning(
            "Nodes that did not answer may have names of %r left in /dev/shm: %s",
            name,
            shown(*nodes),
        )
