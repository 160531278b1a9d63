"""The chief's side: a group over many hosts, with the calls of a group on one."""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc._accumulators.group import AccumulatorGroup as LocalGroup
from shmacc._gradients import arguments
from shmacc._gradients.spec import TensorSpec
from shmacc._layout import names
from shmacc._multihost.messages import Timing
from shmacc._multihost.pieces import Plan
from shmacc._opening.options import IfExists, Owners
from shmacc._records.array_types import IndexArray
from shmacc._records.stats import Stats
from shmacc._records.taken import GroupTaken
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from shmacc.ray._hosts import parts_of_hosts, stats_of_hosts
from shmacc.ray._link import PARKED, Link, end, find_owner
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import LOST, NAMESPACE, Config, HostState, ShardedTaken, living_nodes
from shmacc.ray._round import Round

_logger = logging.getLogger("shmacc")

_START = 120.0
_HOMING = 30.0  # seconds that Ray has to put the owner where it belongs
_LOOK = 0.05  # seconds between two looks for something that no call waits for


class AccumulatorGroup:
    """A group whose gradients are applied on many hosts.

    For the chief; workers use ``shmacc.attach(shared_name)``, which finds the segment of their own
    host. Any number of processes of the cluster may be chiefs, and wait in the queue.
    """

    def __init__(
        self,
        members: Mapping[str, TensorSpec],
        shared_name: str,
        name: str | None = None,
        reduction_type: str | None = "MEAN",
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
        lanes: int | None = None,
        capacity: int | None = None,
        hosts: Iterable[str] | None = None,
        shards: int | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Create the group on every node, or attach to the one that has this shared_name.

        Returns when each node that is alive has its segment. A node that has died just before costs
        the time that Ray takes to notice.

        Args:
            members: As for ``shmacc.AccumulatorGroup``; all dimensions must be known, but for the
                first one of sparse members.
            shared_name: As there, but not None: workers attach to it.
            name: As there, as are all that are not listed here.
            reduction_type: As there.
            mode: As there.
            owners: As there.
            if_exists: What to do with segments that nodes have under this name from earlier, and
                with a group that the cluster has.
            unlink_on_close: Whether `close` removes the group.
            lanes: Of each host's segment.
            capacity: Of each host's segment.
            hosts: The ids of Ray's nodes that take part; None: all, those that join later as well.
            shards: How many actors share the rows among them; None: one for each node.
            timing: How long the parts wait for each other.

        Raises:
            InvalidArgumentError: A bad argument, or the cluster's group of this name disagrees.
            FailedPreconditionError: Ray is not initialised, or `if_exists` is "error" and the
                cluster has a group of this name.
            DeadlineExceededError: The nodes have not started their parts.
        """
        if not ray.is_initialized():
            raise FailedPreconditionError("Connect to a Ray cluster first: ray.init()")
        names.segment_name(shared_name)
        with LocalGroup(members, reduction_type=reduction_type) as group:  # checks, fills in
            specs, reduction = group.members, group.reduction_type
        chosen = None if hosts is None else frozenset(hosts)
        wanted = living_nodes(chosen)
        config = Config(
            name=shared_name,
            members=specs,
            reduction=reduction,
            options={
                "mode": mode,
                "owners": owners,
                "if_exists": if_exists,
                "lanes": lanes,
                "capacity": capacity,
            },
            shards=arguments.limit(shards, "shards", 1 << 16) or max(1, len(wanted)),
            hosts=chosen,
            timing=timing or Timing(),
            home=ray.get_runtime_context().get_node_id(),
        )
        Plan(specs, config.shards)
        existing = find_owner(shared_name)
        if existing is not None and if_exists == "error":
            raise FailedPreconditionError(f"The cluster has a group {shared_name!r} already")
        if existing is not None and if_exists == "replace":
            end(existing)
        self._adopt(_make_owner(config), name)
        self._unlink_on_close = unlink_on_close
        self._check_agreement(specs)
        self._wait_for_hosts(wanted)

    @classmethod
    def attach(cls, shared_name: str, *, timeout: float | None = None) -> Self:
        """Return the cluster's group of that name, for another chief.

        Args:
            shared_name: The name.
            timeout: How many seconds to wait until there is one; None: not at all.

        Raises:
            NotFoundError: There is none.
            DeadlineExceededError: There was none for so long.
        """
        seconds = arguments.timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        while (owner := find_owner(shared_name)) is None:
            missing = f"The cluster has no group {shared_name!r}"
            if until is None:
                raise NotFoundError(missing).with_fields(shared_name=shared_name)
            if time.monotonic() >= until:
                raise DeadlineExceededError(f"{missing}, after {seconds:g} seconds")
            time.sleep(_LOOK)
        self = cls.__new__(cls)
        self._adopt(owner, None)
        self._unlink_on_close = False
        return self

    def _adopt(self, owner: Any, name: str | None) -> None:
        self._link = Link(owner)
        self._label = name or "accumulator_group"

    def _check_agreement(self, asked: Mapping[str, TensorSpec]) -> None:
        existing = self._link.config.members
        for member in sorted(existing.keys() | asked.keys()):
            have, want = existing.get(member), asked.get(member)
            if repr(have) != repr(want):
                raise InvalidArgumentError(
                    f"The cluster's group {self.shared_name!r} exists with member {member!r} "
                    f"{have}, but {want} was asked for"
                ).with_fields(what=f"member {member!r}", existing=str(have), asked=str(want))

    def _wait_for_hosts(self, nodes: set[str]) -> None:
        """Wait for the segments of nodes, but not of those that meanwhile turn out to be dead.

        Ray takes a node for alive until it has missed heartbeats for half a minute.
        """
        end = time.monotonic() + _START
        while missing := nodes - {name for name, host in self.hosts().items() if host.alive}:
            nodes = nodes & living_nodes(None)
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"After {_START:g} seconds these nodes have no segment of "
                    f"{self.shared_name!r}: {', '.join(sorted(missing))}"
                )
            time.sleep(_LOOK)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shared_name!r} over Ray>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the name; unpickling attaches, in a process of the cluster."""
        return type(self).attach, (self.shared_name,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared_name(self) -> str:
        """The name that workers attach to."""
        return self._link.config.name

    @property
    def name(self) -> str:
        """The label given at construction."""
        return self._label

    @property
    def members(self) -> dict[str, TensorSpec]:
        """The specs of the members, by name."""
        return dict(self._link.config.members)

    @property
    def reduction_type(self) -> str:
        """MEAN, SUM or CMEAN: that of members without their own."""
        return self._link.config.reduction

    @property
    def lanes(self) -> int:
        """How many applies go on at the same time, on each host."""
        return self._link.config.options["lanes"] or 1

    @property
    def capacity(self) -> int | None:
        """How many gradients may be pending on each host; None: any number."""
        capacity: int | None = self._link.config.options["capacity"]
        return capacity

    @property
    def global_step(self) -> int:
        """The owner's step; hosts follow it within milliseconds."""
        return self._state()[0]

    def num_accumulated(self) -> int:
        """How many gradients of living hosts wait to be taken, as far as hosts have reported."""
        return self._state()[1]

    def hosts(self) -> dict[str, HostState]:
        """Return the hosts that have ever reported, by the id of their node."""
        return self._state()[2]

    def counters(self) -> dict[str, int]:
        """Return what the owner has done: rounds, void steps, lost hosts, and so on."""
        return self._state()[3]

    def _state(self) -> tuple[int, int, dict[str, HostState], dict[str, int]]:
        state: tuple[int, int, dict[str, HostState], dict[str, int]] = self._link.call("state")
        return state

    def take(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> GroupTaken:
        """Take the gradients of all hosts; as on one host, a round without a block.

        Raises:
            As entering a round.
        """
        with self.round(num_required, timeout=timeout, on_death=on_death) as taken:
            return taken

    def round(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> Round[GroupTaken]:
        """Take the gradients of all hosts for the length of a ``with`` block.

        As on one host: `num_required` counts gradients; leaving the block consumes them and moves
        the step on; an exception, or the death of this process, consumes nothing. Other than there,
        a process that is stopped for longer than ``timing.chief_lease``
        loses its round, and the end of its block raises.

        Args:
            num_required: How many gradients, of all hosts together.
            timeout: Seconds to wait for them; None: for ever.
            on_death: "raise": a host that is lost ends the wait with WorkerDiedError, as does a
                process on any host that had applied and has died since the last take: once.
        """
        return Round(self._link, num_required, timeout, on_death, sharded=False)

    def round_of_shards(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> Round[ShardedTaken]:
        """Take as `round`, but leave the rows at the shards; functions are called with them."""
        return Round(self._link, num_required, timeout, on_death, sharded=True)

    def set_global_step(self, new_global_step: int) -> None:
        """Set the step of all hosts; gradients stay. A step lower than the current one: a warning.

        After the owner was started again, this is what makes it go on: see `round`.
        """
        new = arguments.int64(new_global_step, "new_global_step")
        old = self._link.call("set_global_step", new, uuid.uuid4().hex)
        if new < old:
            _logger.warning("global_step of %r: %d, then %d", self.shared_name, old, new)

    def advance_step(self, step: int) -> int:
        """Move the step forward and drop the gradients of older steps; return how many."""
        dropped: int = self._link.call("advance_step", arguments.int64(step, "step"))
        return dropped

    def wait_step(self, after: int, *, timeout: float | None = None) -> int:
        """Wait until the owner's step is past `after`, and return it.

        Raises:
            DeadlineExceededError: The timeout (seconds) passed.
            InvalidArgumentError: A bad argument.
        """
        past, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = PARKED if until is None else max(0.0, min(PARKED, until - time.monotonic()))
            step: int | None = self._link.call("wait_step", past, left)
            if step is not None:
                return step
            if until is not None and time.monotonic() >= until:
                step, accumulated, *_ = self._state()
                raise DeadlineExceededError(
                    f"The global step is {step}, not past {past}, after {seconds:g} seconds"
                ).with_fields(step=step, accumulated=accumulated)

    def cancel(self) -> None:
        """End every take and round that waits now, of all chiefs, with CancelledError."""
        self._link.call("cancel")

    def snapshot(self) -> GroupTaken:
        """Return what a take would give now; consumes nothing, seals nothing, waits for no number.

        What each living host has at an instant of its own, during this call.

        Raises:
            AlreadyExistsError: Two hosts have accepted the same contributor: the step will be void.
            OutOfRangeError: An integer result does not fit its dtype.
        """
        return parts_of_hosts(self._link).taken()

    def contributors(self) -> IndexArray:
        """Return who is in the open round, of all living hosts: int64, ascending."""
        return parts_of_hosts(self._link).contributors()

    def stats(self) -> dict[str, Stats]:
        """Return the counters of each living host's segment, by the id of its node."""
        return stats_of_hosts(self._link)

    def close(self) -> None:
        """Let go of the group. It stays in the cluster, unless `unlink_on_close`."""
        if not self._link.closed:
            if self._unlink_on_close:
                self.unlink()
            self._link.closed = True

    def unlink(self) -> None:
        """Remove the group: its actors, and the segments' names on all nodes."""
        if not self._link.closed:
            end(self._link.owner)
            self._link.closed = True


def _make_owner(config: Config) -> Any:
    """Make the owner, on this process's node, or return the one that there is.

    Ray may put it elsewhere while the node to which it turns does not know this one yet: a link
    between chief and owner that is cut would then cost a round that all others could have. It is
    made again in that case, as long as it has done nothing.
    """
    existed = find_owner(config.name) is not None
    there = NodeAffinitySchedulingStrategy(config.home, soft=True)  # a restart may be elsewhere
    end_at = time.monotonic() + _HOMING
    while True:
        owner = (
            ray.remote(OwnerActor)
            .options(
                name=config.actor("owner"),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=10_000,
                num_cpus=0,
                scheduling_strategy=there,
            )
            .remote(config)
        )
        with contextlib.suppress(*LOST):  # another chief makes it again at the same time
            if existed or ray.get(owner.is_at_home.remote()):
                return owner
            if time.monotonic() > end_at:
                _logger.warning("The owner of %r is not on this node: %s", config.name, config.home)
                return owner
            ray.kill(owner, no_restart=True)
        time.sleep(_LOOK)
