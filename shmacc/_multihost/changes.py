"""A change of all copies of the parameters: who has it, who cannot make it, who is waited for."""

from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._base.lineage import NO_COPY, Lineage
from shmacc._multihost.messages import Refusal, Refused, Report, Stage

UNKNOWN = -1
"""The digest of a change that is committed, until a host has reported it."""

_SLOWEST = 20e6  # bytes a second that a host gets at least


def same(has: Lineage, wanted: Lineage) -> bool:
    """Whether a copy has the lineage that is wanted."""
    return has[:2] == wanted[:2] and wanted.digest in {has.digest, UNKNOWN}


def lineage_of(report: Report | None) -> Lineage:
    """Return the lineage of a host's copy, or one that is no copy's."""
    copy = None if report is None else report.copy
    return (NO_COPY if copy is None else copy).lineage


@dataclass(slots=True)
class Change:
    """A change of all copies.

    Attributes:
        stage: What hosts get.
        call: The chief's call; it may be repeated.
        host: The chief's host.
        since: When it was staged, or committed.
        heard: When its chief called last.
        committed: Whether hosts make it.
        told: Whether every living host that can make it has done so: its chief may hear of it.
        left: Whether its chief is lost, or waits no more.
        without: Hosts that had not got it in time when it was committed.
    """

    stage: Stage
    call: str
    host: str
    since: float
    heard: float
    committed: bool = False
    told: bool = False
    left: bool = False
    without: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether it replaces everything, and is made outside a round."""
        return self.stage.parent is None

    def is_in(self, report: Report) -> bool:
        """Whether a host has made it last."""
        return lineage_of(report)[:2] == self.stage.update

    def is_at(self, report: Report) -> bool:
        """Whether a host has got it."""
        return report.staged == self.stage.update

    def fits(self, report: Report) -> bool:
        """Whether a host can make it: its copy has the parent, and its segment a lower step.

        Another owner's void steps may have moved the segment further. Then it has gradients that
        were computed from the present copy.
        """
        parent, step = self.stage.parent, self.stage.step
        return parent is None or (lineage_of(report) == parent and report.step < step)

    def late(self, reports: Iterable[Report], now: float, lease: float) -> tuple[str, ...]:
        """Return the living hosts that it waits for.

        Hosts have the lease, and the time that a large change takes, to get it. After the commit,
        hosts that have it must make it; those that lacked it then are not waited for.
        """
        is_early = now - self.since < lease + self.stage.size / _SLOWEST

        def waits_for(report: Report) -> bool:
            if self.is_in(report) or self.refused_by(report) or not self.fits(report):
                return False
            if report.host in self.without:
                return False
            return self.committed if self.is_at(report) else is_early

        return tuple(sorted(report.host for report in reports if waits_for(report)))

    def refusal(self, reports: Iterable[Report]) -> Refused | None:
        """Return why it cannot be made: an error of a living host."""
        for report in reports:
            refusal = self.refused_by(report)
            if refusal is not None and refusal.error is not None:
                return Refused(report.host, refusal.error)
        return None

    def refused_by(self, report: Report) -> Refusal | None:
        """Return the host's word that it cannot make this change."""
        of_this = report.refused is not None and report.refused.update == self.stage.update
        return report.refused if of_this else None

    def can_be_committed(self, reports: list[Report], now: float, lease: float) -> bool:
        """Whether at least one host has it, and no living host is still waited for."""
        return not self.late(reports, now, lease) and any(map(self.is_at, reports))

    def commit(self, reports: Iterable[Report], now: float) -> None:
        """From here on hosts make it."""
        self.committed, self.since = True, now
        self.without = frozenset(each.host for each in reports if not self.is_at(each))
