"""The hosts as the owner knows them: by their last reports."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shmacc._multihost.messages import (
    NO_GRANT,
    Batch,
    BatchKey,
    Death,
    Fence,
    Member,
    Report,
    Timing,
)

_INCARNATION_BITS = 32


@dataclass(slots=True)
class Host:
    """A host.

    Attributes:
        name: Its name.
        incarnation: The latest one of its forwarder.
        heard: When it reported last.
        lost: Whether its lease has ended since.
        report: The last report of this incarnation, if there was one.
        segment: Which segment it has.
        fence: What its segment's content was last known to belong to, of whichever incarnation.
        member: Its batch that counts, if it has one: of the owner's present fence.
        consumed: The batch that the round before this fence consumed.
        deaths: The number of the last death that was heard of, of this incarnation.
    """

    name: str
    incarnation: int
    heard: float
    lost: bool = False
    report: Report | None = None
    segment: int = 0
    fence: Fence | None = None
    member: Member | None = None
    consumed: int | None = None
    deaths: int = 0

    def news(self, deaths: tuple[Death, ...]) -> list[Death]:
        """Return those that were not heard of before: reports repeat them."""
        new = [death for death in deaths if death.number > self.deaths]
        self.deaths = max([self.deaths, *(death.number for death in new)])
        return new

    def is_at(self, fence: Fence) -> bool:
        """Whether it lives, and its gradients are of this fence."""
        return not self.lost and self.report is not None and self.report.fence == fence

    def pending(self, fence: Fence) -> int:
        """Return how many gradients a round could get of it now."""
        if self.is_at(fence) and self.report is not None:
            return self.report.count
        return self.member.batch.sealed.count if self.member is not None else 0

    def has_answered(self, grant: int, fence: Fence) -> bool:
        """Whether it has sealed its segment for the grant, and may still be shipping."""
        return self.is_at(fence) and self.report is not None and self.report.sealed_for == grant

    def has_committed(self, grant: int, fence: Fence) -> bool:
        """Whether it has shipped for the grant."""
        return self.has_answered(grant, fence) and self.batch is not None

    def may_be_adopted(self, fence: Fence, step: int, set_at: Fence) -> bool:
        """Whether a segment that a new forwarder found has gradients of the fence.

        It is as the last forwarder reported it, or has followed an order since then. Steps and
        fences go up together unless `set_global_step` comes in between, so without that the step
        tells which. Of a segment that this owner knows nothing about, the step decides, too: the
        segment is new, or the owner is, and then the chief that set the step has said what it
        stands for.

        Args:
            fence: The present one.
            step: The present one.
            set_at: The fence at the last `set_global_step`.
        """
        if self.report is None:
            return False
        if self.fence is None or self.fence.term != fence.term:
            return self.report.step == step
        return self.fence == fence or (self.fence >= set_at and self.report.step == step)

    def lets_workers_wait(self, grants: set[int], fence: Fence, *, stalled: bool) -> bool:
        """Whether workers of its may wait for the next step, with nothing in this one.

        Args:
            grants: Those that came to nothing: gradients refused for them are in no round.
            fence: The present one.
            stalled: Whether no gradient has come for long.
        """
        if self.report is None or not self.is_at(fence):
            return False
        refused = self.report.refused
        if refused is None:
            return stalled or bool(grants)
        return NO_GRANT in refused or not grants.isdisjoint(refused)

    @property
    def batch(self) -> Batch | None:
        """What its last report says it has shipped."""
        return None if self.report is None else self.report.batch


class Hosts:
    """All hosts that have ever reported to this owner."""

    def __init__(self, term: int) -> None:
        self._term = term
        self._hosts: dict[str, Host] = {}
        self._counted: tuple[Fence, int, int] | None = None

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def changed(self) -> None:
        """Count again: a host's report, its batch, or whether it lives may have changed."""
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

    def enrol(self, name: str, now: float) -> int:
        """Return a new incarnation's number: higher than all that were, of earlier terms, too."""
        host = self._hosts.setdefault(name, Host(name, 0, now))
        self._start(host, max(host.incarnation, self._term << _INCARNATION_BITS) + 1)
        host.heard = now
        return host.incarnation

    def heard(self, report: Report, now: float) -> Host | None:
        """Keep a report; None if it is of an earlier incarnation, or an earlier report."""
        host = self._hosts.setdefault(report.host, Host(report.host, report.incarnation, now))
        if report.incarnation < host.incarnation:
            return None
        if report.incarnation > host.incarnation:  # enrolled with this owner's predecessor
            self._start(host, report.incarnation)
        if host.report is not None and report.number <= host.report.number:
            return None
        if report.segment != host.segment:
            self._bury(host)
            host.segment = report.segment
        host.report = report
        host.heard = now
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

    def members(self) -> list[Member]:
        """Return the batches that count, by host."""
        found = [host.member for host in self if host.member is not None]
        return sorted(found, key=lambda member: member.key)

    def with_batches(self, keys: Collection[BatchKey]) -> list[Host]:
        """Return the hosts whose batch that counts is one of these."""
        return [host for host in self if host.member is not None and host.member.key in keys]

    def _bury(self, host: Host) -> None:
        """Keep a batch of a segment that is no more, beside what the host's new segment gets."""
        host.fence = None
        if host.member is None:
            return
        former = Host(f"{host.name} until {host.incarnation}", 0, host.heard, lost=True)
        former.member, host.member = host.member, None
        self._hosts[former.name] = former

    def begin_term(self, term: int) -> None:
        """Give forwarders numbers of another term from now on; forget all batches."""
        self._term = term
        self.forget_batches()

    def forget_batches(self) -> None:
        """Forget all batches, and which ones were consumed: a new fence."""
        self._hosts = {host.name: host for host in self if host.incarnation}
        for host in self:
            host.member = host.consumed = None

    @staticmethod
    def _start(host: Host, incarnation: int) -> None:
        host.incarnation = incarnation
        host.report = None
        host.deaths = 0


def two_with_one_contributor(members: list[Member]) -> tuple[int, BatchKey, BatchKey] | None:
    """Return the lowest contributor that is in two batches, and which they are."""
    seen: dict[int, BatchKey] = {}
    found = []
    for key, batch in members:
        for contributor in batch.sealed.contributors:
            other = seen.setdefault(contributor, key)
            if other != key:
                found.append((contributor, other, key))
    return min(found, default=None)
