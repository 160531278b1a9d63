"""A change of all copies of the parameters: which hosts have it, cannot make it, or are awaited."""

from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._base.lineage import NO_COPY, Lineage
from shmacc._multihost.messages import Refusal, Refused, Report, Stage

UNKNOWN = -1
"""Stands for the digest of a committed change, until a host has reported the digest."""

MARK_BITS = 16
"""The lowest bits of a change's number are its mark: a hash of its round's ticket; 0: no round."""

BEGINNING_BITS = 16
"""The bits above the mark identify the restore that began the change's line (see copies.py)."""

_SLOWEST = 20e6  # bytes a second that every host can receive
_SMALL = 1 << 20  # all hosts may get a change of fewer bytes at once


def same(has: Lineage, wanted: Lineage) -> bool:
    """Whether lineage `has` equals `wanted`; an UNKNOWN digest in `wanted` is not compared."""
    return has[:2] == wanted[:2] and wanted.digest in {has.digest, UNKNOWN}


def beginning(lineage: Lineage) -> int:
    """Return the bits of a lineage that identify the restore that began its line of changes."""
    return lineage.number >> MARK_BITS & (1 << BEGINNING_BITS) - 1


def lineage_of(report: Report | None) -> Lineage:
    """Return the lineage of a host's copy; without a copy, the lineage of `NO_COPY`."""
    copy = None if report is None else report.copy
    return (NO_COPY if copy is None else copy).lineage


@dataclass(slots=True)
class Change:
    """A change of all copies, from its staging until its round has ended."""

    stage: Stage  # what hosts get
    call: str  # the chief's call; it may be repeated
    host: str  # the chief's host
    since: float  # when hosts were last asked to get it, or when it was committed
    heard: float  # when its chief called last
    asked: frozenset[str]  # hosts that were asked to get it
    # Whether the chief has checked that its own host can make the change. Then that host gets the
    # change only after the commit, which does not wait until the host has reported the change.
    checked: bool = False
    committed: bool = False  # whether hosts make it
    left: bool = False  # whether its chief is lost, or waits no more
    without: frozenset[str] = frozenset()  # hosts that did not have it yet at its commit

    @property
    def is_whole(self) -> bool:
        """Whether the change is a restore: it replaces all parameters, outside a round."""
        return self.stage.parent is None

    def is_in(self, report: Report) -> bool:
        """Whether the host has made this change, and no other since."""
        return lineage_of(report)[:2] == self.stage.update

    def is_at(self, report: Report) -> bool:
        """Whether the host has received the change; it may have made it since."""
        return report.staged == self.stage.update

    def fits(self, report: Report) -> bool:
        """Whether the host's copy is the change's parent, and its segment at a lower step.

        Void steps of another owner may have moved the segment to a later step. Then it has
        gradients of that step, computed from the present copy: so the copy must not change.
        """
        parent, step = self.stage.parent, self.stage.step
        return parent is None or (lineage_of(report) == parent and report.step < step)

    def late(self, reports: Iterable[Report], now: float, lease: float) -> tuple[str, ...]:
        """Return the living hosts that the change waits for.

        Before the commit: hosts that have not got it, for the lease, or longer if it is large.
        After the commit: hosts that have got it, and have not made it.
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
        """Whether the host has received the change, or the change's chief has checked it there."""
        is_home = self.checked and report.host == self.host
        is_sure = is_home and not self.is_in(report) and self._can(report)
        return self.is_at(report) or is_sure

    def has_asked(self, report: Report) -> bool:
        """Whether the host was asked to get the change."""
        return report.host in self.asked

    def ask_more(self, reports: list[Report], now: float, lease: float) -> bool:
        """Ask more hosts to get the change, if enough have it already; return whether it asked any.

        Each host that has a large change sends it to one host at a time, so that the chief's host
        need not send it to all. Hosts are asked in waves, since each wave costs messages: the next
        wave begins when half of the hosts with the change are free to send it. Hosts that are too
        late are not awaited. If all other hosts are too late, the chief's host must get the change
        before the commit: the chief may be lost afterwards.
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
        """Return the host's refusal of this change; None: it has not refused it."""
        of_this = report.refused is not None and report.refused.update == self.stage.update
        return report.refused if of_this else None

    def can_be_committed(self, reports: list[Report], now: float, lease: float) -> bool:
        """Whether a host has the change, and the change waits for no other living host."""
        return not self.late(reports, now, lease) and any(map(self.is_at, reports))

    def commit(self, reports: Iterable[Report], now: float) -> None:
        """Commit the change: hosts make it from now on, even if its chief is lost."""
        self.committed, self.since, self.asked = True, now, self.asked | {self.host}
        self.without = frozenset(each.host for each in reports if not self.can_get(each))
