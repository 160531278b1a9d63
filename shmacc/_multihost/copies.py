"""The owner's line of changes: what every copy of the parameters must have, and what comes next.

A copy has a lineage, the name of its last change. Changes are made in one line: each is for copies
with one lineage, its parent, and leaves its own. A change goes through these states:

    staged     The owner has named it. Hosts get it and check it. If one cannot make it, it is
               dropped, and no copy has changed. It is also dropped if its chief is lost: the next
               chief's may differ.
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

If no host has a copy, a restore begins another line. A host that then comes back with a copy of the
earlier line may have answered a later term, since clocks differ. So each copy says with which
beginning its line has begun. An owner does not end for a host of another line: it takes a term
above, and the host gets a copy of the line. (If the owner dies before that, the next one learns
two lines, and goes on with that of the later term.)

`make model` walks these rules every way (tools/multihost/shmacc_hosts), and finds a fault for each
that is left out.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from shmacc._base.lineage import Lineage
from shmacc._multihost.changes import (
    BEGINNING_BITS,
    MARK_BITS,
    UNKNOWN,
    Change,
    beginning,
    lineage_of,
    same,
)
from shmacc._multihost.messages import (
    LAST_STEP,
    AtLastStep,
    Ended,
    Fence,
    Opened,
    Refused,
    Report,
    Stage,
    Staging,
    Told,
)
from shmacc.errors import FailedPreconditionError

_logger = logging.getLogger("shmacc")

_LATEST = 30.0  # seconds that a new owner waits for hosts that Ray does not list yet
_FURTHEST = 1 << 32  # a segment that is further ahead is damaged, or set by hand
_REMEMBERED = 1024  # calls
_BEGINNINGS = 65_521  # the largest prime that fits: so all bits of a term count

Answered = Told | Refused | AtLastStep | Ended
ChangeAnswer = Staging | Answered


class Copies:
    """The owner's line of changes; without parameters it stays empty.

    Attributes:
        lineage: What every copy must have; None: not known, or no host has a copy.
        is_learning: Whether hosts have to answer this owner first.
        listed: The hosts that can take part, as far as the driver knows; None: not known.
        change: The change that is staged or committed, until its round has ended.
        problems: Why hosts can have no part.
    """

    def __init__(self, are_there: bool, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self.lineage: Lineage | None = None
        self.is_learning = are_there
        self.listed: frozenset[str] | None = None
        self.change: Change | None = None
        self.problems: dict[str, str] = {}
        self._answered_at: float | None = None  # when all listed hosts had answered
        self._named = 0  # changes that this owner has named
        self._answers: OrderedDict[str, Answered] = OrderedDict()  # by call; see `note`
        self._differed: dict[str, int] = {}  # by host: how often its digest was another

    # What hosts must have

    def has(self, report: Report) -> bool:
        """Whether a host's copy has the line's last change."""
        if report.copy is None:  # the group has no parameters
            return True
        return self.lineage is not None and same(report.copy.lineage, self.lineage)

    def is_of_another_line(self, report: Report) -> bool:
        """Whether a host's copy belongs to a line that began with another restore."""
        own, line = lineage_of(report), self.lineage
        return line is not None and own.term > 0 and beginning(own) != beginning(line)

    def source(self, reports: Iterable[Report], report: Report) -> str | None:
        """Return a host whose copy the reporting one can get; None: it needs none, or none has it.

        Each report gets another source: two hosts may be cut off from each other.
        """
        if self.has(report):
            return None
        able = sorted(each.host for each in reports if lineage_of(each) == self.lineage)
        return able[report.number % len(able)] if able else None

    def count(self, reports: Iterable[Report]) -> int:
        """Return how many living hosts have the line."""
        return sum(map(self.has, reports))

    # Learning

    def learn(self, reports: list[Report], term: int, now: float) -> int | None:
        """Learn line and step, if all hosts have answered this term; return the step, or None.

        After a power failure of all hosts, say, those that come first may not have the last update:
        so a new owner waits a while for as many hosts as had it.
        """
        if not self._is_answered(reports, term):
            return None
        self._answered_at = now if self._answered_at is None else self._answered_at
        base = max((r.copy for r in reports if r.copy and r.copy.lineage.term), default=None)
        had = [each.copies for each in reports if base and lineage_of(each) == base.lineage]
        if len(reports) < max(had, default=0) and now - self._answered_at < _LATEST:
            return None
        self.lineage = None if base is None else base.lineage
        self.is_learning = False
        return -1 if base is None else self.ahead(reports, base.step) or base.step

    def learn_again(self) -> None:
        """Forget the line: no host has it any more."""
        self.is_learning, self.lineage, self._answered_at = True, None, None

    def is_nowhere(self, reports: list[Report], term: int) -> bool:
        """Whether all hosts are heard, and none has the line or can still get it."""
        change = self.change
        return (
            self.lineage is not None
            and self._is_answered(reports, term)
            and not any(self.has(each) or (change and change.can_get(each)) for each in reports)
        )

    def must_answer(self, reports: Iterable[Report], term: int) -> frozenset[str]:
        """Return the hosts that can take part, and have not answered this term.

        A host that reports takes part, also if the driver does not list it yet, or any more.
        """
        terms = {each.host: each.term for each in reports}
        names = {*terms, *(self.listed or ())}
        return frozenset(name for name in names if terms.get(name) != term)

    def _is_answered(self, reports: Iterable[Report], term: int) -> bool:
        """Whether all hosts that can take part have answered."""
        return bool(self.listed) and not self.must_answer(reports, term)

    def ahead(self, reports: Iterable[Report], step: int) -> int | None:
        """Return the step to which the owner must move for a host's sake; None: it need not.

        A host's segment may be at a later step, or at this one with another copy: that is replaced
        only together with a higher step.
        """
        steps = [step]
        for report in reports:
            if (copy := report.copy) is None:
                continue
            differs = self.lineage is not None and not self.has(report)
            least = max(report.step + differs, copy.begun)
            if least - step > _FURTHEST or least > LAST_STEP:
                self.problems[report.host] = (
                    f"its segment is at step {report.step}, its copy leads to {copy.begun}, and "
                    f"the group is at {step}"
                )
            else:
                steps.append(least)
        return max(steps) if max(steps) > step else None

    # Changes

    def begin(
        self,
        call: str,
        host: str,
        term: int,
        step: int,
        source: object,
        size: int,
        now: float,
        *,
        mark: int | None = None,  # of the chief's round; None: the change replaces all copies
        checked: Lineage | None = None,  # of the host's copy for which the chief has checked it
    ) -> None:
        """Stage a change of a chief on this host, by a new name. It leads to this step."""
        self._named += 1
        line = 1 + term % _BEGINNINGS if self.lineage is None else beginning(self.lineage)
        number = (self._named << BEGINNING_BITS) + line
        name = Fence(term, (number << MARK_BITS) + (mark or 0))
        parent = None if mark is None else self.lineage
        is_checked = checked is not None and checked == parent
        asked = frozenset(() if is_checked else {host})
        stage = Stage(name, parent, step, source, size)
        self.change = Change(stage, call, host, now, now, asked, is_checked)

    def is_made(self, block: Opened, mark: int, reports: Iterable[Report]) -> bool:
        """Whether the line's last change is the update of this block of an earlier owner."""
        line = self.lineage
        if line is None or (line.term, line.number % (1 << MARK_BITS)) != (block.fence.term, mark):
            return False
        steps = {each.copy.step for each in reports if each.copy and each.copy.lineage == line}
        return block.step + 1 in steps

    def answered(self, call: str) -> Answered | None:
        """Return the last answer to a call; None: it is not answered yet."""
        return self._answers.get(call)

    def note(self, call: str, answer: Answered) -> None:
        """Keep the first answer to a call: a late or repeated message of it begins no other change.

        The last 1,024 are enough: the chiefs of earlier ones have long stopped sending.
        """
        self._answers.setdefault(call, answer)
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    def answer(
        self, call: str, reports: Iterable[Report], now: float, lease: float
    ) -> ChangeAnswer:
        """Return the answer to the chief's call that makes a change."""
        if (found := self._answers.get(call)) is not None:
            return found
        if self.change is None or self.change.call != call:
            return Ended()
        self.change.heard = now
        return Staging(self.change.late(reports, now, lease), self.change.committed)

    def end(self, answer: Answered) -> None:
        """Forget the change, since its round has ended, or since it is dropped."""
        if self.change is not None:
            self.note(self.change.call, answer)
        self.change = None

    def commit(self, change: Change, reports: Iterable[Report], now: float) -> None:
        """From here on hosts make the change."""
        change.commit(reports, now)
        self.lineage = Lineage(*change.stage.update, 0 if change.is_whole else UNKNOWN)

    def learn_digest(self, change: Change, reports: Iterable[Report]) -> bool:
        """Take over the digest that the chief's host reports, or any host if that is lost.

        Returns:
            Whether it is known now, and was not before.
        """
        if self.lineage is None or self.lineage.digest != UNKNOWN:
            return False
        found = {each.host: lineage_of(each) for each in reports if self.has(each)}
        is_mine = not change.left and any(each.host == change.host for each in reports)
        chosen = change.host if is_mine else min(found, default=None)
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

    def is_everywhere(
        self, change: Change, reports: list[Report], now: float, lease: float
    ) -> bool:
        """Whether the committed change is in the copy of every host that can make it.

        If the chief still waits, its own host must have it: the rest of the block reads it there.
        """
        on = {each.host for each in reports if lineage_of(each) == self.lineage}
        enough = bool(on) if change.left else change.host in on
        return enough and not change.late(reports, now, lease)

    def outcome_at_home(self, change: Change, reports: Iterable[Report]) -> Refused | None:
        """Return why the chief's own host cannot make the committed change, though others do.

        None: it has made the change, or still may, or is lost.
        """
        home = [each for each in reports if each.host == change.host]
        if any(map(change.refused_by, home)):
            why = "This host could not get the change any more"
        elif any(not (self.has(each) or change.fits(each)) for each in home):
            why = "This host's copy has become another one"
        else:
            return None
        found = change.refusal(home) or Refused(change.host, FailedPreconditionError(why))
        return found._replace(committed=True)
