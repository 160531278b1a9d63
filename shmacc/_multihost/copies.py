"""The owner's line of changes: which change every copy of the parameters must have, and the next.

A copy has a lineage, the name of its last change. All changes form one sequence, the *line*: each
is for copies with one lineage, its parent, and gives them its own lineage. The states of a change:

    staged     The owner has named it. Hosts get it and check it. If a host cannot make it,
               the change is dropped, and no copy has changed. It is also dropped if its chief is
               lost: the next chief may make a different change.
    committed  All living hosts with the parent have it, or cannot get it any more. From now on the
               owner's lineage is that of this change. Hosts make it, whichever process dies.
    told       Every living host that can make it reports its lineage. Now the chief gets the
               answer, and its block may end. If the chief is lost, the owner ends the round.

A copy changes only together with a higher step of its segment: a worker may be computing a gradient
from the old copy at the present step. A host that has missed a change, or whose segment is already
at the change's step, gets another host's whole copy. If necessary, the owner first moves past the
segment's step (`ahead`).

A new owner learns the line (`learn`): first every host that can take part must answer its term.
After that no host follows the earlier owner. The new owner continues from the copy with the highest
lineage. If a change is staged, but in no copy, then no chief was told that it was made.

If no host has a copy, a restore begins another line. A host that then comes back with a copy of the
earlier line may have answered a later term, since clocks differ. So each copy's lineage tells which
restore began its line (`beginning`). An owner does not end because of a host of another line: it
takes a still later term, and the host gets a copy of the owner's line. (If the owner dies before
that, the next owner learns of two lines, and continues the line with the later term.)

`make model` tries every order of events (tools/multihost/shmacc_hosts). With any one of these rules
left out, it finds a fault.
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
_FURTHEST = 1 << 32  # a segment more steps ahead is damaged, or its step was set by hand
_REMEMBERED = 1024  # how many calls' answers are kept
_BEGINNINGS = 65_521  # the largest prime below 2^16: the remainder depends on all bits of a term

Answered = Told | Refused | AtLastStep | Ended
ChangeAnswer = Staging | Answered


class Copies:
    """The owner's line of changes; without parameters it stays empty.

    Attributes:
        lineage: The lineage that every copy must have; None: not known, or no host has a copy.
        is_learning: Whether the owner still waits until all hosts have answered its term.
        listed: The hosts that can take part, as far as the driver knows; None: not known.
        change: The change that is staged or committed, until its round has ended.
        problems: For each host that cannot take part, the reason.
    """

    def __init__(self, are_there: bool, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self.lineage: Lineage | None = None
        self.is_learning = are_there
        self.listed: frozenset[str] | None = None
        self.change: Change | None = None
        self.problems: dict[str, str] = {}
        self._answered_at: float | None = None  # when all listed hosts had answered
        self._named = 0  # how many changes this owner has named
        self._answers: OrderedDict[str, Answered] = OrderedDict()  # by call; see `note`
        self._differed: dict[str, int] = {}  # by host: how often its digest differed

    # What hosts must have

    def has(self, report: Report) -> bool:
        """Whether a host's copy has the line's last change."""
        if report.copy is None:  # the group has no parameters
            return True
        return self.lineage is not None and same(report.copy.lineage, self.lineage)

    def is_of_another_line(self, report: Report) -> bool:
        """Whether a host's copy belongs to a line of changes that another restore began."""
        own, line = lineage_of(report), self.lineage
        return line is not None and own.term > 0 and beginning(own) != beginning(line)

    def source(self, reports: Iterable[Report], report: Report) -> str | None:
        """Return a host from which the reporting host can get its copy; None: no need, or no host.

        Each report of the host gets another source: the host may be cut off from the last one.
        """
        if self.has(report):
            return None
        able = sorted(each.host for each in reports if lineage_of(each) == self.lineage)
        return able[report.number % len(able)] if able else None

    def count(self, reports: Iterable[Report]) -> int:
        """Return how many of the reporting hosts have the line's last change."""
        return sum(map(self.has, reports))

    # Learning

    def learn(self, reports: list[Report], term: int, now: float) -> int | None:
        """Learn lineage and step, if all hosts have answered this term; return the step, or None.

        After a power failure, for example, the first hosts to come back may lack the last update.
        A host reports how many hosts had its copy: a new owner waits for as many, but not for ever.
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
        """Forget the owner's lineage, since no host has it any more, and learn another one."""
        self.is_learning, self.lineage, self._answered_at = True, None, None

    def is_nowhere(self, reports: list[Report], term: int) -> bool:
        """Whether all hosts have answered, and none has the owner's lineage or can still get it."""
        change = self.change
        return (
            self.lineage is not None
            and self._is_answered(reports, term)
            and not any(self.has(each) or (change and change.can_get(each)) for each in reports)
        )

    def must_answer(self, reports: Iterable[Report], term: int) -> frozenset[str]:
        """Return the hosts that can take part, and have not answered this term.

        A host that reports takes part, whether or not it is in the driver's list.
        """
        terms = {each.host: each.term for each in reports}
        names = {*terms, *(self.listed or ())}
        return frozenset(name for name in names if terms.get(name) != term)

    def _is_answered(self, reports: Iterable[Report], term: int) -> bool:
        """Whether all hosts that can take part have answered this term."""
        return bool(self.listed) and not self.must_answer(reports, term)

    def ahead(self, reports: Iterable[Report], step: int) -> int | None:
        """Return the step to which hosts' segments force the owner to move; None: it may stay.

        A host's segment may be at a later step. Or it may be at this step with a wrong copy: a copy
        is replaced only together with a higher step.
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
        mark: int | None = None,  # the mark of the chief's round; None: a restore
        checked: Lineage | None = None,  # that the host's copy had when the chief checked it
    ) -> None:
        """Stage, under a new name, a change of a chief on `host`; it moves segments to `step`."""
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
        """Whether the last change is the update of this block, which an earlier owner opened."""
        line = self.lineage
        if line is None or (line.term, line.number % (1 << MARK_BITS)) != (block.fence.term, mark):
            return False
        steps = {each.copy.step for each in reports if each.copy and each.copy.lineage == line}
        return block.step + 1 in steps

    def answered(self, call: str) -> Answered | None:
        """Return the final answer to a call; None: there is none yet."""
        return self._answers.get(call)

    def note(self, call: str, answer: Answered) -> None:
        """Keep the first answer to a call, so that a repeated message does not begin a new change.

        The last 1,024 calls' answers are enough: the chiefs of earlier calls send no more messages.
        """
        self._answers.setdefault(call, answer)
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    def answer(
        self, call: str, reports: Iterable[Report], now: float, lease: float
    ) -> ChangeAnswer:
        """Return the answer to a chief's call that makes a change; `Staging` while it goes on."""
        if (found := self._answers.get(call)) is not None:
            return found
        if self.change is None or self.change.call != call:
            return Ended()
        self.change.heard = now
        return Staging(self.change.late(reports, now, lease), self.change.committed)

    def end(self, answer: Answered) -> None:
        """Forget the change, since its round has ended or it is dropped; keep its call's answer."""
        if self.change is not None:
            self.note(self.change.call, answer)
        self.change = None

    def commit(self, change: Change, reports: Iterable[Report], now: float) -> None:
        """Commit the change: its lineage becomes the owner's, and hosts make it from now on."""
        change.commit(reports, now)
        self.lineage = Lineage(*change.stage.update, 0 if change.is_whole else UNKNOWN)

    def learn_digest(self, change: Change, reports: Iterable[Report]) -> bool:
        """Learn the change's digest from the chief's host; if that is lost, from another host.

        Returns:
            Whether this call has made the digest known.
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

        If the chief still waits, its own host must have it: the rest of its block reads that copy.
        """
        on = {each.host for each in reports if lineage_of(each) == self.lineage}
        enough = bool(on) if change.left else change.host in on
        return enough and not change.late(reports, now, lease)

    def outcome_at_home(self, change: Change, reports: Iterable[Report]) -> Refused | None:
        """Return why the chief's own host cannot make the committed change, though others can.

        None: the chief's host has made the change, or can still make it, or is lost.
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
