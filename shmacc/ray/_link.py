"""What a chief's group and its rounds have in common: the way to the owner.

The owner is on the node of the chief that made it, and nowhere else: a link between the two that
is cut would cost a round that all others could have. If it dies, the next chief that calls it makes
another one, on its own node, which does not know the step until it is told. Ray starts none again:
it would take any node, and it counts an owner that has never been anywhere as one that died, if the
node that was to find a place for it is lost; such an owner would refuse rounds from the start.

Every call ends: with an answer, or with an error that says which part on which node did not give
one. A part may be stopped or swapped out and not dead, and Ray never tells.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

from shmacc._multihost.pieces import Plan
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, FinishedError
from shmacc.ray._head import kill
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import LOST, Config, find, find_actor, living_nodes, make_actor

_logger = logging.getLogger("shmacc")

PARKED = 1.0
"""Seconds that a call waits at the owner: also the chief's heartbeat."""

PATIENCE = 60.0
"""Seconds that a call which waits for nothing has for its answer."""

ANSWER = 1.0
"""Seconds that an answer may take after the time that its call was to wait."""

LOOK = 10.0
"""Seconds that a part has to say what its group was made with."""

_HEAD = 3.0  # seconds that Ray's head, or an owner that starts, has at least for an answer
_AGAIN = 0.1  # until a call that failed is tried again
_END = 15.0  # seconds that parts have to remove their names


