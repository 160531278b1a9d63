"""The parts' messages: whole states, numbered, so that late ones are recognised."""

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
    """How long the parts wait for each other, in seconds.

    Attributes:
        heartbeat: The longest time between two reports of a forwarder.
        announce: The shortest time between two reports of a grown count.
        heartbeats: How many reports a second the owner wants from all hosts together. If there
            would be more, each host reports more rarely, by the factor `Order.pace`.
        lease: A host that has not reported for this long, or for four heartbeats, is lost.
        grace: How long a round that has enough waits for hosts that have not answered the grant.
        expiry: How long a grant waits for hosts that have answered it, and still ship.
        chief_lease: A chief that has not asked for this long is lost.
    """

    heartbeat: float = 0.25
    announce: float = 0.02
    heartbeats: float = 200.0
    lease: float = 2.0
    grace: float = 0.5
    expiry: float = 30.0
    chief_lease: float = 10.0

    def __post_init__(self) -> None:
        """Refuse values that are no times.

        Raises:
            InvalidArgumentError: A value is not a positive number.
        """
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
        """Return how many seconds a host of this `pace` may be silent before it is lost."""
        return max(self.lease, 4 * self.heartbeat * pace)


class Fence(NamedTuple):
    """How often gradients were consumed or dropped, in the term of an owner."""

    term: int
    number: int


LAST_STEP = 2**63 - 1
"""The last step: no round can close it, as on one host."""

NO_FENCE = Fence(0, 0)
"""A fence of no owner."""


class BatchKey(NamedTuple):
    """The name of a batch and of its pieces at the shards; a host's later batch is greater."""

    host: str
    incarnation: int
    grant: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a segment contained when it was held: counts and weights, but no rows.

    Attributes:
        count: How many gradients.
        weight: Their total weight.
        contributors: The contributors that the gradients named.
        members: For each member, the count and weight of the gradients that had it.
        shards: The shards that have a piece of it.
    """

    count: int
    weight: int
    contributors: frozenset[int] = frozenset()
    members: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shards: frozenset[int] = frozenset()


class Death(NamedTuple):
    """Workers of a host that have died or failed.

    Attributes:
        number: This message's number; each incarnation of the forwarder begins with 1.
        pids: The processes, as their own pid namespace knows them.
        contributors: Their contributors in the host's round.
        reasons: As in a `WorkerDiedError`.
    """

    number: int
    pids: tuple[int, ...]
    contributors: tuple[int, ...]
    reasons: tuple[str, ...] = ()


class Stage(NamedTuple):
    """A change of all copies, for hosts to get and check before it is made.

    Attributes:
        update: Its name; never used for another change.
        parent: The lineage of the copies that it is for; None: for any, since it replaces all.
        step: The step to which it leads.
        source: What a host gets it by: the driver's.
        size: How many bytes it has.
    """

    update: Fence
    parent: Lineage | None
    step: int
    source: Any = None
    size: int = 0


class Refusal(NamedTuple):
    """A change that a host cannot make.

    Attributes:
        update: Its name.
        error: Why; None: the host does not get it.
    """

    update: Fence
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that the owner must know of a host; also the heartbeat.

    Attributes:
        host: Its name.
        incarnation: Its forwarder's incarnation.
        number: This report's number; each incarnation begins with 1.
        fence: The fence that the segment's content belongs to; None: the forwarder has just
            started.
        step: The segment's step; -1: there is no segment yet.
        count: How many gradients the segment has.
        held_for: The grant that the segment is held for.
        batch: The held content, once it has been shipped.
        unreached: Until then, the hosts of shards that have not confirmed their pieces.
        deaths: All deaths that were noticed since the fence moved on.
        pace: The pace of the last order: the owner waits for the next report accordingly.
        term: The highest term of an order on this host: orders of lower terms are not followed.
        finished: Whether the segment is finished: a process of the host may have finished it.
        copy: What is known of the host's copy of the parameters; None: the group has none.
        staged: The change that the host has checked, and can make.
        refused: The last change that it cannot make.
        copies: How many hosts had the line when this one was in it last.
    """

    host: str
    incarnation: int
    number: int
    fence: Fence | None
    step: int
    count: int
    held_for: int | None = None
    batch: Batch | None = None
    unreached: frozenset[str] = frozenset()
    deaths: tuple[Death, ...] = ()
    pace: float = 1.0
    term: int = 0
    finished: bool = False
    copy: Copy | None = None
    staged: Fence | None = None
    refused: Refusal | None = None
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """All that a host must do.

    Attributes:
        term: The owner's.
        serial: This order's number in the term; each change raises it.
        incarnation: The forwarder's incarnation that this is for.
        ready: False: do nothing; the owner knows no step yet, or keeps it from this host.
        refused: A later incarnation is known; this one must end.
        fence: The fence that the content must belong to.
        step: The step.
        hold: Whether the segment must be held.
        finished: Whether the segment must be finished.
        grant: The grant to ship for; None: nothing is to be shipped.
        shard_hosts: With a grant, the host of each shard.
        consumed: The grant of the host's batch in the last round; None: it had no batch there.
        adopt: Whether content of an earlier forwarder or owner counts as content of this fence.
        slack: By how much the count must have grown to be worth a report at once.
        pace: The factor by which the times between two reports are longer than `Timing` says.
        lineage: What the host's copy must have; None: not known, or the group has no parameters.
        stage: The change to get and check.
        source: A host whose copy has this lineage.
        copies: How many living hosts have the line.
    """

    term: int
    serial: int
    incarnation: int
    ready: bool = False
    refused: bool = False
    fence: Fence = NO_FENCE
    step: int = 0
    hold: bool = False
    finished: bool = False
    grant: int | None = None
    shard_hosts: tuple[str, ...] = ()
    consumed: int | None = None
    adopt: bool = False
    slack: int = 1
    pace: float = 1.0
    lineage: Lineage | None = None
    stage: Stage | None = None
    source: str | None = None
    copies: int = 0


