"""The chief's side: a group over many hosts, with the calls of a group on one host."""

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import numpy as np

from shmacc._accumulators.group import AccumulatorGroup as LocalGroup
from shmacc._accumulators.taken import GroupPartial, GroupTaken
from shmacc._base import names
from shmacc._base.array_types import IndexArray
from shmacc._multihost.messages import Chiefless, Finished, NotReady, Timing
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._segment.stats import Stats
from shmacc._values import arguments
from shmacc._values.specs import TensorSpec
from shmacc.errors import DeadlineExceededError, FinishedError
from shmacc.ray._finding import warn_of_left
from shmacc.ray._link import Link
from shmacc.ray._making import make
from shmacc.ray._parts import HostState
from shmacc.ray._round import OPEN, Round
from shmacc.ray._waits import PATIENCE, Wait

_logger = logging.getLogger("shmacc")


class AccumulatorGroup:
    """A group whose gradients are applied on many hosts.

    Chiefs use this class. Workers use ``shmacc.attach(shared_name)``, which finds the segment of
    their own host. Any number of the cluster's processes may be chiefs; they wait in a queue.
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

        It returns once a new group's nodes have their segments. If a node has just died, this takes
        until Ray has noticed the death.

        Args:
            members: As for ``shmacc.AccumulatorGroup``, but all dimensions must be known, except
                for the first dimension of a sparse member.
            shared_name: As for ``shmacc.AccumulatorGroup``, but not None: workers attach to it.
            name: As for ``shmacc.AccumulatorGroup``.
            reduction_type: As for ``shmacc.AccumulatorGroup``.
            mode: As for ``shmacc.AccumulatorGroup``.
            owners: As for ``shmacc.AccumulatorGroup``.
            if_exists: What to do if the cluster has a group of this name, or nodes have segments of
                this name from an earlier run.
            unlink_on_close: Whether `close` removes the group.
            lanes: The lanes of each host's segment.
            capacity: The capacity of each host's segment; None: what /dev/shm has room for beside
                Ray's objects. An apply waits for room in either case.
            hosts: The ids of Ray's nodes that take part; None: all, even if they join later.
            shards: Into how many parts the rows are divided; None: one for each node.
            timing: How long hosts, owner and chiefs wait for each other.

        Raises:
            InvalidArgumentError: A bad argument, or the cluster's group of this name differs.
            AlreadyExistsError: `if_exists` is "error" and the cluster has a group of this name.
            FailedPreconditionError: Ray is not initialised; this process has another
                ``SHMACC_NAMESPACE`` than its node; or a node cannot have its segment, for instance
                since an earlier run left a different one. Nothing of a new group is left then.
            DeadlineExceededError: Not all nodes were ready in time.
        """
        options = Options(
            mode=mode,
            owners=owners,
            if_exists=if_exists,
            unlink_on_close=unlink_on_close,
            lanes=lanes,
            capacity=capacity,
        )
        self._link = make(shared_name, members, reduction_type, options, hosts, shards, timing)
        self._label = name or "accumulator_group"
        self._unlink_on_close = unlink_on_close

    @classmethod
    def attach(cls, shared_name: str, *, timeout: float | None = None) -> Self:
        """Return the cluster's group of that name, for another chief.

        Args:
            shared_name: The name.
            timeout: For how many seconds to wait for such a group; None: do not wait. (In `take`
                and `round`, None means for ever.)

        Raises:
            NotFoundError: There is no such group, and the timeout is None.
            DeadlineExceededError: There was no such group within the timeout.
            InvalidArgumentError: A bad argument.
            FailedPreconditionError: As for the constructor.
        """
        seconds = arguments.timeout(timeout)
        names.segment_name(shared_name)
        self = cls.__new__(cls)
        self.__setstate__(shared_name)
        self._link.connect(Wait(PATIENCE if seconds is None else seconds).until, seconds)
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shared_name!r} over Ray>"

    def __getstate__(self) -> str:
        """Pickle only the name. The first call of an unpickled group attaches as `attach` does."""
        return self._link.name

    def __setstate__(self, shared_name: str) -> None:
        self._link, self._label = Link(shared_name), "accumulator_group"
        self._unlink_on_close = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared_name(self) -> str:
        """The name that workers attach to."""
        return self._link.name

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
        """The reduction type of members that do not have their own."""
        return self._link.config.reduction

    @property
    def lanes(self) -> int:
        """How many applies can go on at the same time, on each host."""
        return self._link.config.options["lanes"] or 1

    @property
    def capacity(self) -> int | None:
        """How many gradients may be pending on each host; None: any number."""
        capacity: int | None = self._link.config.options["capacity"]
        return capacity

    @property
    def global_step(self) -> int:
        """The owner's step; hosts follow it within milliseconds.

        Raises:
            FailedPreconditionError: The owner was restarted and does not know the step until
                `set_global_step`.
        """
        return self._link.step()

    def num_accumulated(self) -> int:
        """How many gradients of living hosts wait for a take, by the hosts' last reports."""
        return self._link.state()[1]

    def hosts(self) -> dict[str, HostState]:
        """Return all hosts that have reported or have a problem, by the id of their node."""
        return self._link.state()[2]

    def counters(self) -> dict[str, int]:
        """Return what the owner has done: rounds, void steps, lost hosts, and so on."""
        return self._link.state()[3]

    def take(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> GroupTaken:
        """Take the gradients of all hosts. As on one host, this is a `round` with an empty block.

        Raises:
            The errors of entering a `round`.
        """
        with Round(self._link, num_required, at_least, timeout, on_death) as taken:
            return taken

    def round(
        self,
        num_required: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        on_death: arguments.OnDeath = "wait",
    ) -> Round:
        """Take the gradients of all hosts for the length of a ``with`` block.

        As on one host, but a process that is stopped for longer than ``timing.chief_lease`` loses
        its round, and the end of its block raises.

        Args:
            num_required: How many gradients to wait for, of all hosts together.
            at_least: How many are enough once the timeout has passed; None: `num_required`. Hosts
                then have ``timing.grace`` and a second to send them.
            timeout: For how many seconds to wait; None: for ever.
            on_death: "raise": end the wait with WorkerDiedError if a host is lost, or a worker
                has died since the last take. Each loss is raised once.
        """
        return Round(self._link, num_required, at_least, timeout, on_death)

    def set_global_step(self, new_global_step: int) -> None:
        """Set the step of all hosts; gradients stay. A lower step logs a warning.

        With parameters, this is `advance_step`. Without, a new owner waits for either call.

        Args:
            new_global_step: The step; from now on, applied gradients of earlier steps are dropped.
        """
        new = arguments.int64(new_global_step, "new_global_step")
        self._link.until_known("has_line", wait=Wait(PATIENCE))
        old = self._link.call("do", "set_global_step", new, uuid.uuid4().hex)
        if new < old and self._link.config.copy is None:
            _logger.warning("global_step of %r: %d, then %d", self.shared_name, old, new)

    def advance_step(self, step: int) -> int:
        """Move on to a later step and drop gradients of older steps; return how many were dropped.

        Without parameters, a restarted owner accepts any step, since it knows no earlier step.
        """
        new = arguments.int64(step, "step")
        self._link.until_known("has_line", wait=Wait(PATIENCE))
        return int(self._link.call("do", "advance_step", new))

    def wait_step(
        self, after: int, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait"
    ) -> int:
        """Wait until the owner's step is past `after`, and return it.

        Args:
            after: The last step that the caller knows.
            timeout: Seconds to wait; None: for ever.
            on_death: "raise": end the wait with ChiefDiedError if the last chief that waited for a
                round or had one open was lost, and no other chief has come since.

        Raises:
            FailedPreconditionError: As for `global_step`.
            Everything else as on one host.
        """
        after, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        link, wait, raises = self._link, Wait(seconds), arguments.on_death(on_death)
        while True:
            match link.wait("step_past", after, wait=wait, tell=raises):
                case int(step):
                    return step
                case Finished() | NotReady() | Chiefless() as ended:
                    raise link.error(ended)
            if wait.is_over():
                known, accumulated, *_ = link.state(wait.until)
                shown = "not known yet" if known is None else known
                raise DeadlineExceededError(
                    f"The global step is {shown}, not past {after}, after {seconds:g} seconds"
                ).with_fields(step=known, accumulated=accumulated)

    def steps(
        self, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait"
    ) -> Iterator[int]:
        """Yield the step at once, then the newest step whenever it has moved on, until `finish`.

        Each wait has this timeout, and raises like `wait_step`; to go on, call `steps` again.
        """
        arguments.timeout(timeout)
        arguments.on_death(on_death)
        return self._steps(timeout, on_death)

    def _steps(self, timeout: float | None, on_death: arguments.OnDeath) -> Iterator[int]:
        step: int | None = None
        # Ask this first: a restarted owner may know that the group is finished, but not the step.
        while self._link.call("running", until=(wait := Wait(timeout)).until):
            step = self._link.step(wait.until) if step is None else step
            yield step
            try:
                step = self.wait_step(step, timeout=timeout, on_death=on_death)
            except FinishedError:
                return

    def finish(self) -> None:
        """End the run on all hosts for good. Unlike on one host, no restore begins it anew.

        A worker that calls its segment's `finish` also ends the run on all hosts.
        """
        self._link.call("do", "finish")

    @property
    def running(self) -> bool:
        """Whether the run goes on, since nobody has called `finish`."""
        return bool(self._link.call("running"))

    def cancel(self) -> None:
        """End the wait of every chief that waits now for a take or round, with CancelledError."""
        self._link.call("do", "cancel")

    def snapshot(self, *, timeout: float | None = PATIENCE) -> GroupTaken:
        """Return what a take of all gradients would return now, and change nothing.

        This reads each living host once during the call, but not all at the same instant.

        Raises:
            DeadlineExceededError: A host (see the message) did not answer within the timeout.
            AlreadyExistsError: Two hosts have accepted the same contributor: the step will be void.
            FailedPreconditionError: As for `global_step`.
            OutOfRangeError: An integer result does not fit its dtype.
        """
        wait = Wait(arguments.timeout(timeout))
        step, parts = self._parts(wait)
        if step is None:
            raise self._link.error(NotReady())
        with LocalGroup(self.members, reduction_type=self.reduction_type) as group:
            group.advance_step(step)
            for part in parts:
                group.apply_partial(part, group.global_step)
            return group.snapshot()

    def contributors(self, *, timeout: float | None = PATIENCE) -> IndexArray:
        """Return the contributors to the present step on all living hosts: int64, ascending.

        Raises:
            DeadlineExceededError: As for `snapshot`.
        """
        parts = self._parts(Wait(arguments.timeout(timeout)))[1]
        none = np.empty(0, np.int64)
        return np.unique(np.concatenate([none, *(part.contributors for part in parts)]))

    def stats(self, *, timeout: float | None = PATIENCE) -> dict[str, Stats]:
        """Return the counters of each living host's segment, by the id of its node.

        Raises:
            DeadlineExceededError: As for `snapshot`.
        """
        return self._link.ask_hosts("stats", Wait(arguments.timeout(timeout)))[2]

    def _parts(self, wait: Wait) -> tuple[int | None, list[GroupPartial]]:
        """Return the owner's step, and the contents of living hosts that are at its fence.

        If the owner moves on meanwhile, this asks all hosts again.
        """
        while True:
            step, fence, copies = self._link.ask_hosts("copy", wait)
            if self._link.call("living", until=wait.until)[:2] == (step, fence):
                found = copies.values()
                return step, [part for at, part in found if at == fence and part.count]

    def close(self) -> None:
        """Detach. The group stays in the cluster, unless ``unlink_on_close`` was set.

        A round of the group that this process has open is given up, and its block's end raises.
        """
        if self._unlink_on_close:
            self.unlink()
        if not self._link.closed:
            for ticket, block in OPEN.copy().items():
                if block.link is self._link:
                    self._link.send("leave", ticket, consume=False)
            self._link.closed = True

    def unlink(self) -> None:
        """Remove the group's actors, and its segments' names on all nodes, even after `close`.

        A node that cannot be reached within 15 s keeps its names; logger ``shmacc`` warns of this.
        """
        if not self._link.removed:
            left = self._link.end()
            self._link.closed = self._link.removed = True
            warn_of_left(self.shared_name, left)
