"""The owner's line of changes: what every copy of the parameters must have, and what comes next.

A copy has a lineage, the name of its last change. Changes are made in one line: each is for copies
with one lineage, its parent, and leaves its own. A change goes through these states:

    staged     The owner has named it. Hosts get it and check it. If one cannot make it, it is
               dropped, and no copy has changed. So it is if its chief is lost: the next chief's may
               differ.
    committed  All living hosts with the parent have it, or cannot get it any more. Its lineage is
               the owner's from here on. It is never given up: hosts make it, whoever dies.
    told       Every living host that can make it reports its lineage. Now the chief hears of it,
               and its block may end. If the chief is lost, the owner ends the round.

A copy changes only together with a higher step of its segment: a worker may be computing a gradient
from the old copy at the present step. A host that has missed a change, or whose segment is at the
change's step already, gets another host's whole copy. If need be the owner moves past the segment's
step (`ahead`).

A new owner learns the line (`learn`): every host that can take part must answer its term first.
After that no host follows the earlier owner. The base is the copy with the highest lineage. A
change that is staged and in no copy was told to nobody.

tools/model/copies searches these rules, and finds a fault for each that is left out.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shmacc._base.lineage import Lineage
from shmacc._multihost.hosts import Host, Hosts
from shmacc._multihost.messages import (
    LAST_STEP,
    AtLastStep,
    Ended,
    Fence,
    Refused,
    Report,
    Stage,
    Staging,
    Told,
)
from shmacc.errors import FailedPreconditionError

_logger = logging.getLogger("shmacc")

UNKNOWN = -1
"""The digest of a change that is committed, until a host has reported it."""

_SLOWEST = 20e6  # bytes a second that a host gets at least
_LATEST = 30.0  # seconds that a new owner waits for hosts that may have the line and are not listed
_FURTHEST = 1 << 32  # a segment that is further ahead is damaged, or set by hand
_REMEMBERED = 1024  # calls

Answered = Told | Refused | AtLastStep | Ended
ChangeAnswer = Staging | Answered


def same(has: Lineage, wanted: Lineage) -> bool:
    """Whether a copy has the lineage that is wanted."""
    return has[:2] == wanted[:2] and wanted.digest in {has.digest, UNKNOWN}


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
        left: Whether its chief is lost, or waits no more.
        without: Hosts that had not got it in time when it was committed.
    """

    stage: Stage
    call: str
    host: str
    since: float
    heard: float
    committed: bool = False
    left: bool = False
    without: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether it replaces everything, and is made outside a round."""
        return self.stage.parent is None


class Copies:
    """The owner's line of changes.

    Attributes:
        lineage: What every copy must have; None: not known, or no host has a copy.
        is_learning: Whether hosts have to answer this owner first.
        listed: The hosts that can take part, as far as the driver knows; None: not known.
        change: The change that is staged or committed, until its round has ended.
        problems: Why hosts can have no part.
    """

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self.lineage: Lineage | None = None
        self.is_learning = True
        self.listed: frozenset[str] | None = None
        self.change: Change | None = None
        self.problems: dict[str, str] = {}
        self._answered_at: float | None = None  # when all listed hosts had answered
        self._named = 0  # changes that this owner has named
        self._answers: OrderedDict[str, Answered] = OrderedDict()  # by call; see `_note`
        self._differed: dict[str, int] = {}  # by host: how often its digest was another

    # What hosts must have

    def has(self, report: Report | None, step: int) -> bool:
        """Whether a host's gradients at this step are computed from a whole copy of the line."""
        copy = None if report is None else report.copy
        if copy is None or self.lineage is None:
            return False
        return same(copy.lineage, self.lineage) and copy.begun <= step

    def stage_for(self, report: Report) -> Stage | None:
        """Return the change that a host must get: one for its copy, that it has not made yet."""
        change = self.change
        if change is None or report.copy is None or self._has_made(report, change):
            return None
        return change.stage if _fits(report, change) else None

    def source(self, hosts: Iterable[Host], report: Report) -> str | None:
        """Return a host from which another one can get its copy.

        It is another one at each report: the two may be cut off from each other.
        """
        lineage = self.lineage
        if lineage is None or lineage.digest == UNKNOWN:
            return None
        able = sorted(
            each.name
            for each in hosts
            if each.name != report.host and not each.lost and _lineage(each) == lineage
        )
        return able[report.number % len(able)] if able else None

    def count(self, hosts: Iterable[Host]) -> int:
        """Return how many living hosts have the line."""
        return sum(
            self.lineage is not None and not host.lost and same(_lineage(host), self.lineage)
            for host in hosts
        )

    # Learning

    def learn(self, hosts: Hosts, term: int, now: float) -> int | None:
        """Learn line and step, if all hosts have answered this term; return the step, or None.

        After a power failure of all hosts, say, those that come first may not have the last update:
        so a new owner waits a while for as many hosts as had it.

        The step is past no segment, and no change that was begun is past it: gradients of lower
        steps may be computed from something else.
        """
        found = self._answered(hosts, term)
        if found is None:
            return None
        self._answered_at = now if self._answered_at is None else self._answered_at
        base = max((r.copy for r in found if r.copy and r.copy.lineage.term), default=None)
        had = max((r.copies for r in found if base is not None and r.copy == base), default=0)
        if len(found) < had and now - self._answered_at < _LATEST:
            return None
        self.lineage = None if base is None else base.lineage
        self.is_learning = False
        step = -1 if base is None else base.step
        # What was begun in a copy that has no lineage does not matter: it is replaced.
        least = [r.step for r in found] + [
            r.copy.begun for r in found if r.copy and r.copy.lineage.term
        ]
        return max([step, *(each for each in least if each - step <= _FURTHEST)])

    def learn_again(self) -> None:
        """Forget the line: no host has it any more."""
        self.end(Ended())
        self.is_learning, self.lineage, self._answered_at = True, None, None

    def is_nowhere(self, hosts: Hosts, term: int) -> bool:
        """Whether all hosts are heard, and none has the line or can still get it."""
        found = self._answered(hosts, term)
        if found is None or self.lineage is None:
            return False
        change = self.change
        able = change is not None and change.committed
        return not any(
            (report.copy is not None and same(report.copy.lineage, self.lineage))
            or (able and change is not None and report.staged == change.stage.update)
            for report in found
        )

    def must_answer(self, hosts: Hosts, term: int) -> frozenset[str]:
        """Return the hosts that can take part, and have not answered this term.

        A host that reports takes part, also if the driver does not list it yet, or any more.
        """
        names = {host.name for host in hosts if host.report is not None and not host.lost}
        answered = {host.name for host in hosts if host.name in names and _term(host) == term}
        return frozenset({*names, *(self.listed or ())} - answered)

    def _answered(self, hosts: Hosts, term: int) -> list[Report] | None:
        """Return the reports of all hosts that can take part; None: some are missing."""
        if not self.listed or self.must_answer(hosts, term):
            return None
        return [host.report for host in hosts if host.report is not None and not host.lost]

    def ahead(self, hosts: Iterable[Host], step: int) -> int | None:
        """Return the step to which the owner must move for a host's sake; None: it need not.

        A host's segment may be at a later step, or at this one with another copy: that is replaced
        only together with a higher step.
        """
        steps = [step]
        for host in hosts:
            if host.lost or host.report is None or host.report.copy is None:
                continue
            report, copy = host.report, host.report.copy
            differs = self.lineage is not None and not same(copy.lineage, self.lineage)
            least = max(report.step + (differs and report.step >= 0), copy.begun)
            if least - step > _FURTHEST or least > LAST_STEP:
                self.problems[host.name] = (
                    f"its segment is at step {report.step}, its copy leads to {copy.begun}, and "
                    f"the group is at {step}"
                )
            else:
                steps.append(least)
        return max(steps) if max(steps) > step else None

    # Changes

    def named(self, term: int, step: int, source: object, size: int, *, whole: bool) -> Stage:
        """Return a change with a new name, which leads to this step."""
        self._named += 1
        return Stage(Fence(term, self._named), None if whole else self.lineage, step, source, size)

    def begin(self, call: str, host: str, stage: Stage, now: float) -> None:
        """Stage a change of a chief on this host."""
        self.change = Change(stage, call, host, now, now)

    def answered(self, call: str) -> Answered | None:
        """Return the last answer to a call; None: it is not answered yet."""
        return self._answers.get(call)

    def _note(self, call: str, answer: Answered) -> None:
        """Keep the answer to a call: a late or repeated message of it begins no other change.

        The last 1,024 are enough: the chiefs of earlier ones have long stopped sending.
        """
        self._answers[call] = answer
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    def answer(self, call: str, hosts: Iterable[Host], now: float, lease: float) -> ChangeAnswer:
        """Return the answer to the chief's call that makes a change."""
        if (found := self._answers.get(call)) is not None:
            return found
        if self.change is None or self.change.call != call:
            return Ended()
        self.change.heard = now
        return Staging(self.late(hosts, now, lease), self.change.committed)

    def end(self, answer: Answered) -> None:
        """End the change: its round has ended, or it is dropped. An earlier answer stays."""
        if self.change is not None and self.answered(self.change.call) is None:
            self._note(self.change.call, answer)
        self.change = None

    def drop(self, call: str) -> None:
        """Note that a call begins no change any more, unless it is answered."""
        if self.answered(call) is None:
            self._note(call, Ended())

    def tell(self) -> None:
        """Note that the chief may be told. The change stays until its round has ended."""
        if self.change is not None:
            self._note(self.change.call, Told())

    def refuse(self, refused: Refused) -> None:
        """Note that the chief's own host cannot make a change that is committed: others make it."""
        if self.change is not None:
            self._note(self.change.call, refused)
            self.change.left = True

    @property
    def is_told(self) -> bool:
        return self.change is not None and isinstance(self.answered(self.change.call), Told)

    def late(self, hosts: Iterable[Host], now: float, lease: float) -> tuple[str, ...]:
        """Return the hosts that the change waits for.

        A host that has the change makes it, unless it is lost. One that does not have it counts as
        lost after the lease, and the time that a large change takes.
        """
        change = self.change
        if change is None:
            return ()
        lease += change.stage.size / _SLOWEST
        late = []
        for host in hosts:
            report = host.report
            if host.lost or report is None or report.copy is None or self._has_made(report, change):
                continue
            staged, update = report.staged, change.stage.update
            if staged == update and not change.committed:
                continue
            in_time = now - change.since < lease and host.name not in change.without
            may_come = staged == update or in_time
            if may_come and not self._has_refused(report) and _fits(report, change):
                late.append(host.name)
        return tuple(sorted(late))

    def refusal(self, hosts: Iterable[Host]) -> Refused | None:
        """Return why the change that is staged cannot be made: a host's error."""
        for host in hosts:
            error = self._error_of(host)
            if error is not None:
                return Refused(host.name, error)
        return None

    def outcome_at_home(self, hosts: Iterable[Host]) -> Refused | None:
        """Return why the chief's own host does not get the committed change, as others do.

        None: it has it, or may still get it.
        """
        change, lineage = self.change, self.lineage
        home = next((h for h in hosts if change is not None and h.name == change.host), None)
        report = None if home is None or home.lost else home.report
        if change is None or lineage is None or home is None or report is None or not report.copy:
            return None
        error = self._error_of(home)
        if error is None and self._has_refused(report):
            error = FailedPreconditionError("This host could not get the change any more")
        is_other = not same(report.copy.lineage, lineage) and not _fits(report, change)
        if error is None and is_other:
            error = FailedPreconditionError("This host's copy has become another one")
        return None if error is None else Refused(home.name, error, committed=True)

    def _has_refused(self, report: Report | None) -> bool:
        refused = None if report is None else report.refused
        return (
            refused is not None
            and self.change is not None
            and refused.update == self.change.stage.update
        )

    def _error_of(self, host: Host) -> Exception | None:
        """Return a host's error, if it lives and cannot make the change."""
        report = None if host.lost else host.report
        if report is None or report.refused is None or not self._has_refused(report):
            return None
        return report.refused.error

    def can_be_committed(self, hosts: Iterable[Host], now: float, lease: float) -> bool:
        change = self.change
        if change is None or change.committed or self.late(hosts, now, lease):
            return False
        update = change.stage.update
        return any(h.report is not None and h.report.staged == update and not h.lost for h in hosts)

    def commit(self, hosts: Iterable[Host], now: float) -> None:
        """From here on hosts make the change."""
        change = self.change
        if change is not None:
            change.committed, change.since = True, now
            update = change.stage.update
            reports = [host.report for host in hosts if host.report is not None]
            change.without = frozenset(r.host for r in reports if r.staged != update)
            self.lineage = Lineage(*update, 0 if change.is_whole else UNKNOWN)

    def learn_digest(self, hosts: Iterable[Host]) -> bool:
        """Take over the digest that the chief's host reports, or any host if that is lost.

        Returns:
            Whether it is known now, and was not before.
        """
        change, lineage = self.change, self.lineage
        if change is None or lineage is None or lineage.digest != UNKNOWN:
            return False
        found = {h.name: own for h in hosts if not h.lost and same(own := _lineage(h), lineage)}
        mine = [h for h in hosts if h.name == change.host and not h.lost]
        chosen = change.host if mine and not change.left else min(found, default=None)
        if chosen not in found:
            return False
        self.lineage = found[chosen]
        for name in [name for name, own in found.items() if own != self.lineage]:
            times = self._differed[name] = self._differed.get(name, 0) + 1
            text = "the same update has had another result than at the chief's host"
            _logger.warning("At host %s %s: it gets that one's copy", self._shown(name), text)
            if times > 1:
                self.problems[name] = f"{text}, {times} times"
        return True

    def is_everywhere(self, hosts: Iterable[Host], now: float, lease: float) -> bool:
        """Whether the committed change is in the copy of every host that can make it.

        If the chief still waits, its own host must have it: the rest of the block reads it there.
        """
        change, lineage = self.change, self.lineage
        if change is None or lineage is None or not change.committed or lineage.digest == UNKNOWN:
            return False
        on = {host.name for host in hosts if not host.lost and _lineage(host) == lineage}
        enough = bool(on) if change.left else change.host in on
        return enough and not self.late(hosts, now, lease)

    @staticmethod
    def _has_made(report: Report, change: Change) -> bool:
        return report.copy is not None and report.copy.lineage[:2] == change.stage.update


def _fits(report: Report, change: Change) -> bool:
    """Whether the change can be made at a host: in its copy, and with a higher step of its segment.

    A segment that is further, by void steps of another owner, has gradients from the copy as it is.
    """
    if report.copy is None or change.is_whole:
        return report.copy is not None
    return report.copy.lineage == change.stage.parent and report.step < change.stage.step


def _term(host: Host) -> int | None:
    return None if host.report is None else host.report.term


def _lineage(host: Host) -> Lineage:
    """Return the lineage of a host's copy, or one that is no copy's."""
    known = host.report is not None and host.report.copy is not None
    return host.report.copy.lineage if known else Lineage(0, 0)  # type: ignore[union-attr]
