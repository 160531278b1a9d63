"""The rules of copies over many hosts, and how to leave each out of the library's code.

To leave a rule out, the source of library functions is changed: each change replaces a text, which
must occur once, by another text. So a search runs the library's real state machines.
"""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from shmacc._multihost.changes import Change, same
from shmacc._multihost.copies import Copies
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.hosts import Hosts
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Rule(NamedTuple):
    """A rule, and the changes that leave it out: function, old text, new text."""

    says: str
    changes: tuple[tuple[Callable[..., Any], str, str], ...]


_core, _owner = ForwarderCore, OwnerCore
_receive, _at_line = _core.receive, _core._is_in_line
_PASSES = "(step := copies.ahead(reports, self.step)) is not None"

RULES = {
    "promise": Rule(
        "a machine obeys no owner of a lower term than one that it has answered",
        (
            (_receive, " or order.term < self._promise", ""),
            (_receive, "(order.term, order.serial) >= (last.term, last.serial)", "True"),
            (_receive, "order.term > self._promise", "order.term != self._promise"),
            (_owner.report, "report.term > self.fence.term", "False"),
        ),
    ),
    "durable": Rule(
        "the promise outlives the machine's actor",
        ((_core.__init__, "self._promise = promise", "self._promise = 0"),),
    ),
    "learn": Rule(
        "a new owner first hears every machine that Ray lists",
        ((Copies.learn, "not self._is_answered(reports, term)", "not reports"),),
    ),
    "told": Rule(
        "the chief is told once every living machine has the update",
        ((Copies.is_everywhere, "return enough and not", "return True or not"),),
    ),
    "first": Rule(
        "the copy changes first, then the segment's step",
        ((_at_line, "same(copy.lineage, wanted)", "True"),),
    ),
    "begun": Rule(
        "a segment's gradients count once it has reached the step that its copy's change leads to",
        (
            (_at_line, "copy.begun <= order.step", "True"),
            (Copies.ahead, "max(report.step + differs, copy.begun)", "report.step + differs"),
        ),
    ),
    "up": Rule(
        "a copy is replaced, or gradients are dropped, only with a higher step of the segment",
        ((_core.next_change, "may_replace = order.step > self._step", "may_replace = True"),),
    ),
    "below": Rule(
        "an update is made only where the segment is below the step that it leads to",
        (
            (_core._can_make, "copy.lineage == staged.parent and staged.step > self._step",
             "copy.lineage == staged.parent"),
            (Change.fits, " and report.step < step", ""),
        ),
    ),
    "raise": Rule(
        "going back to a checkpoint raises the step",
        (
            (_owner.restore, "max(self.step + 1, step)", "max(self.step, step)"),
            (Rounds._tend_committed, _PASSES, "(step := None) is not None"),
        ),
    ),
    "pass": Rule(
        "and again, past a segment that comes later",
        ((Rounds._tend_committed, _PASSES, "(step := None) is not None"),),
    ),
    "lineage": Rule(
        "the owner counts gradients of machines at its lineage only",
        (
            (_core.next_action, "not self._is_in_line(order)",
             "not self._is_in_line(order) and order.step != self._step"),
            (Hosts.note_line, "host.report is None or has(host.report)", "True"),
        ),
    ),
    "digest": Rule(
        "copies are told apart by the digest of what their updates have changed, too",
        ((same, "and wanted.digest in {has.digest, UNKNOWN}", ""),),
    ),
    "parent": Rule(
        "a staged update is made only in the copy that it was made for",
        (
            (_core._can_make, "copy.lineage == staged.parent and", ""),
            (_core.next_change, "stage.parent in {None, copy.lineage}", "True"),
        ),
    ),
    "final": Rule(
        "a committed round is ended, whoever dies, and never given up",
        ((Rounds._end_block, "change is not None and change.committed", "False"),),
    ),
    "cut": Rule(
        "a machine that cannot get the update is not waited for",
        ((Change.late, "is_early or not (self.committed or self.has_asked(report))", "True"),),
    ),
    "own": Rule(
        "a round is granted to a chief only whose own machine is at its step",
        ((Rounds._head.fget, "not self.has_copies", "True"),),  # type: ignore[attr-defined]
    ),
    "term": Rule(
        "the base is the copy of the highest term and number, not of the highest step",
        ((Copies.learn, "r.copy.lineage.term), default=None)",
          "r.copy.lineage.term), default=None, key=lambda c: (c.begun, c))"),),
    ),
    "resign": Rule(
        "a leading owner that hears of a higher term ends",
        ((_owner.report, "self.has_copies and not self.is_learning", "False"),),
    ),
    "anew": Rule(
        "an owner that leads a line does not end for a machine that comes back with an earlier one",
        ((_owner.report, "not self.copies.is_of_another_line(report)", "True"),),
    ),
    "again": Rule(
        "an owner whose lineage no living machine has learns again",
        ((Copies.is_nowhere, "self.lineage is not None", "False"),),
    ),
    "jump": Rule(
        "the owner moves past a segment that is ahead, or at its step with another copy",
        ((Copies.ahead, "max(report.step + differs, copy.begun)", "copy.begun"),),
    ),
    "resume": Rule(
        "an owner goes on with another one's block only if line and step are as they were",
        ((_owner.resume, "if is_as_it_was and", "if"),),
    ),
    "once": Rule(
        "no contributor is in a round twice",
        ((Rounds._close_grant, "if found := at_two_hosts(members)", "if found := {}"),),
    ),
    "held": Rule(
        "all living machines have staged an update before it is committed (not for safety)",
        ((Change.can_be_committed, "not self.late(reports, now, lease) and", ""),),
    ),
}  # fmt: skip


@contextlib.contextmanager
def without(rule: str) -> Iterator[None]:
    """Leave a rule out of the library's code while the block runs; "": leave none out."""
    sources: dict[Callable[..., Any], str] = {}
    for function, old, new in RULES[rule].changes if rule else ():
        source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
        if source.count(old) != 1:
            raise LookupError(f"{function.__qualname__} has {old!r} {source.count(old)} times")
        sources[function] = source.replace(old, new)
    kept = {function: function.__code__ for function in sources}
    try:
        for function, source in sources.items():
            made: dict[str, Any] = {}
            exec(source, {**function.__globals__, "property": lambda function: function}, made)  # noqa: S102
            function.__code__ = made[function.__name__].__code__
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code