class HostBatch(NamedTuple):
    """A batch that is in a round."""

    key: BatchKey
    batch: Batch


@dataclass(frozen=True, slots=True)
class Opened:
    """A chief's round: the batches that shards must add up, and the host of each shard."""

    fence: Fence
    step: int
    members: tuple[HostBatch, ...]
    shard_hosts: tuple[str, ...] = ()

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
        """Return the count and the weight of each member of the group that has gradients."""
        totals: dict[str, tuple[int, int]] = {}
        for member in self.members:
            for name, (count, weight) in member.batch.members.items():
                before = totals.get(name, (0, 0))
                totals[name] = (before[0] + count, before[1] + weight)
        return totals

    def of_shard(self, shard: int) -> tuple[BatchKey, ...]:
        """Return the names of the pieces that a shard must have for the round."""
        return tuple(member.key for member in self.members if shard in member.batch.shards)


@dataclass(frozen=True, slots=True)
class Share:
    """What determines a shard's share of a round: its pieces, and numbers of the whole round."""

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
    """An answer: the chief's round does not have enough gradients yet.

    Attributes:
        accumulated: How many gradients have been reported.
        step: The step.
        hosts: The living hosts.
        late: Hosts that a grant waits for: they have not shipped, though enough gradients are
            there.
        lost: Lost hosts that may come back.
    """

    accumulated: int
    step: int
    hosts: tuple[str, ...]
    late: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Loss(NamedTuple):
    """A lost host; or, if there are pids, workers of this host that died.

    Attributes:
        host: The host.
        pids: As in a `Death`.
        contributors: As in a `Death`.
        reasons: As in a `Death`.
    """

    host: str
    pids: tuple[int, ...] = ()
    contributors: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Died:
    """An answer to a chief that asked to be told of losses: those while it waited."""

    losses: tuple[Loss, ...]


class Conflict(NamedTuple):
    """A contributor was accepted on two hosts in two consecutive steps."""

    contributor: int
    hosts: tuple[str, str]


class NotReady(NamedTuple):
    """The owner was restarted and knows no step until `set_global_step`."""


class Finished(NamedTuple):
    """The group is finished: there are no more rounds."""


class AtLastStep(NamedTuple):
    """No round can close `LAST_STEP`, though enough gradients are there; nor can a restore."""


class Ended(NamedTuple):
    """The ticket is not in the queue: served, withdrawn, forgotten, or ended by a new step."""


class Staging(NamedTuple):
    """An answer to a chief's change of the parameters: not all hosts have it yet.

    Attributes:
        late: The hosts that it waits for.
        committed: Whether it will be made, whatever happens to the chief.
    """

    late: tuple[str, ...]
    committed: bool


class Told(NamedTuple):
    """The change is in the copy of every living host that had its parent."""


class Refused(NamedTuple):
    """A host cannot make the change; no copy was changed, unless it was `committed`."""

    host: str
    error: Exception
    committed: bool = False


Answer = Opened | Waiting | Died | Conflict | NotReady | Finished | AtLastStep | Ended
