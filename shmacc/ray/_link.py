"""What a chief's group and its rounds have in common: the way to the owner.

Every call ends: with an answer, or with an error that says which part on which node did not give
one. A call finds another owner if the one that it knew has died (`_finding.py`).
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Collection
from typing import Any

import ray

from shmacc._multihost.pieces import Plan
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, FinishedError
from shmacc.ray._finding import end_parts, find_config, find_until, make_owner
from shmacc.ray._head import kill
from shmacc.ray._parts import LOST, Config, find, living_nodes
from shmacc.ray._waits import ANSWER, PATIENCE, Wait

_logger = logging.getLogger("shmacc")

_AGAIN = 0.1  # seconds until a call that failed is tried again


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
        owner, self.config, self._node = make_owner(config, step, until)
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

    def wait(self, method: str, *args: Any, wait: Wait, **options: Any) -> Any:
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
        owner, _, node = make_owner(self.config, None, until)
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
                actors[node] = find_until(config.actor(f"host {node}"), until)
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
