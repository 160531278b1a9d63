"""The messages between the parts: whole states, numbered, so that a late message is recognised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shmacc._base.lineage import Copy, Lineage
from shmacc._base.shown import shown
from shmacc.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Timing:
    """How long hosts, owner and chiefs wait for each other, in seconds.

    Attributes:
        heartbeat: The longest time between two reports. After 5 s without news, `quiet` applies.
        announce: The shortest time between two reports of a grown count.
        heartbeats: How many reports a second the owner wants from all hosts together. If there
            would be more, each host reports more rarely, by the factor `Order.pace`.
        lease: A host is lost without a report for this time, or four heartbeats if that is longer.
        grace: How long a round with enough gradients waits for hosts that do not hold yet.
        expiry: How long a grant waits for hosts that hold, but have not shipped everything.
        chief_lease: A chief is lost after this time without a message.
    """

    heartbeat: float = 0.25
    announce: float = 0.02
    heartbeats: float = 200.0
    lease: float = 2.0
    grace: float = 0.5
    expiry: float = 30.0
    chief_lease: float = 10.0

    def __post_init__(self) -> None:
        """Refuse values that are not positive numbers."""
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InvalidArgumentError(
                    f"Timing's {one.name} must be a positive number, but was {shown(value)}"
                )

    def pace(self, hosts: int) -> float:
        """Return the factor by which `hosts` hosts must report more rarely."""
        return max(1.0, hosts / (self.heartbeats * self.heartbeat))

    def quiet(self, pace: float) -> float:
        """Return the longest time between two reports of a host where nothing has changed."""
        return max(self.heartbeat * pace, self.patience(pace) / 3)

    def patience(self, pace: float) -> float:
        """Return after how many seconds of silence a host that reports at this pace is lost."""
        return max(self.lease, 4 * self.heartbeat * pace)


class Fence(NamedTuple):
    """Counts how often gradients were consumed or dropped, within the term of an owner."""

    term: int
    number: int


LAST_STEP = 2**63 - 1
"""The highest step. As on one host, no round can end at it, since no step follows."""

NO_FENCE = Fence(0, 0)
"""Lower than the fence of every owner."""


class BatchKey(NamedTuple):
    """Names a batch and its pieces at the shards. Later keys of a host compare greater."""

    host: str
    incarnation: int
    grant: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a segment contained when it was held: counts and weights, but no rows."""

    count: int
    weight: int
    contributors: frozenset[int] = frozenset()  # the contributors that its gradients named
    members: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # count and weight of each
    shards: frozenset[int] = frozenset()  # the shards that have a piece of it


class Death(NamedTuple):
    """Workers of a host that have died or failed; the fields are as in a `WorkerDiedError`."""

    number: int  # each incarnation of the forwarder begins with 1
    pids: tuple[int, ...]  # as their own pid namespace knows them
    contributors: tuple[int, ...]
    reasons: tuple[str, ...] = ()


class Stage(NamedTuple):
    """A change of all copies, for hosts to get and check before it is made."""

    update: Fence  # its name; never used for another change
    parent: Lineage | None  # the lineage of copies that it is for; None: any (a restore)
    step: int  # the segments' step once it is made
    source: Any = None  # by which the driver of a host gets the change; then, the change itself
    size: int = 0  # in bytes


class Refusal(NamedTuple):
    """A host's statement that it cannot make a change."""

    update: Fence  # the change's name
    error: Exception | None  # why; None: the host cannot get it


@dataclass(frozen=True, slots=True)
class Report:
    """All that the owner must know of a host. It also says that the host is alive."""

    host: str
    incarnation: int  # of its forwarder
    number: int  # each incarnation begins with 1
    fence: Fence | None  # the content's fence; None: the forwarder has just started
    step: int  # the segment's; -1: there is no segment yet
    count: int  # how many gradients the segment has
    held_for: int | None = None  # the grant that the segment is held for
    batch: Batch | None = None  # the held content, once it has been shipped
    unreached: frozenset[str] = frozenset()  # before that: hosts of shards that lack their pieces
    deaths: tuple[Death, ...] = ()  # all deaths noticed since the fence moved on
    pace: float = 1.0  # of the last order: the owner waits for the next report accordingly
    term: int = 0  # the highest term in an order to this host: it follows no lower one
    finished: bool = False  # whether the segment is finished: a process may have done it
    copy: Copy | None = None  # the state of its copy; None: the group has no parameters
    staged: Fence | None = None  # the change that the host has checked, and can make
    refused: Refusal | None = None  # the last change that it cannot make
    copies: int = 0  # how many hosts had the owner's lineage when this host last had it
    problem: str = ""  # what is wrong with copy or segment, though the host takes part
    whole: bool = False  # whether it is getting a whole copy, since its source lacks old updates


