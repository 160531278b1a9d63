"""The chief's side: a group over many hosts, with the calls of a group on one."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc import _arguments as arguments
from shmacc import _names as names
from shmacc._group import AccumulatorGroup as LocalGroup
from shmacc._multihost.messages import (
    BatchKey,
    HostsDied,
    NotReady,
    Opened,
    Timing,
    Waiting,
)
from shmacc._multihost.pieces import Plan
from shmacc._records import GroupTaken
from shmacc._segment import Owners
from shmacc._spec import TensorSpec
from shmacc.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    WorkerDiedError,
)
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import (
    LOST,
    NAMESPACE,
    Config,
    HostState,
    Missing,
    Shard,
    ShardedTaken,
    find,
)

_logger = logging.getLogger("shmacc")

_PARKED = 1.0  # seconds that a call waits at the owner: also the chief's heartbeat
_START = 120.0

_Result = TypeVar("_Result", GroupTaken, ShardedTaken)


class AccumulatorGroup:
    """A group whose gradients are applied on many hosts.

    For the chief; workers use ``shmacc.attach(shared_name)``, which finds the segment of their own
    host. Any number of processes of the cluster may be chiefs, and wait in line.
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
        if_exists: arguments.IfExists = "attach",
        unlink_on_close: bool = False,
        lanes: int | None = None,
        capacity: int | None = None,
        hosts: Iterable[str] | None = None,
        shards: int | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Create the group on every node, or attach to the one that has this shared_name.

        Returns when each node that is alive has its segment.

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
        alive = [node for node in ray.nodes() if node["Alive"]]
        wanted = [node for node in alive if chosen is None or node["NodeID"] in chosen]
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
        )
        Plan(specs, config.shards)
        existing = _find_owner(shared_name)
        if existing is not None and if_exists == "error":
            raise FailedPreconditionError(f"The cluster has a group {shared_name!r} already")
        if existing is not None and if_exists == "replace":
            _end(existing)
        here = ray.get_runtime_context().get_node_id()
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
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
            )
            .remote(config)
        )
        self._adopt(owner, name)
        self._unlink_on_close = unlink_on_close
        self._check_agreement(specs)
        self._wait_for_hosts({node["NodeID"] for node in wanted})

    @classmethod
    def attach(cls, shared_name: str) -> Self:
        """Return the cluster's group of that name, for another chief.

        Raises:
            NotFoundError: There is none.
        """
        owner = _find_owner(shared_name)
        if owner is None:
            raise NotFoundError(f"The cluster has no group {shared_name!r}").with_fields(
                shared_name=shared_name
            )
        self = cls.__new__(cls)
        self._adopt(owner, None)
        self._unlink_on_close = False
        return self

    def _adopt(self, owner: Any, name: str | None) -> None:
        self._owner = owner
        self._config: Config = ray.get(owner.config.remote())
        self._label = name or "accumulator_group"
        self._plan = Plan(self._config.members, self._config.shards)
        self._closed = False

    def _check_agreement(self, asked: Mapping[str, TensorSpec]) -> None:
        existing = self._config.members
        for member in sorted(existing.keys() | asked.keys()):
            have, want = existing.get(member), asked.get(member)
            if repr(have) != repr(want):
                raise InvalidArgumentError(
                    f"The cluster's group {self.shared_name!r} exists with member {member!r} "
                    f"{have}, but {want} was asked for"
                ).with_fields(what=f"member {member!r}", existing=str(have), asked=str(want))

    def _wait_for_hosts(self, nodes: set[str]) -> None:
        end = time.monotonic() + _START
        while missing := nodes - {name for name, host in self.hosts().items() if host.alive}:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"After {_START:g} seconds these nodes have no segment of "
                    f"{self.shared_name!r}: {', '.join(sorted(missing))}"
                )
            time.sleep(0.05)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shared_name!r} over Ray>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared_name(self) -> str:
        """The name that workers attach to."""
        return self._config.name

    @property
    def name(self) -> str:
        """The label given at construction."""
        return self._label

    @property
    def members(self) -> dict[str, TensorSpec]:
        """The specs of the members, by name."""
        return dict(self._config.members)

    @property
    def reduction_type(self) -> str:
        """MEAN, SUM or CMEAN: that of members without their own."""
        return self._config.reduction

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
        state: tuple[int, int, dict[str, HostState], dict[str, int]] = self._call("state")
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
    ) -> "Round[GroupTaken]":
        """Take the gradients of all hosts for the length of a ``with`` block.

        As on one host: `num_required` counts gradients; leaving the block consumes them and moves
        the step on; an exception, or the death of this process, consumes nothing. Other than there,
        a process that is stopped for longer than ``timing.chief_lease``
        loses its round, and the end of its block raises.

        Args:
            num_required: How many gradients, of all hosts together.
            timeout: Seconds to wait for them; None: for ever.
            on_death: "raise": a host that is lost ends the wait with WorkerDiedError.
        """
        return Round(self, num_required, timeout, on_death, sharded=False)

    def round_of_shards(
        self,
        num_required: int,
        *,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> "Round[ShardedTaken]":
        """Take as `round`, but leave the rows at the shards; functions are called with them."""
        return Round(self, num_required, timeout, on_death, sharded=True)

    def set_global_step(self, new_global_step: int) -> None:
        """Set the step of all hosts; gradients stay. A step lower than the current one: a warning.

        After the owner was started again, this is what makes it go on: see `round`.
        """
        new = arguments.int64(new_global_step, "new_global_step")
        old = self._call("set_global_step", new, uuid.uuid4().hex)
        if new < old:
            _logger.warning("global_step of %r: %d, then %d", self.shared_name, old, new)

    def advance_step(self, step: int) -> int:
        """Move the step forward and drop the gradients of older steps; return how many."""
        dropped: int = self._call("advance_step", arguments.int64(step, "step"))
        return dropped

    def close(self) -> None:
        """Let go of the group. It stays in the cluster, unless `unlink_on_close`."""
        if not self._closed:
            if self._unlink_on_close:
                self.unlink()
            self._closed = True

    def unlink(self) -> None:
        """Remove the group: its actors, and the segments' names on all nodes."""
        if not self._closed:
            _end(self._owner)
            self._closed = True

    def _call(self, method: str, *args: Any, timeout: float = 60.0, **options: Any) -> Any:
        """Call the owner; again if it is being started again. All its methods may be repeated.

        Raises:
            FailedPreconditionError: The handle is closed, or the owner does not come back.
        """
        if self._closed:
            raise FailedPreconditionError("The group is closed")
        end = time.monotonic() + timeout
        while True:
            try:
                return ray.get(getattr(self._owner, method).remote(*args, **options))
            except LOST as error:
                if time.monotonic() > end or isinstance(error, ray.exceptions.ActorDiedError):
                    raise FailedPreconditionError(
                        f"The owner of {self.shared_name!r} is not there: {error}"
                    ) from error
                time.sleep(0.1)


class Round(Generic[_Result]):
    """A round over all hosts; made by `AccumulatorGroup.round`."""

    def __init__(
        self,
        group: AccumulatorGroup,
        num_required: object,
        timeout: object,
        on_death: object,
        *,
        sharded: bool,
    ) -> None:
        self._group = group
        self._required = arguments.int64(num_required, "num_required")
        if self._required < 1:
            raise InvalidArgumentError(
                f"Argument num_required must be positive, but was {self._required}"
            )
        self._timeout = arguments.timeout(timeout)
        self._tell = arguments.on_death(on_death)
        self._sharded = sharded
        self._ticket = ""
        self._heartbeat: _Heartbeat | None = None

    def __enter__(self) -> _Result:
        """Wait for the gradients and open the round.

        Raises:
            DeadlineExceededError: The timeout passed.
            WorkerDiedError: A host was lost, and ``on_death`` is "raise".
            FailedPreconditionError: The owner was started again and knows no step until
                `set_global_step`; or it is gone.
            CancelledError: The owner has not heard of this process for ``timing.chief_lease``.
            OutOfRangeError: An integer result does not fit its dtype.
        """
        if self._ticket:
            raise FailedPreconditionError("This round has been entered already; make another one")
        self._ticket = uuid.uuid4().hex
        try:
            return self._enter()
        except BaseException:
            self._give_up()
            raise

    def _enter(self) -> _Result:
        group = self._group
        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            left = _PARKED if end is None else max(0.0, min(_PARKED, end - time.monotonic()))
            answer = group._call("ask", self._ticket, self._required, left, tell=self._tell)  # noqa: SLF001
            match answer:
                case Opened():
                    if self._heartbeat is None:
                        self._heartbeat = _Heartbeat(group, self._ticket, self._required)
                    result = self._fetch(answer)
                    if not isinstance(result, Missing):
                        return cast("_Result", result)  # as `sharded` says
                    group._call("missing", self._ticket, result.keys)  # noqa: SLF001
                case Waiting():
                    if end is not None and time.monotonic() >= end:
                        raise self._deadline_exceeded(answer)
                case HostsDied(hosts):
                    raise WorkerDiedError(
                        f"Hosts were lost: {', '.join(hosts)}; nothing was consumed"
                    ).with_fields(pids=(), contributors=())
                case NotReady():
                    raise FailedPreconditionError(
                        f"The owner of {group.shared_name!r} was started again and does not know "
                        "the step: call set_global_step with that of your parameters"
                    )
                case _:
                    raise CancelledError(
                        f"The wait for a round of {group.shared_name!r} was ended: this process "
                        "was silent for too long"
                    )

    def _deadline_exceeded(self, answer: Waiting) -> DeadlineExceededError:
        hosts = f"{len(answer.hosts)} hosts: {', '.join(answer.hosts)}"
        return DeadlineExceededError(
            f"{answer.accumulated} of the {self._required} required gradients had arrived; the "
            f"global step is {answer.step}; alive are {hosts}"
        ).with_fields(accumulated=answer.accumulated, required=self._required, step=answer.step)

    def _fetch(self, opened: Opened) -> Any:
        """Have the shards add up; Missing: some have lost pieces."""
        config, plan = self._group._config, self._group._plan  # noqa: SLF001
        numbers = [number for number in range(config.shards) if opened.of_shard(number)]
        actors = {number: find(config, f"shard {number}") for number in numbers}
        if self._sharded:
            calls = {n: actors[n].run.remote(opened, _nothing, ()) for n in numbers}
        else:
            calls = {n: actors[n].reduced.remote(opened) for n in numbers}
        parts: dict[int, Any] = {}
        missing: set[BatchKey] = set()
        for number, call in calls.items():
            try:
                parts[number] = ray.get(call)
            except LOST:
                missing.update(opened.of_shard(number))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            else:
                if isinstance(parts[number], Missing):
                    missing.update(parts[number].keys)
        if missing:
            return Missing(tuple(missing))
        if self._sharded:
            return ShardedTaken(opened, tuple(Shard(n, actors[n], opened) for n in numbers))
        empty: dict[str, Any] = {}
        return plan.join([parts.get(n, empty) for n in range(config.shards)], opened)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Consume the gradients and move the step on; after an exception, neither.

        Raises:
            FailedPreconditionError: The round has ended before its block; or the owner died just
                now, and whether the round was consumed is not known.
        """
        if kind is not None:
            self._give_up()
            return
        try:
            ended = self._group._call("leave", self._ticket, consume=True)  # noqa: SLF001
        finally:
            self._rest()
        if not ended:
            raise FailedPreconditionError(
                "The round was ended before its block: by a new step, by an owner that was started "
                "again, or because this process was silent for too long"
            )

    def _give_up(self) -> None:
        self._rest()
        with contextlib.suppress(FailedPreconditionError):
            self._group._call("leave", self._ticket, timeout=5.0, consume=False)  # noqa: SLF001

    def _rest(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


class _Heartbeat:
    """Says to the owner that the chief is alive, while it is in its block."""

    def __init__(self, group: AccumulatorGroup, ticket: str, required: int) -> None:
        self._group, self._ticket, self._required = group, ticket, required
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="shmacc chief").start()

    def _run(self) -> None:
        pause = self._group._config.timing.chief_lease / 4  # noqa: SLF001
        while not self._stopped.wait(pause):
            with contextlib.suppress(FailedPreconditionError):
                self._group._call("ask", self._ticket, self._required, 0.0, tell=False)  # noqa: SLF001

    def stop(self) -> None:
        self._stopped.set()


def _nothing(_: GroupTaken) -> None:
    """Only have the shard add up."""


def _find_owner(name: str) -> Any | None:
    try:
        return ray.get_actor(f"{name}/owner", namespace=NAMESPACE)
    except ValueError:
        return None


def _end(owner: Any) -> None:
    with contextlib.suppress(*LOST):
        ray.get(owner.end.remote())
    ray.kill(owner, no_restart=True)
