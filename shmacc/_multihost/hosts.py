"""The hosts as the owner knows them: by their last reports."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shmacc._multihost.changes import lineage_of, same
from shmacc._multihost.messages import (
    Batch,
    BatchKey,
    Death,
    Fence,
    HostBatch,
    Loss,
    Order,
    Report,
    Timing,
)

NUMBER_BITS = 32
"""Incarnations and grants are numbered from term << NUMBER_BITS on: no two owners use the same."""

_APART = 10  # how many times the expiry a host at a cut link gets no shard


@dataclass(slots=True)
class Host:
    """What the owner knows of a host. Reports of earlier forwarders no longer count."""

    name: str
    incarnation: int
    heard: float  # when it reported last
    lost: bool = False  # whether its lease has ended since
    in_line: bool = True  # whether its copy has the owner's lineage, or there are no parameters
    out_since: float = 0.0  # when `in_line` became False
    report: Report | None = None  # the last report of this incarnation
    order: Order | None = None  # the last order to this incarnation
    fence: Fence | None = None  # the last fence reported, by any incarnation
    consumed: int | None = None  # the grant of its batch in the last round; None: it had no batch
    deaths: int = 0  # the number of the last death that this incarnation has reported
    told: frozenset[int] = frozenset()  # the numbers of the deaths that a chief was told of
    apart: float = float("-inf")  # until when it gets no shard, since a link to it is cut

    def news(self, deaths: tuple[Death, ...]) -> list[Death]:
        """Return the deaths that are new: each report repeats the deaths of earlier reports."""
        new = [death for death in deaths if death.number > self.deaths]
        self.deaths = max([self.deaths, *(death.number for death in new)])
        return new

    def note_told(self, loss: Loss) -> None:
        """Note that a chief was told of a death: the host does not report it to a later owner."""
        deaths = () if self.report is None else self.report.deaths
        self.told |= {death.number for death in deaths if death[1:] == loss[1:]}

    @property
    def takes_part(self) -> bool:
        """Whether the host lives, and can hold its segment for a grant."""
        return not self.lost and self.in_line

    def gets_copy(self, since: float) -> bool:
        """Whether the host lives, is getting a whole copy, and began to need it after `since`."""
        gets = self.report is not None and self.report.whole and not (self.in_line or self.lost)
        return gets and self.out_since > since

    @property
    def is_coming(self) -> bool:
        """Whether the host's forwarder has started, and has not reported the segment's content."""
        return self.takes_part and self.report is None

    def is_at(self, fence: Fence) -> bool:
        """Whether the host lives, and its gradients belong to this fence."""
        return not self.lost and self.report is not None and self.report.fence == fence

    def pending(self, fence: Fence) -> int:
        """Return how many gradients the host could give to a round now."""
        return self.report.count if self.report and self.takes_part and self.is_at(fence) else 0

    def has_answered(self, grant: int) -> bool:
        """Whether the host holds its segment for the grant, even if its pieces are not sent yet."""
        return not self.lost and self.report is not None and self.report.held_for == grant

    def batch(self, grant: int) -> Batch | None:
        """Return the batch that the host has shipped for the grant; None: it has not yet."""
        if self.report is None or not self.has_answered(grant):
            return None
        return self.report.batch

    def may_be_adopted(self, fence: Fence, step: int, set_at: Fence) -> bool:
        """Whether the host's gradients count at this fence, though it may report another fence.

        Steps and fences go up together, except at `set_global_step`. So if the host has reported a
        fence since the last `set_global_step`, a segment at the present step has gradients of the
        present fence. If the host has no fence, or a fence of another owner, the segment or the
        owner is new. Then the chief that set the step, at the fence `set_at`, has thereby said that
        gradients of this step count.
        """
        if self.report is None or self.report.step != step:
            return False
        known = self.fence
        return known is None or known.term != fence.term or known == fence or known >= set_at


def tasks(order: Order, report: Report) -> Order:
    """Return an order without what the host has done already, or need not learn at once."""
    has_shipped = report.batch is not None and report.held_for == order.grant
    line = order.lineage
    if line is not None and same(lineage_of(report), line):
        line = line._replace(digest=0)
    return replace(
        order,
        serial=0,
        slack=0,
        pace=0.0,
        copies=0,
        told=frozenset(),
        grant=None if has_shipped else order.grant,
        shard_hosts=() if has_shipped else order.shard_hosts,
        adopt=order.adopt and report.fence != order.fence,
        lineage=line,
        source=order.source and "some host",
    )


@dataclass(frozen=True, slots=True)
class Grant:
    """An order to all hosts: hold the segment, ship its content to shards, report the batch."""

    number: int
    since: float
    shard_hosts: tuple[str, ...]

    def waits_for(self, hosts: Iterable[Host]) -> list[Host]:
        """Return the hosts that have not shipped for this grant.

        They include hosts that have reported no gradients, or have not reported at all: such a host
        may have accepted a gradient meanwhile.
        """
        return [host for host in hosts if host.takes_part and host.batch(self.number) is None]

    def is_over(self, hosts: Iterable[Host], now: float, timing: Timing, *, enough: bool) -> bool:
        """Whether all batches of the grant have come, or it no longer waits for missing batches."""
        waited_for, age = self.waits_for(hosts), now - self.since
        if not waited_for or age >= timing.expiry:
            return True
        nobody_ships = not any(host.has_answered(self.number) for host in waited_for)
        return enough and nobody_ships and age >= timing.grace

    def times(self, timing: Timing) -> list[float]:
        """Return the times at which `is_over` may change without a message."""
        return [self.since + timing.grace, self.since + timing.expiry]


class Hosts:
    """All hosts that ever reported to this owner; `home` is the owner's host (None: unknown)."""

    def __init__(self, term: int, home: str | None = None) -> None:
        self._term, self._home = term, home
        self._hosts: dict[str, Host] = {}
        self._counted: tuple[Fence, int, int] | None = None

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    @property
    def reports(self) -> list[Report]:
        """The last reports of the hosts that live."""
        return [host.report for host in self if host.report is not None and not host.lost]

    def changed(self) -> None:
        """Forget the counts: a host's report, or whether it lives, may have changed."""
        self._counted = None

    def counted(self, fence: Fence) -> tuple[int, int]:
        """Return how many gradients a round could have now, and how many hosts live.

        The result is kept: one report changes the numbers once, but they are read several times.
        """
        if self._counted is None or self._counted[0] != fence:
            pending = sum(host.pending(fence) for host in self)
            self._counted = fence, pending, sum(not host.lost for host in self)
        return self._counted[1:]

    def note_line(self, has: Callable[[Report], bool], now: float) -> None:
        """Note which hosts have the right copy; assume it of hosts that have not reported."""
        for host in self:
            in_line = host.report is None or has(host.report)
            if in_line != host.in_line:
                host.in_line, host.out_since = in_line, now
                self.changed()

    def find(self, name: str) -> Host | None:
        return self._hosts.get(name)

    def shard_hosts(self, shards: int, now: float) -> tuple[str, ...]:
        """Return a host for each shard. Hosts that take part get about equally many shards.

        A host that is cut off from another host gets no shard, unless this is so for all hosts.
        """
        able = [host for host in self if host.takes_part]
        names = sorted(host.name for host in able if host.apart <= now)
        names = names or sorted(host.name for host in able)
        return tuple(names[shard % len(names)] for shard in range(shards))

    def note_cuts(self, grant: Grant, now: float, timing: Timing) -> None:
        """Give no shards to the ends of cut links, after a grant that has expired.

        Hosts at such links hold for the grant, and report which shards' hosts they do not reach.
        If neither end has a shard, no link between the two is needed, since hosts ship only to
        hosts of shards. The owner's host keeps its shards. In the worst case it has all of them;
        then hosts need only a link to the owner, which their reports need anyway.

        But a host may only have been too slow. So this exclusion ends after ten times the expiry;
        if the link is still cut then, another grant expires.
        """
        for host in grant.waits_for(self):
            if host.report is not None and host.has_answered(grant.number):
                for name in {host.name, *host.report.unreached} - {self._home}:
                    self._hosts[name].apart = now + _APART * timing.expiry

    def enrol(self, name: str, now: float) -> int:
        """Return a new incarnation's number: higher than all earlier ones, in any term."""
        host = self._known(name, 0, now)
        self._start(host, max(host.incarnation, self._term << NUMBER_BITS) + 1)
        host.heard = now
        return host.incarnation

    def heard(self, report: Report, now: float) -> Host | None:
        """Keep a report, return its host; None: the report is old, or of an earlier incarnation."""
        host = self._known(report.host, report.incarnation, now)
        if report.incarnation < host.incarnation:
            return None
        if report.incarnation > host.incarnation:  # enrolled with this owner's predecessor
            self._start(host, report.incarnation)
        if host.report is not None and report.number <= host.report.number:
            return None
        host.report, host.heard = report, now
        if report.fence is not None:
            host.fence = report.fence
        return host

    def silent(self, now: float, timing: Timing) -> list[Host]:
        """Return the hosts that have been silent for too long, and are not yet marked as lost."""
        lease = timing.patience(1.0)  # the shortest lease: most hosts need no closer look
        return [
            host
            for host in self
            if host.heard < now - lease
            and not host.lost
            and (host.report is None or host.heard < now - timing.patience(host.report.pace))
        ]

    def members(self, grant: int) -> tuple[HostBatch, ...]:
        """Return the batches that were shipped for a grant, by host."""
        return tuple(
            HostBatch(BatchKey(host.name, host.incarnation, grant), batch)
            for host in sorted(self, key=lambda host: host.name)
            if (batch := host.batch(grant)) is not None
        )

    def begin_term(self, term: int) -> None:
        """Begin to number incarnations from a later term; no batch counts as consumed any more."""
        self._term = term
        self.consumed(())

    def consumed(self, members: Iterable[HostBatch]) -> None:
        """Note which batches the last round consumed."""
        grants = {(key.host, key.incarnation): key.grant for key, _ in members}
        for host in self:
            host.consumed = grants.get((host.name, host.incarnation))

    def _known(self, name: str, incarnation: int, now: float) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(name, incarnation, now)
        return self._hosts[name]

    @staticmethod
    def _start(host: Host, incarnation: int) -> None:
        host.incarnation = incarnation
        host.report = host.order = None
        host.deaths, host.told = 0, frozenset()


def at_two_hosts(members: Iterable[HostBatch]) -> dict[int, tuple[str, str]]:
    """Return the contributors that are in two hosts' batches, each with these two hosts."""
    seen: dict[int, str] = {}
    found: dict[int, tuple[str, str]] = {}
    for key, batch in members:
        for contributor in batch.contributors:
            if (other := seen.setdefault(contributor, key.host)) != key.host:
                found.setdefault(contributor, (other, key.host))
    return found
