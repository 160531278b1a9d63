"""The hosts as the owner knows them: by their last reports."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shmacc._multihost.messages import Batch, BatchKey, Death, Fence, Member, Report, Timing

NUMBER_BITS = 32
"""Incarnations and grants are numbered from term << NUMBER_BITS on: no two owners have the same."""


@dataclass(slots=True)
class Host:
    """A host.

    Attributes:
        name: Its name.
        incarnation: The latest one of its forwarder.
        heard: When it reported last.
        lost: Whether its lease has ended since.
        gated: Whether it must learn of no step: its published arrays are those of an earlier one.
        report: The last report of this incarnation, if there was one.
        fence: What its segment's content was last known to belong to, of whichever incarnation.
        consumed: The grant of its batch that the round before the present fence consumed.
        deaths: The number of the last death that was heard of, of this incarnation.
    """

    name: str
    incarnation: int
    heard: float
    lost: bool = False
    gated: bool = False
    report: Report | None = None
    fence: Fence | None = None
    consumed: int | None = None
    deaths: int = 0

    def news(self, deaths: tuple[Death, ...]) -> list[Death]:
        """Return those that were not heard of before: reports repeat them."""
        new = [death for death in deaths if death.number > self.deaths]
        self.deaths = max([self.deaths, *(death.number for death in new)])
        return new

    @property
    def takes_part(self) -> bool:
        """Whether it lives, and is told of grants."""
        return not self.lost and not self.gated

    @property
    def is_coming(self) -> bool:
        """Whether its forwarder has just been started: its segment may have gradients."""
        return self.takes_part and self.report is None

    def is_at(self, fence: Fence) -> bool:
        """Whether it lives, and its gradients are of this fence."""
        return not self.lost and self.report is not None and self.report.fence == fence

    def was_at(self, fence: Fence) -> bool:
        """Whether its gradients were last known to be of this fence, or of the one before."""
        return self.fence is not None and self.fence >= Fence(fence.term, fence.number - 1)

    def pending(self, fence: Fence) -> int:
        """Return how many gradients a round could get of it now."""
        return self.report.count if self.report is not None and self.is_at(fence) else 0

    def has_answered(self, grant: int) -> bool:
        """Whether it has sealed its segment for the grant, and may still be shipping."""
        return not self.lost and self.report is not None and self.report.sealed_for == grant

    def batch(self, grant: int) -> Batch | None:
        """Return what it has shipped for the grant."""
        if self.report is None or not self.has_answered(grant):
            return None
        return self.report.batch

    def may_be_adopted(self, fence: Fence, step: int, set_at: Fence) -> bool:
        """Whether its segment, which is at another fence, has gradients of this one.

        Steps and fences go up together unless `set_global_step` comes in between. So a segment at
        the present step has gradients of the present fence, if it was heard of since then. If it
        was not, the segment is new, or the owner is; and then the chief that set the step has said
        what it stands for.

        Args:
            fence: The present one.
            step: The present one.
            set_at: The fence at the last `set_global_step`.
        """
        if self.report is None or self.report.step != step:
            return False
        known = self.fence
        return known is None or known.term != fence.term or known == fence or known >= set_at


class Hosts:
    """All hosts that have ever reported to this owner."""

    def __init__(self, term: int) -> None:
        self._term = term
        self._hosts: dict[str, Host] = {}
        self._gates: dict[str, set[str]] = {}  # what has closed them, by host
        self._counted: tuple[Fence, int, int] | None = None

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def changed(self) -> None:
        """Count again: a host's report, or whether it lives, may have changed."""
        self._counted = None

    def counted(self, fence: Fence) -> tuple[int, int]:
        """Return how many gradients a round could have now, and how many hosts live.

        They are asked for several times for each report, and change once.
        """
        if self._counted is None or self._counted[0] != fence:
            pending = sum(host.pending(fence) for host in self)
            self._counted = fence, pending, sum(not host.lost for host in self)
        return self._counted[1:]

    def find(self, name: str) -> Host | None:
        """Return the host of that name."""
        return self._hosts.get(name)

    def is_gated(self, name: str) -> bool:
        """Whether something has closed the gate of that host, be it known or not."""
        return bool(self._gates.get(name))

    def gate(self, name: str, by: str, *, closed: bool) -> None:
        """Close a host's gate, or open it if nothing else has closed it."""
        closers = self._gates.setdefault(name, set())
        if closed:
            closers.add(by)
        else:
            closers.discard(by)
        if name in self._hosts:
            self._hosts[name].gated = bool(closers)

    def places(self, shards: int) -> tuple[str, ...]:
        """Return a host for each shard: of those that take part, about as many for each."""
        names = sorted(host.name for host in self if host.takes_part)
        return tuple(names[shard % len(names)] for shard in range(shards))

    def enrol(self, name: str, now: float) -> int:
        """Return a new incarnation's number: higher than all that were, of earlier terms, too."""
        host = self._known(name, 0, now)
        self._start(host, max(host.incarnation, self._term << NUMBER_BITS) + 1)
        host.heard = now
        return host.incarnation

    def heard(self, report: Report, now: float) -> Host | None:
        """Keep a report; None if it is of an earlier incarnation, or an earlier report."""
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
        """Return the hosts that were not heard of for too long, and are not known as lost."""
        lease = timing.patience(1.0)  # the least: most hosts need no closer look
        return [
            host
            for host in self
            if host.heard < now - lease
            and not host.lost
            and (host.report is None or host.heard < now - timing.patience(host.report.pace))
        ]

    def members(self, grant: int) -> tuple[Member, ...]:
        """Return the batches that were shipped for a grant, by host."""
        return tuple(
            Member(BatchKey(host.name, host.incarnation, grant), batch)
            for host in sorted(self, key=lambda host: host.name)
            if (batch := host.batch(grant)) is not None
        )

    def begin_term(self, term: int) -> None:
        """Give forwarders numbers of another term from now on."""
        self._term = term
        self.consumed(())

    def consumed(self, members: Iterable[Member]) -> None:
        """Note whose batches a round has consumed: of the one before the present fence."""
        keys = {member.key.host: member.key for member in members}
        for host in self:
            key = keys.get(host.name)
            is_its = key is not None and key.incarnation == host.incarnation
            host.consumed = key.grant if key is not None and is_its else None

    def _known(self, name: str, incarnation: int, now: float) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(name, incarnation, now, gated=self.is_gated(name))
        return self._hosts[name]

    @staticmethod
    def _start(host: Host, incarnation: int) -> None:
        host.incarnation = incarnation
        host.report = None
        host.deaths = 0


def two_with_one_contributor(members: Iterable[Member]) -> tuple[int, BatchKey, BatchKey] | None:
    """Return the lowest contributor that is in two batches, and which they are."""
    seen: dict[int, BatchKey] = {}
    found = []
    for key, batch in members:
        for contributor in batch.sealed.contributors:
            other = seen.setdefault(contributor, key)
            if other != key:
                found.append((contributor, other, key))
    return min(found, default=None)