class Wait:
    """A wait for something that the owner has to say, which calls it again and again meanwhile.

    Args:
        seconds: How long; None: for ever.

    Attributes:
        until: The time (monotonic) by which an answer must have come.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.until: float = self._end + ANSWER

    def parked(self) -> float:
        """Return for how many seconds the owner may keep the next call."""
        return max(0.0, min(PARKED, self._end - time.monotonic()))

    def left(self) -> float | None:
        """Return for how many seconds to wait for an answer now; None: for ever."""
        return None if math.isinf(self.until) else max(0.0, self.until - time.monotonic())

    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self._end


class _Gates:
    """Which hosts' gates this process has closed, by what closed them; of all handles of a group.

    An owner that takes the place of another one must know them before it hands on a step, and any
    handle may be the one that sets it.
    """

    def __init__(self) -> None:
        self._closed: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def note(self, hosts: Collection[str], by: str, *, closed: bool) -> None:
        """Note them, before the owner is told."""
        with self._lock:
            noted = self._closed.setdefault(by, set())
            (noted.update if closed else noted.difference_update)(hosts)

    def tell(self, owner: Any) -> None:
        """Tell the owner of the closed ones; what it is told later, in its order, comes later."""
        with self._lock:
            for by, hosts in self._closed.items():
                if hosts:
                    owner.gate.remote(frozenset(hosts), by, closed=True)


_gates: dict[int, _Gates] = {}
"""Of the groups, by their numbers."""


class Link:
    """A chief's way to the owner.

    Args:
        config: What the group is to be made with, if there is none of this name.
        step: Of the owner, if there is none; None: the group is there, and the owner has died.
        until: The time (monotonic) by which the owner must answer; None: `PATIENCE` from now.

    Attributes:
        config: What the group was made with.
        plan: Which row is at which shard.
        closed: Whether the chief has let go of the group.
    """

    def __init__(self, config: Config, step: int | None, until: float | None = None) -> None:
        self.config: Config
        owner, self.config, self._node = _make_owner(config, step, until)
        self._gates = _gates.setdefault(self.config.number, _Gates())
        self._gates.tell(owner)  # it may have died, and be another one now
        self._owner = owner
        self.plan: Plan = Plan(self.config.members, self.config.shards)
        self.closed = False
        self._hosts: dict[str, Any] = {}

    def host(self, name: str) -> Any | None:
        """Return the actor of a host; None: there is none now, and the owner makes another."""
        if name not in self._hosts and (found := find(self.config, f"host {name}")) is not None:
            self._hosts[name] = found
        return self._hosts.get(name)

    def lost_host(self, name: str) -> None:
        """Find the actor of a host again: it has ended."""
        self._hosts.pop(name, None)

    def call(
        self,
        method: str,
        *args: Any,
        until: float | None = None,
        **options: Any,
    ) -> Any:
        """Call the owner; again, and another one, if it is lost. All its methods may be repeated.

        Args:
            method: Of `OwnerActor`.
            *args: Its arguments.
            until: The time (monotonic) until which it has to answer; None: `PATIENCE` from now.
            **options: Its options.

        Raises:
            FailedPreconditionError: The handle is closed, or the group was removed.
            DeadlineExceededError: The owner has not answered.
        """
        if self.closed:
            raise FailedPreconditionError("The group is closed")
        end = time.monotonic() + PATIENCE if until is None else until
        while True:
            left = None if math.isinf(end) else max(0.0, end - time.monotonic())
            try:
                return ray.get(getattr(self._owner, method).remote(*args, **options), timeout=left)
            except ray.exceptions.GetTimeoutError:
                raise self._no_answer() from None
            except LOST as error:
                if time.monotonic() > end:
                    raise self._no_answer() from error
                time.sleep(_AGAIN)
                if isinstance(error, ray.exceptions.ActorDiedError):
                    self._make_another(error, end)

    def gate(self, hosts: Collection[str], by: str, until: float, *, closed: bool) -> None:
        """Close or open hosts' gates; an owner that comes after this one knows the closed ones.

        Raises:
            As `call`.
        """
        self._gates.note(hosts, by, closed=closed)
        self.call("gate", hosts, by, until=until, closed=closed)

    def tell(self, method: str, *args: Any, **options: Any) -> None:
        """Call the owner, and wait for no answer."""
        getattr(self._owner, method).remote(*args, **options)

    def wait(self, method: str, *args: Any, wait: "Wait", **options: Any) -> Any:
        """Call the owner, which is to answer within `wait.parked` seconds, its last argument.

        Raises:
            As `call`; the owner has until the end of the wait to answer.
        """
        return self.call(method, *args, wait.parked(), until=wait.until, **options)

    def _no_answer(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The owner of {self.config.name!r}, on node {self._node}, does not answer: it is "
            "stopped, or cut off"
        )

    def _make_another(self, error: Exception, until: float) -> None:
        if find_config(self.config.name, until) is None:
            raise FailedPreconditionError(
                f"The cluster has no group {self.config.name!r} any more"
            ) from error
        owner, _, node = _make_owner(self.config, None, until)
        self._gates.tell(owner)  # before any thread can tell it a step
        self._owner, self._node = owner, node

    def end(self) -> list[str]:
        """Remove the group; return the nodes that have not said that they removed its names.

        The owner ends last: until then no other chief makes one. A group that another chief has
        made in place of this one stays.
        """
        config = self.config
        with contextlib.suppress(DeadlineExceededError):  # it may be this one, and stopped
            found = find_config(config.name, time.monotonic() + ANSWER)
            if found is not None and found.number != config.number:
                _logger.warning("The group %r is another chief's now, and stays", config.name)
                return []
        ray.wait([self._owner.stop.remote()], timeout=ANSWER)
        until = time.monotonic() + PATIENCE
        actors: dict[str, Any | None] = dict.fromkeys(living_nodes(config.hosts))
        for node in actors:
            with contextlib.suppress(DeadlineExceededError):  # then its names may be left
                actors[node] = _find_until(config.actor(f"host {node}"), until)
        left = end_parts(actors)
        kill(self._owner)
        return left


OPEN: set[Link] = set()
"""Of the groups of whose rounds this process is in the block."""


def finished(link: Link) -> FinishedError:
    """Return the error of those who wait for something of a group that is finished."""
    return FinishedError(f"The group {link.config.name!r} is finished: there are no more rounds")


def not_ready(link: Link) -> FailedPreconditionError:
    """Return the error of those who want a step of an owner that knows none yet."""
    return FailedPreconditionError(
        f"The owner of {link.config.name!r} was started again and does not know the step: "
        "call set_global_step with that of your parameters"
    )


def end_parts(actors: Mapping[str, Any | None]) -> list[str]:
    """End actors by node; return the nodes that have not said so: their names may be left."""
    left = set(actors)
    calls = {actor.end.remote(): node for node, actor in actors.items() if actor is not None}
    for call in wait_for_all(list(calls), time.monotonic() + _END):
        with contextlib.suppress(*LOST, ray.exceptions.RayTaskError):
            ray.get(call)
            left.discard(calls[call])
    for actor in actors.values():
        if actor is not None:
            kill(actor)
    return sorted(left)


def warn_of_left(name: str, nodes: list[str]) -> None:
    """Say which nodes may have names left."""
    if nodes:
        _logger.warning(
            "Nodes that did not answer may have names of %r left in /dev/shm: %s",
            name,
            ", ".join(nodes),
        )


def wait_for_all(calls: list[Any], until: float) -> list[Any]:
    """Return the calls that have ended, when all have, or it is time (monotonic)."""
    if not calls:
        return []
    left = None if math.isinf(until) else max(0.0, until - time.monotonic())
    return list(ray.wait(calls, num_returns=len(calls), timeout=left)[0])


def find_config(name: str, until: float | None = None) -> Config | None:
    """Return what the cluster's group of that name was made with; None: there is none.

    Its owner may have died; then the actors of its hosts know.

    Args:
        name: The group's name.
        until: The time (monotonic) by which Ray's head should have answered; None: in a minute.

    Raises:
        DeadlineExceededError: Its parts do not answer, or Ray's head does not.
    """
    end = time.monotonic() + PATIENCE if until is None else until
    hosts = [f"{name}/host {node}" for node in sorted(living_nodes(None))]
    silent: list[str] = []
    for parts in [f"{name}/owner"], hosts:  # all hosts at once: some may be stopped
        actors = {part: _find_until(part, end + _HEAD) for part in parts}
        calls = {actor.config.remote(): part for part, actor in actors.items() if actor is not None}
        until = time.monotonic() + max(ANSWER, min(LOOK, end - time.monotonic()))
        while ended := _wait_for_one(list(calls), until):
            del calls[ended]
            with contextlib.suppress(*LOST):
                config: Config = ray.get(ended)
                return config
        silent += calls.values()
    if silent:
        raise DeadlineExceededError(
            f"These parts of {name!r} do not answer: {', '.join(silent)}. They are stopped, or "
            "their nodes are cut off"
        )
    return None


def _wait_for_one(calls: list[Any], until: float) -> Any | None:
    """Return a call that has ended; None: there is none, or it is time (monotonic)."""
    left = max(0.0, until - time.monotonic())
    return next(iter(ray.wait(calls, timeout=left)[0]), None) if calls else None


def _find_until(part: str, until: float) -> Any | None:
    return find_actor(part, min(PATIENCE, max(ANSWER, until - time.monotonic())))


def _make_owner(config: Config, step: int | None, until: float | None) -> tuple[Any, Config, str]:
    """Make the owner on this process's node, or find it; return it, its config and its node.

    Raises:
        DeadlineExceededError: It does not answer.
        FailedPreconditionError: Ray does not start it.
    """
    end = time.monotonic() + PATIENCE if until is None else until
    here = ray.get_runtime_context().get_node_id()
    while True:
        seconds = min(PATIENCE, max(_HEAD, end - time.monotonic()))
        given = ray.remote(OwnerActor), config.actor("owner"), here, config, step
        owner = make_actor(*given, seconds=seconds, max_concurrency=10_000)
        try:
            left = None if math.isinf(end) else max(_HEAD, end - time.monotonic())
            known: tuple[Config, str] = ray.get(owner.place.remote(), timeout=left)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceededError(
                f"The owner of {config.name!r} does not answer: it is stopped, or cut off"
            ) from None
        except LOST as error:  # it has died, or the node that was to find its place is lost
            if time.monotonic() > end:
                raise FailedPreconditionError(
                    f"Ray does not start the owner of {config.name!r}: {error}"
                ) from error
            time.sleep(_AGAIN)
        else:
            return owner, *known
