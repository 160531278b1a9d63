"""The link to a group's owner, which a chief's group and its rounds share.

Every call ends: with an answer, or with an error that says which part on which node did not answer.
If the known owner has died, a call finds or makes another (`_finding.py`).
"""

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import ray

from shmacc._multihost.messages import AtLastStep, Fence, Finished, NotReady, Opened
from shmacc._multihost.pieces import Plan
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    FinishedError,
    OutOfRangeError,
    ShmaccError,
)
from shmacc.ray._finding import find_config, find_group, make_owner
from shmacc.ray._head import kill, living_nodes, shown
from shmacc.ray._parts import DIED, LOST, Config, State, check_connected, find, find_actor
from shmacc.ray._waits import ANSWER, PATIENCE, Wait, left_until, wait_for_all

_logger = logging.getLogger("shmacc")

END = 15.0  # seconds for parts to be found, and to remove their names
_AGAIN = 0.1  # seconds until a call that failed is tried again


class Link:
    """A chief's connection to the owner.

    The first call connects, if `join` or `connect` has not. Unpickling does not: Ray unpickles a
    task's arguments, and a call of Ray in there would wait for itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # the group's shared_name
        self.closed = self.removed = False  # whether the chief has let go of it, or removed it
        self._hosts: dict[str, Any] = {}
        self._connecting = threading.Lock()
        self._config: Config | None = None  # None: not connected yet
        self._plan: Plan
        self._owner: Any
        self._node: str

    def join(self, config: Config, step: int | None, until: float) -> Config:
        """Connect to the owner of the group, or make one; return what the group was made with.

        A new group has `config` and begins at `step`. None: the group exists already, and an owner
        that is made now does not know the step.
        """
        self._owner, config, self._node = make_owner(config, step, until)
        if config.copy is not None:
            LINKS.add(self)
        self._plan = Plan(config.members, config.shards)
        self._config = config  # last: another thread may use what is above as soon as this is there
        return config

    def connect(self, until: float, seconds: float | None = None) -> Config:
        """Find the group, if this has not been done; return what it was made with.

        It waits for `seconds` until there is a group. By `until` Ray's head and the group's parts
        must have answered.

        Raises:
            As `AccumulatorGroup.attach`.
        """
        if self._config is not None:
            return self._config
        check_connected(until)
        left = left_until(until)
        if not self._connecting.acquire(timeout=-1 if left is None else left):
            raise DeadlineExceededError("Another call of this process was not done in time")
        try:
            return self._config or self.join(find_group(self.name, seconds, until), None, until)
        finally:
            self._connecting.release()

    @property
    def config(self) -> Config:
        """What the group was made with."""
        return self.connect(time.monotonic() + PATIENCE)

    @property
    def here(self) -> str:
        """The id of this process's node."""
        return str(ray.get_runtime_context().get_node_id())

    @property
    def plan(self) -> Plan:
        """Which row is at which shard."""
        self.connect(time.monotonic() + PATIENCE)
        return self._plan

    def host(self, name: str, until: float | None = None) -> Any | None:
        """Return the actor of a host; None: there is none now, and the owner makes another.

        Without `until` it is also None if Ray's head does not say at once.
        """
        if name not in self._hosts:
            part = f"host {name}"
            given = self.config
            found = find(given, part) if until is None else find_actor(given.actor(part), until)
            if found is not None:
                self._hosts[name] = found
        return self._hosts.get(name)

    def lost_host(self, name: str) -> None:
        """Forget the actor of a host, which has ended: the next call of `host` looks again."""
        self._hosts.pop(name, None)

    def call(
        self,
        method: str,
        *args: Any,
        until: float | None = None,
        **options: Any,
    ) -> Any:
        """Call the owner, or its successor, until one answers: all its methods may be repeated.

        Raises:
            FailedPreconditionError: The handle is closed, or the group was removed.
            DeadlineExceededError: The owner has not answered.
        """
        if self.closed:
            raise FailedPreconditionError("The group is closed")
        end = time.monotonic() + PATIENCE if until is None else until
        self.connect(end)
        while True:
            try:
                call = getattr(self._owner, method).remote(*args, **options)
                return ray.get(call, timeout=left_until(end))
            except ray.exceptions.GetTimeoutError:
                raise self._no_answer() from None
            except LOST as error:
                if time.monotonic() > end:
                    raise self._no_answer() from error
                time.sleep(_AGAIN)
                if isinstance(error, DIED):
                    self._make_another(error, end)

    def state(self, until: float | None = None) -> State:
        """Return what the owner knows: the step, how many gradients there are, hosts, counters."""
        state: State = self.call("state", until=until)
        return state

    def step(self, until: float | None = None) -> int:
        """Return the owner's step. With parameters, a new owner learns it first."""
        while (step := self.state(until)[0]) is None:
            if self.call("do", "has_line", until=until, wait=ANSWER) is False:
                raise self.error(NotReady())
        return step

    def lost(self, until: float | None = None) -> frozenset[str]:
        """Return the hosts that the owner considers lost: nobody waits for anything there."""
        lost: frozenset[str] = self.call("lost", until=until)
        return lost

    def ask_hosts(self, method: str, wait: Wait) -> tuple[int | None, Fence, dict[str, Any]]:
        """Call the actors of living hosts; those that are lost meanwhile are left out.

        Returns:
            The owner's step and fence before these calls, and the answers by node.
        """
        step, fence, names = self.call("living", until=wait.until)
        found: dict[str, Any] = {}
        for _ in range(2):  # a known actor may have ended long ago: then another one is asked
            actors = {name: self.host(name, wait.until) for name in names if name not in found}
            calls = {getattr(a, method).remote(): n for n, a in actors.items() if a is not None}
            ended = wait_for_all(list(calls), wait.until)
            if silent := sorted(name for call, name in calls.items() if call not in ended):
                raise DeadlineExceededError(
                    f"Parts of {self.name!r} have not answered: those of the nodes "
                    f"{shown(*silent)}. They are stopped, or cut off"
                )
            for call in ended:
                try:
                    found[calls[call]] = ray.get(call)
                except LOST:
                    self.lost_host(calls[call])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
        return step, fence, found

    def tell(self, method: str, *args: Any, **options: Any) -> None:
        """Call the owner without waiting for an answer, if it is known."""
        if self._config is not None:
            getattr(self._owner, method).remote(*args, **options)

    def wait(self, method: str, *args: Any, wait: Wait, **options: Any) -> Any:
        """Call the owner, which may keep the call until the next heartbeat of this chief."""
        lease = self.connect(wait.until).timing.chief_lease
        parked = min(wait.parked(), lease / 4)
        return self.call("do", method, *args, until=wait.until, wait=parked, **options)

    def error(self, answer: Finished | AtLastStep | NotReady) -> ShmaccError:
        """Return the error for an answer that there is no round, or no step."""
        match answer:
            case Finished():
                return FinishedError(
                    f"The group {self.name!r} is finished: there are no more rounds"
                )
            case AtLastStep():
                return OutOfRangeError("The global step is 2**63 - 1 and cannot move on")
        if self.config.parameters is not None:
            return FailedPreconditionError(
                f"No node has a copy of the parameters {self.config.parameters!r} any more: "
                "restore a saved state"
            )
        return FailedPreconditionError(
            f"The owner of {self.name!r} was started again and does not know the step: "
            "call set_global_step with that of your parameters"
        )

    def _no_answer(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The owner of {self.name!r}, on node {shown(self._node)}, does not answer: it "
            "is stopped, or cut off"
        )

    def _make_another(self, error: Exception, until: float) -> None:
        if self.closed:
            raise FailedPreconditionError("The group is closed") from error
        number = self.config.number
        config = find_config(self.name, until)
        if config is not None and config.number == number:
            owner, config, node = make_owner(config, None, until)
        if config is None or config.number != number:
            other = "" if config is None else ": another chief has made one of this name"
            raise FailedPreconditionError(
                f"The cluster has the group {self.name!r} of this handle no more{other}"
            ) from error
        self._owner, self._node = owner, node

    def end(self) -> list[str]:
        """Remove the group; return the nodes that have not said that they removed its names.

        The owner ends last: until then no other chief can make one. A group that another chief has
        made in place of this one stays.
        """
        until = time.monotonic() + END
        config = self.connect(until)
        with contextlib.suppress(DeadlineExceededError):  # a stopped part does not answer
            found = find_config(self.name, time.monotonic() + ANSWER)
            if found is not None and found.number != config.number:
                _logger.warning("The group %r is another chief's now, and stays", config.name)
                return []
        without: frozenset[str] = frozenset()
        for stopped in wait_for_all([self._owner.stop.remote()], time.monotonic() + ANSWER):
            with contextlib.suppress(*LOST):
                without = ray.get(stopped)
        actors: dict[str, Any | None] = dict.fromkeys(living_nodes(config.hosts, until))
        self._hosts.clear()  # an actor that is known may have ended, and another one be there
        for node in actors:
            with contextlib.suppress(DeadlineExceededError):  # then its names may be left
                actors[node] = self.host(node, until - END / 2)
        left = actors.keys() - without
        calls = {actor.end.remote(): node for node, actor in actors.items() if actor is not None}
        for call in wait_for_all(list(calls), until):
            with contextlib.suppress(*LOST, ray.exceptions.RayTaskError):
                ray.get(call)
                left.discard(calls[call])
        for actor in actors.values():
            if actor is not None:
                kill(actor)
        kill(self._owner)
        return sorted(left)


def end_group(config: Config, until: float) -> None:
    """Remove a group that this process may have no link to."""
    link = Link(config.name)
    link.join(config, None, until)
    link.end()


LINKS: "weakref.WeakSet[Link]" = weakref.WeakSet()
"""This process's links to groups with parameters."""


@dataclass(eq=False)
class OpenBlock:
    """A round that this process has open."""

    link: Link
    ticket: str
    thread: threading.Thread  # that entered it; itself, since a later one may get its number
    taken: Opened
    given: Any  # what the block was given
    updated: bool = False  # whether an update was made, or may have been
    kept: Any = None  # the update, which nodes that are late can get


OPEN: dict[str, OpenBlock] = {}  # this process's, by ticket
