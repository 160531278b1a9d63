"""The link to a group's owner, which a chief's group and its rounds share.

Every call ends, either with an answer, or with an error that names the part and node that did not
answer. If the known owner has died, a call finds or makes another one (`_finding.py`).
"""

import contextlib
import logging
import threading
import time
import weakref
from functools import cached_property
from typing import Any

import ray

from shmacc._multihost import messages as said
from shmacc._multihost.messages import Fence
from shmacc._multihost.pieces import Plan
from shmacc.errors import (
    AlreadyExistsError,
    CancelledError,
    ChiefDiedError,
    DeadlineExceededError,
    FailedPreconditionError,
    FinishedError,
    OutOfRangeError,
    ShmaccError,
    WorkerDiedError,
)
from shmacc.ray._finding import check_unused, find_config, find_group, make_owner
from shmacc.ray._head import kill, living_nodes, shown
from shmacc.ray._parts import (
    DIED,
    LOST,
    Config,
    State,
    check_connected,
    find,
    find_actor,
    on_nodes,
    remove_names,
)
from shmacc.ray._waits import ANSWER, PATIENCE, Wait, left_until, result_of, wait_for_all

_logger = logging.getLogger("shmacc")

END = 15.0  # seconds in which a group's parts must be found and remove their names
_CHIEFS = 5.0  # seconds for an owner to say whether it has chiefs
_SHORT = 1.0 + ANSWER  # a busy owner may need this many seconds
_AGAIN = 0.1  # seconds until a call that failed is tried again