@dataclass(frozen=True, slots=True)
class Order:
    """All that a host must do."""

    term: int  # the owner's
    serial: int  # in the term; each change of orders raises it
    incarnation: int  # of the forwarder that this is for
    ready: bool = False  # False: the owner has no step yet, so the segment stays as it is
    refused: bool = False  # whether this incarnation must end, since a later one is known
    fence: Fence = NO_FENCE  # the fence that the content must belong to
    step: int = 0
    hold: bool = False  # whether the segment must be held
    finished: bool = False  # whether the segment must be finished
    grant: int | None = None  # the grant to ship for; None: there is nothing to ship
    shard_hosts: tuple[str, ...] = ()  # with a grant: the host of each shard
    consumed: int | None = (
        None  # the grant of the host's batch in the last round; None: it had none
    )
    adopt: bool = False  # whether content of an earlier forwarder or owner counts at this fence
    slack: int = 1  # a count that has grown by this much is reported at once
    pace: float = 1.0  # the factor by which times between two reports are longer than in `Timing`
    lineage: Lineage | None = None  # that the copy must have; None: not known, or no parameters
    stage: Stage | None = None  # the change to get and check
    source: str | None = None  # a host whose copy has this lineage
    copies: int = 0  # how many living hosts have this lineage
    told: frozenset[int] = frozenset()  # the host's deaths that a chief was told of, by number


class HostBatch(NamedTuple):
    """A batch in a round, and its key."""

    key: BatchKey
    batch: Batch


@dataclass(frozen=True, slots=True)
class Opened:
    """A chief's round: the batches that shards must add up, and the host of each shard."""

    fence: Fence
    step: int
    members: tuple[HostBatch, ...]
    shard_hosts: tuple[str, ...] = ()
    lineage: Lineage | None = None  # of the copies from which its gradients were computed

    @property
    def count(self) -> int:
        return sum(member.batch.count for member in self.members)

    @property
    def weight(self) -> int:
        return sum(member.batch.weight for member in self.members)

    @property
    def contributors(self) -> npt.NDArray[np.int64]:
        """The contributors that took part, ascending."""
        who = [c for member in self.members for c in member.batch.contributors]
        return np.array(sorted(who), dtype=np.int64)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the count and the weight of each member that has gradients in the round."""
        totals: dict[str, tuple[int, int]] = {}
        for member in self.members:
            for name, (count, weight) in member.batch.members.items():
                before = totals.get(name, (0, 0))
                totals[name] = (before[0] + count, before[1] + weight)
        return totals

    def of_shard(self, shard: int) -> tuple[BatchKey, ...]:
        """Return the names of the pieces that a shard must have for the round."""
        return tuple(key for key, batch in self.members if shard in batch.shards)


@dataclass(frozen=True, slots=True)
class Share:
    """A shard's share of a round: the keys of its pieces, and numbers of the whole round."""

    fence: Fence
    keys: tuple[BatchKey, ...]
    count: int
    weight: int
    step: int

    @classmethod
    def of(cls, opened: Opened, shard: int) -> Self:
        keys = opened.of_shard(shard)
        return cls(opened.fence, keys, opened.count, opened.weight, opened.step)


@dataclass(frozen=True, slots=True)
class Waiting:
    """An answer: the chief's round does not have enough gradients yet."""

    accumulated: int  # how many have been reported
    step: int
    hosts: tuple[str, ...]  # living hosts
    late: tuple[str, ...] = ()  # hosts whose batches a grant waits for
    lost: tuple[str, ...] = ()  # lost hosts that may come back


class Loss(NamedTuple):
    """A lost host; or if there are `pids`, workers of a host that have died (see `Death`)."""

    host: str
    pids: tuple[int, ...] = ()
    contributors: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Died:
    """An answer to a chief that asked for losses: the losses that no other chief has heard of."""

    losses: tuple[Loss, ...]


class Conflict(NamedTuple):
    """In two steps without a round in between, two hosts have accepted the same contributor."""

    contributor: int
    hosts: tuple[str, str]


class NotReady(NamedTuple):
    """The owner was restarted and knows no step until `set_global_step`."""


class Finished(NamedTuple):
    """The group is finished: there are no more rounds."""


class Chiefless(NamedTuple):
    """The last chief was lost, and none has come since."""


class AtLastStep(NamedTuple):
    """The group is at `LAST_STEP`: no round or restore can end there, since no step follows."""


class Ended(NamedTuple):
    """The ticket is not queued: it was served, withdrawn or forgotten, or a new step ended it."""


class Staging(NamedTuple):
    """An answer to a chief that changes the parameters: not all hosts have the change yet."""

    late: tuple[str, ...]  # the hosts that it waits for
    committed: bool  # whether it will be made, whatever happens to the chief


class Told(NamedTuple):
    """The change is in the copy of every living host that could make it."""


class Refused(NamedTuple):
    """A host cannot make the change. Unless the change was `committed`, no copy has changed."""

    host: str
    error: Exception
    committed: bool = False


Answer = Opened | Waiting | Died | Conflict | NotReady | Finished | AtLastStep | Ended
