"""A change of all copies of the parameters: who has it, who cannot make it, who is waited for."""

from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._base.lineage import NO_COPY, Lineage
from shmacc._multihost.messages import Refusal, Refused, Report, Stage

UNKNOWN = -1
"""The digest of a change that is committed, until a host has reported it."""

MARK_BITS = 16
"""The low bits of a change's number, which are those of its round's ticket; 0: it has no round."""

BEGINNING_BITS = 16
"""The bits above, which say with which beginning the line of changes has begun."""

_SLOWEST = 20e6  # bytes a second that a host gets at least
_SMALL = 1 << 20  # bytes of a change that all hosts may get at once


def same(has: Lineage, wanted: Lineage) -> bool:
    """Whether a copy has the lineage that is wanted."""
    return has[:2] == wanted[:2] and wanted.digest in {has.digest, UNKNOWN}


def beginning(lineage: Lineage) -> int:
    """Return which beginning a copy's line of changes has."""
    return lineage.number >> MARK_BITS & (1 << BEGINNING_BITS) - 1


def lineage_of(report: Report | None) -> Lineage:
    """Return the lineage of a host's copy, or one that is no copy's."""
    copy = None if report is None else report.copy
    return (NO_COPY if copy is None else copy).lineage


@dataclass(slots=True)
class Change:
    """A change of all copies."""

    stage: Stage  # what hosts get
    call: str  # the chief's call; it may be repeated
    host: str  # the chief's host
    since: float  # when hosts were last asked to get it, or when it was committed
    heard: float  # when its chief called last
    asked: frozenset[str]  # hosts that are to get it
    # Whether its chief has found that its own host can make it: that one gets it once it is
    # committed, and need not say before that it has it.
    checked: bool = False
    committed: bool = False  # whether hosts make it
    left: bool = False  # whether its chief is lost, or waits no more
    without: frozenset[str] = frozenset()  # hosts that had not got it in time when it was committed

    @property
    def is_whole(self) -> bool:
        """Whether the change replaces everything, and is made outside a round."""
        return self.stage.parent is None

    def is_in(self, report: Report) -> bool:
        """Whether the host's last change is this one."""
        return lineage_of(report)[:2] == self.stage.update

    def is_at(self, report: Report) -> bool:
        """Whether the host has received the change."""
        return report.staged == self.stage.update

    def fits(self, report: Report) -> bool:
        """Whether a host can make the change: its copy has the parent, its segment a lower step.

        Void steps of another owner may have moved the segment further. Then the segment has
        gradients of that step, computed from the copy as it is: so the copy may not change.
        """
        parent, step = self.stage.parent, self.stage.step
        return parent is None or (lineage_of(report) == parent and report.step < step)

    def late(self, reports: Iterable[Report], now: float, lease: float) -> tuple[str, ...]:
        """Return the living hosts that the change waits for.

        Those that were asked have the lease, and the time that a large change takes, to get it.
        After the commit, hosts that have it must make it; those that lacked it are not waited for.
        """
        is_early = self._is_early(now, lease)

        def waits_for(report: Report) -> bool:
            if self.is_in(report) or report.host in self.without or not self._can(report):
                return False
            if self.can_get(report):
                return self.committed
            return is_early or not (self.committed or self.has_asked(report))

        return tuple(sorted(report.host for report in reports if waits_for(report)))

    def can_get(self, report: Report) -> bool:
        """Whether a host has got the change, or is the chief's, where the chief has checked it."""
        is_home = self.checked and report.host == self.host
        is_sure = is_home and not self.is_in(report) and self._can(report)
        return self.is_at(report) or is_sure

    def has_asked(self, report: Report) -> bool:
        """Whether the host was asked to get the change."""
        return report.host in self.asked

    def ask_more(self, reports: list[Report], now: float, lease: float) -> bool:
        """Have more hosts get the change, if enough have it already; return whether there are more.

        At a time, at most as many hosts get a large change as have it: so each of these can send it
        to one host, and the chief's host need not send it to all. Hosts are asked in waves, since
        each wave costs messages: the next one begins when half of those that have the change are
        free. A host that is too late is not waited for. If then no host but the chief's could have
        the change, the chief's must get it, too: the chief may be lost after the commit.
        """
        if (
            self.checked
            and not any(map(self.is_at, reports))
            and not self.late(reports, now, lease)
        ):
            self.checked, self.asked, self.since = False, self.asked | {self.host}, now
            return True
        others = [each for each in reports if each.host != self.host and self._can(each)]
        lack = {each.host for each in others if not self.is_at(each)}
        have, new = 1 + len(others) - len(lack), sorted(lack - self.asked)
        busy = len(lack & self.asked) if self._is_early(now, lease) else 0
        most = len(new) if self.stage.size < _SMALL else have
        if not new or 2 * busy > most:
            return False
        self.asked |= {*new[: most - busy]}
        self.since = now
        return True

    def _is_early(self, now: float, lease: float) -> bool:
        return now - self.since < lease + self.stage.size / _SLOWEST

    def _can(self, report: Report) -> bool:
        return self.fits(report) and not self.refused_by(report)

    def refusal(self, reports: Iterable[Report]) -> Refused | None:
        """Return why the change cannot be made: an error of a living host."""
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
        """Whether at least one host has the change, and no living host is still waited for."""
        return not self.late(reports, now, lease) and any(map(self.is_at, reports))

    def commit(self, reports: Iterable[Report], now: float) -> None:
        """Commit the change: from here on hosts make it."""
        self.committed, self.since, self.asked = True, now, self.asked | {self.host}
        self.without = frozenset(each.host for each in reports if not self.can_get(each))