class Link:
    """A chief's connection to the owner.

    The first call connects, if `join` or `connect` has not. Unpickling does not connect: Ray
    unpickles a task's arguments itself, and a call to Ray at this time would wait for itself.

    Attributes:
        name: The group's shared_name.
        closed: Whether this chief has let go of the group.
        removed: Whether this chief has removed the group.
        is_gone: Whether a call has found that this group was removed, and maybe replaced.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = self.removed = False
        self.is_gone: bool = False
        self._hosts: dict[str, Any] = {}  # the actors of nodes, as far as they are known
        self._connecting = threading.Lock()
        self._config: Config | None = None  # None: not connected yet
        self._owner: Any
        self._node: str

    def join(self, config: Config, step: int | None, until: float) -> Config:
        """Connect to the owner of the group, or make one; return the group's config.

        A new group has `config` and begins at `step`. If the group exists already, `step` is None:
        then an owner that is made now does not know the step.
        """
        self._owner, config, self._node = make_owner(config, step, until)
        if config.copy is not None:
            LINKS.add(self)
        self._config = config  # last: once this is set, other threads use the attributes above
        return config

    def connect(self, until: float, seconds: float | None = None) -> Config:
        """Find the group, if this has not been done; return its config.

        Wait at most `seconds` until there is a group. By the time `until`, Ray's head and the
        group's parts must have answered.

        Raises:
            The errors of `AccumulatorGroup.attach`.
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
        """The config that the group was made with."""
        return self.connect(time.monotonic() + PATIENCE)

    @cached_property
    def plan(self) -> Plan:
        """The plan that says which row is at which shard."""
        return Plan(self.config.members, self.config.shards)

    @property
    def here(self) -> str:
        """The id of this process's node."""
        return str(ray.get_runtime_context().get_node_id())

    def host(self, node: str, until: float | None = None) -> Any | None:
        """Return the actor of a node; None: there is none now, and the owner makes another one.

        Without `until`, None may also mean that Ray's head does not answer at once.
        """
        if node not in self._hosts:
            part, given = f"host {node}", self.config
            found = find(given, part) if until is None else find_actor(given.actor(part), until)
            if found is not None:
                self._hosts[node] = found
        return self._hosts.get(node)

    def lost_host(self, node: str) -> None:
        """Forget the actor of a node, which has ended: the next call of `host` finds a new one."""
        self._hosts.pop(node, None)

    def call(self, method: str, *args: Any, until: float | None = None, **options: Any) -> Any:
        """Call the owner, or its successor, until one answers; an owner may get a call twice.

        Raises:
            FailedPreconditionError: The handle is closed, or the group was removed.
            DeadlineExceededError: The owner has not answered.
        """
        began = time.monotonic()
        end = began + PATIENCE if until is None else until
        while True:
            if self.closed:
                raise FailedPreconditionError("The group is closed")
            self.connect(end)
            try:
                call = getattr(self._owner, method).remote(*args, **options)
                return result_of(call, end)
            except ray.exceptions.GetTimeoutError:
                raise self._no_answer(end - began) from None
            except LOST as error:
                if time.monotonic() > end:
                    raise self._no_answer(end - began) from error
                time.sleep(_AGAIN)
                if isinstance(error, DIED) and not self.closed:
                    self._make_another(error, end)

    def _no_answer(self, waited: float) -> DeadlineExceededError:
        short = "the timeout was too short, or " if waited < _SHORT else ""
        return DeadlineExceededError(
            f"The owner of {self.name!r}, on node {shown(self._node)}, does not answer: {short}it "
            "is stopped, or cut off"
        )

    def _make_another(self, error: Exception, until: float) -> None:
        number = self.config.number
        config = find_config(self.name, until)
        if config is not None and config.number == number:
            owner, config, node = make_owner(config, None, until)
        if config is None or config.number != number:
            self.is_gone = True
            other = "" if config is None else ": another chief has made one of this name"
            raise FailedPreconditionError(
                f"The cluster has the group {self.name!r} of this handle no more{other}"
            ) from error
        self._owner, self._node = owner, node

    def wait(self, method: str, *args: Any, wait: Wait, **options: Any) -> Any:
        """Call the owner, which may delay its answer until this chief's next heartbeat is due."""
        lease = self.connect(wait.until).timing.chief_lease
        parked = min(wait.parked(), lease / 4)
        return self.call("do", method, *args, until=wait.until, wait=parked, **options)

    def until_known(self, method: str, *args: Any, wait: Wait, **options: Any) -> Any:
        """Call the owner until it has an answer: a new owner must first hear from all nodes.

        Raises:
            DeadlineExceededError: Not all nodes had answered the owner at the end of the wait.
        """
        while (answer := self.wait(method, *args, wait=wait, **options)) is None:
            if wait.is_over():
                raise DeadlineExceededError(
                    f"Not all nodes have answered the owner of {self.name!r}, which must know what "
                    "copies of the parameters they have"
                )
        return answer

    def send(self, method: str, *args: Any, **options: Any) -> None:
        """Call the owner, if it is known, and do not wait for the answer."""
        if self._config is not None:
            self._owner.do.remote(method, *args, **options)

    def state(self, until: float | None = None) -> State:
        """Return what the owner knows: the step, the number of gradients, hosts, counters."""
        state: State = self.call("state", until=until)
        return state

    def step(self, until: float | None = None) -> int:
        """Return the owner's step; with parameters, wait until a new owner has learned it."""
        while (step := self.state(until)[0]) is None:
            if self.call("do", "has_line", until=until, wait=ANSWER) is False:
                raise self.error(said.NotReady())
        return step

    def ask_hosts(self, method: str, wait: Wait) -> tuple[int | None, Fence, dict[str, Any]]:
        """Call the actors of living hosts; leave out hosts that are lost meanwhile.

        Returns:
            The owner's step and fence before these calls, and the answers by node.
        """
        self.until_known("has_line", wait=wait)  # a new owner may not know all hosts yet
        step, fence, nodes = self.call("living", until=wait.until)
        found: dict[str, Any] = {}
        for _ in range(2):  # a known actor may have ended long ago: then find and ask its successor
            actors = {node: self.host(node, wait.until) for node in nodes if node not in found}
            calls = {getattr(a, method).remote(): n for n, a in actors.items() if a is not None}
            ended = wait_for_all(list(calls), wait.until)
            if silent := sorted(node for call, node in calls.items() if call not in ended):
                raise DeadlineExceededError(
                    f"Parts of {self.name!r} have not answered: those of the nodes "
                    f"{shown(*silent)}. They are stopped, or cut off"
                )
            for call in ended:
                try:
                    found[calls[call]] = result_of(call, wait.until)
                except LOST:
                    self.lost_host(calls[call])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
        return step, fence, found

    def error(self, answer: Any) -> ShmaccError:
        """Return the error to raise for an owner's answer that ends a wait."""
        name = self.name
        kind: type[ShmaccError] = FailedPreconditionError
        match answer:
            case said.Died(losses):
                return _worker_died(losses)
            case said.Conflict(contributor, hosts):
                kind, (one, two) = AlreadyExistsError, map(shown, hosts)
                text = (
                    f"Contributor {contributor} was accepted on hosts {one} and {two}, and was on "
                    "two hosts before: processes on both apply as this contributor. End one"
                )
            case said.Ended():
                kind, why = CancelledError, "this process was silent for too long"
                text = f"The wait for a round of {name!r} was ended: by cancel(), or because {why}"
            case said.Finished():
                kind, text = FinishedError, f"The group {name!r} is finished: it has no more rounds"
            case said.Chiefless():
                kind, when = ChiefDiedError, "in its round or while it waited for one"
                text = f"The last chief of {name!r} was lost, {when}, and no other one has come"
            case said.AtLastStep():
                kind, text = OutOfRangeError, "The global step is 2**63 - 1 and cannot move on"
            case said.NotReady() if (copies := self.config.parameters) is not None:
                text = f"No node has a copy of the parameters {copies!r} any more: restore a state"
            case _:
                text = (
                    f"The owner of {name!r} was started again and does not know the step: call "
                    "set_global_step with that of your parameters"
                )
        return kind(text)

    def end(self, *, undo: bool = False) -> list[str]:
        """Remove the group; return the nodes that have not confirmed that they removed its names.

        With `undo`, what nodes had before the group stays (`Memory.end`). The owner ends last: else
        another chief could make an owner meanwhile. If another chief has already made a new group
        of this name, the new group stays.
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
        nodes, actors = living_nodes(config.hosts, until), dict[str, Any]()
        self._hosts.clear()  # known actors may have ended and been replaced
        for node in nodes:
            with contextlib.suppress(DeadlineExceededError):  # then its names may be left
                actors[node] = self.host(node, until - END / 2)
        left, absent = nodes - without, {node for node, actor in actors.items() if not actor}
        calls = {actor.end.remote(undo=undo): node for node, actor in actors.items() if actor}
        for call in wait_for_all(list(calls), until):
            try:
                ray.get(call)
                left.discard(calls[call])
            except LOST:
                absent.add(calls[call])
            except ray.exceptions.RayTaskError:
                pass
        if not undo and (absent := absent & left):  # no actor is left to remove their names
            with contextlib.suppress(DeadlineExceededError):
                until = time.monotonic() + END / 3
                left -= on_nodes(absent, remove_names, config, until=until).keys()
        for actor in (*filter(None, actors.values()), self._owner):
            kill(actor)
        return sorted(left)


def _worker_died(losses: tuple[said.Loss, ...]) -> WorkerDiedError:
    hosts = [loss.host for loss in losses if not loss.pids]
    workers = [
        f"pid {pid} of {shown(loss.host)}, {reason}"
        for loss in losses
        for pid, reason in zip(loss.pids, loss.reasons, strict=True)
    ]
    what = [f"Hosts were lost: {shown(*hosts)}"] if hosts else []
    if workers:
        what += [f"Processes that apply gradients are gone: {'; '.join(workers)}"]
    return WorkerDiedError(f"{'. '.join(what)}. Nothing was consumed").with_fields(
        pids=tuple(pid for loss in losses for pid in loss.pids),
        reasons=tuple(reason for loss in losses for reason in loss.reasons),
        contributors=tuple(who for loss in losses for who in loss.contributors),
    )


def replace(names: list[str], groups: list[Config], until: float) -> set[str]:
    """Remove groups, so that their names and `names` are free; return the living nodes.

    Raises:
        FailedPreconditionError: A living process has a segment of one of these names attached, or
            is a chief that waits for a round or has one. Nothing was removed.
    """
    nodes, own = living_nodes(None, until), [group.name for group in groups]
    check_unused([*dict.fromkeys([*names, *own])], own, nodes, until)
    for group in groups:  # chiefs attach to no segment: ask the owner about them
        owner = find_actor(group.actor("owner"), until)
        with contextlib.suppress(*LOST, ray.exceptions.GetTimeoutError):
            if owner and (chiefs := ray.get(owner.do.remote("chiefs"), timeout=_CHIEFS)):
                raise FailedPreconditionError(
                    f"{chiefs} chiefs wait for a round of the group {group.name!r}, or have one. "
                    "Nothing was replaced"
                )
    for group in groups:
        link = Link(group.name)
        link.join(group, None, until)
        link.end()
    return nodes


LINKS: "weakref.WeakSet[Link]" = weakref.WeakSet()
"""This process's links to groups with parameters."""
