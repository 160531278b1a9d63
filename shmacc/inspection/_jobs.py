"""Finds the segments of each job, and what has to be repaired before the job can go on.

A group, its parameters, and other groups of these parameters are one job: whoever starts it again
uses all of them. So if one needs a repair first, the remedies for all segments begin with it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from shmacc._base import layout
from shmacc._base.names import SegmentName
from shmacc._base.signals import pass_on
from shmacc.errors import NotFoundError, ShmaccError
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import (
    LOAD_AGAIN,
    NOTHING,
    RUN_GONE,
    SAME_CALL,
    START_AGAIN,
    Finding,
    Severity,
    note,
)
from shmacc.inspection._index_check import INCONSISTENT, damage
from shmacc.inspection._listing import list_names, open_view
from shmacc.inspection._new_rows import too_many_rows
from shmacc.inspection._processes import Look

_BOTH_ANEW = 'load a checkpoint into both, or begin both anew (if_exists="replace")'
_FINISHED = "it has finished, and gives no more rounds: save its parameters; to train on, "
_OBSTACLES = {"damaged", "other_version", "load_interrupted", INCONSISTENT}
_MOST_ROWS = 1_000_000  # larger tables are checked only in segments that were asked for


class _Segment(NamedTuple):
    name: SegmentName
    kind: int
    token: int
    belongs_to: int  # the token of its parameters; 0: none yet


class Jobs:
    """The jobs that segments belong to, as far as they can be known.

    An accumulator records its parameters once a round has updated them. Until then, it is assumed
    to belong to parameters that one of its processes has attached. That is a guess, so findings
    that follow from it are only notes.

    Attributes:
        notes: Why rounds of accumulators that were asked for cannot update any parameters.
    """

    def __init__(
        self, segments: Iterable[SegmentName], besides: Iterable[SegmentName] = ()
    ) -> None:
        """Find the jobs of `segments`, and of the segments `besides`, which get no notes."""
        self.notes: list[Finding] = []
        self._members: dict[str, set[str]] = {}  # by system name: the whole job
        self._obstacles: dict[str, list[str]] = {}  # by system name: what to do first
        self._look = Look()
        self._noted = {name.system_name for name in segments}
        asked = self._noted.union(name.system_name for name in besides)
        if asked:  # a look at all parameters takes long
            self._find(asked)

    def _find(self, asked: set[str]) -> None:
        everything, self._unread = _everything()
        groups = [each for each in everything if each.kind not in layout.ARRAYS]
        arrays = [each for each in everything if each.kind == layout.KINDS["parameters"]]
        self._parameters = list(self._described(arrays))
        owned = {each.belongs_to for each in everything}
        # Parameters that no round has updated.
        self._lone = [each for each in self._parameters if each.token not in owned]
        tokens = {each.token for each in self._parameters if _name(each) in asked}
        for group in groups:
            if group.name.system_name in asked or group.belongs_to in tokens:
                for seen in self._described([group]):
                    self._add_group(seen, group.belongs_to)
        for one in self._lone:
            if _name(one) in asked and _name(one) not in self._members:
                known = {0, *(each.token for each in self._parameters)}
                there = [each for each in groups if each.name.namespace == _space(one)]
                new = [each for each in there if not each.belongs_to]
                beside = [] if _users(one) else list(self._described(new))
                replaced = any(each.belongs_to not in known for each in there)
                obstacles = self._see_to_unread(one) or _without_group(one, beside, replaced)
                self._take_in([one], [*obstacles, *_of_loads([one])])

    def _described(self, segments: Iterable[_Segment]) -> Iterator[Description]:
        for each in segments:
            with contextlib.suppress(ShmaccError):  # gone, or unreadable
                yield describe(each.name.system_name, self._look)

    def _add_group(self, group: Description, belongs_to: int) -> None:
        """Add a group, its parameters, and what keeps them from being updated."""
        users = _users(group)
        near = [each for each in self._parameters if _space(each) == _space(group)]
        shared = [each for each in near if users & _users(each)]
        own = shared
        if belongs_to:
            own = [each for each in self._parameters if each.token == belongs_to]
        lacks = bool(belongs_to) and not own
        unread = self._see_to_unread(group) if lacks else []
        notes = list(_steps_apart(group, own))
        if lacks and not unread and (shared or not users):
            notes.append(_of_other_parameters(group))
        beside = [] if own or users or belongs_to else [x for x in self._lone if x in near]
        obstacles = list(unread)
        unfit = beside and all(_is_past(each, group) for each in beside)
        if not unread and (notes or unfit):
            obstacles.append(_BOTH_ANEW)
        if group.stats.finished:
            obstacles.append(_FINISHED + _BOTH_ANEW)
        rows = (words for each in own for words in too_many_rows(group, each))
        self._take_in([group, *own], [*obstacles, *_of_loads(own), *rows])
        self.notes += notes if _name(group) in self._noted else []

    def _see_to_unread(self, seen: Description) -> list[str]:
        which = ", ".join(self._unread.get(_space(seen), []))
        said = f"see to {which}, which cannot be read: what it lacks may be among them"
        return [said] if which else []

    def _take_in(self, segments: list[Description], obstacles: list[str]) -> None:
        """Add a job, merged with the known jobs that share a segment with it."""
        job = set(map(_name, segments))
        for member in list(job):
            job |= self._members.get(member, set())
        for member in job:
            obstacles += self._obstacles.get(member, [])
        for member in job:
            self._members[member], self._obstacles[member] = job, obstacles

    def composed(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Return the findings; remedies that start a process begin with what the job needs first.

        Args:
            findings: The findings of all segments that were asked for.
        """
        all_of_them = list(findings)
        ways: dict[str, list[str]] = {each.subject: [] for each in all_of_them}
        for each in all_of_them:
            if each.severity is Severity.WRONG and each.kind in _OBSTACLES:
                ways[each.subject].append(each.remedy)
        return tuple(self._composed(each, ways) for each in all_of_them)

    def _composed(self, finding: Finding, ways: dict[str, list[str]]) -> Finding:
        remedy = finding.remedy.removeprefix(NOTHING)
        starts = any(words in remedy for words in ("start ", SAME_CALL))
        if not starts or finding.kind in _OBSTACLES:
            return finding
        members = [finding.subject]
        if finding.kind == RUN_GONE:
            space = finding.subject.partition(":")[0]  # a run inside it has `space.RUN`
            members = [
                each for each in self._members if each.startswith((f"{space}:", f"{space}."))
            ]
        first = [words for member in members for words in self._obstacles.get(member, [])]
        for member in sorted({other for each in members for other in self._members.get(each, ())}):
            if member not in ways:
                ways[member] = _damage(member)
            first += ways[member]
        if not first:
            return finding
        before = "; ".join(dict.fromkeys(first))
        remedy = remedy.replace(START_AGAIN, "start its job again")
        return replace(finding, remedy=f"{before}; only then {remedy}")


def _everything() -> tuple[list[_Segment], dict[str | None, list[str]]]:
    """Return all readable segments, and the names of unreadable ones by namespace."""
    found: list[_Segment] = []
    unread: dict[str | None, list[str]] = {}
    for name in list_names():
        try:
            with open_view(name) as view:
                config, belongs_to = view.config(), view.state()["belongs_to"]
                found.append(_Segment(name, config["kind"], config["token"], belongs_to))
        except NotFoundError:
            pass
        except ShmaccError as error:
            pass_on(error)
            unread.setdefault(name.namespace, []).append(name.system_name)
    return found, unread


def _damage(name: str) -> list[str]:
    with contextlib.suppress(ShmaccError):
        found = damage(name, most_rows=_MOST_ROWS)
        return [each.remedy for each in found if each.severity is Severity.WRONG]
    return []


def _without_group(one: Description, beside: list[Description], replaced: bool) -> list[str]:
    """Return why parameters without a group cannot be updated.

    Args:
        one: The parameters.
        beside: Accumulators in the same namespace whose rounds have updated nothing.
        replaced: Whether an accumulator there belongs to parameters that are gone.
    """
    if replaced:
        return [_BOTH_ANEW]
    if all(_is_past(one, each) for each in beside) and (beside or _step(one)):
        return [f"its accumulator is gone, and a new one begins at step 0: {_BOTH_ANEW}"]
    return []


def _of_loads(own: list[Description]) -> list[str]:
    half = any(each.stats.sealed and each.round_holder is None for each in own)
    return [LOAD_AGAIN] if half else []


def _of_other_parameters(group: Description) -> Finding:
    return note(
        _name(group),
        "of_other_parameters",
        f"its rounds, of step {_step(group)}, belong to parameters that were "
        "removed or replaced: others refuse them",
        _BOTH_ANEW,
    )


def _steps_apart(group: Description, own: list[Description]) -> Iterator[Finding]:
    if group.stats.finished or not all(_is_past(each, group) for each in own):
        return
    for each in own:
        yield note(
            _name(group),
            "steps_apart",
            f"its round is of step {_step(group)}, and its parameters, "
            f"{each.summary.name.shared_name!r}, are of step {_step(each)}, past it: they refuse "
            "each update by them",
            f"if its rounds are to update them, {_BOTH_ANEW}",
        )


def _is_past(parameters: Description, group: Description) -> bool:
    """Whether the parameters' step is so high that they refuse an accumulator's rounds."""
    return _step(parameters) - 1 > _step(group)


def _step(seen: Description) -> int:
    return seen.summary.global_step or 0


def _name(seen: Description) -> str:
    return seen.summary.name.system_name


def _space(seen: Description) -> str | None:
    return seen.summary.name.namespace


def _users(seen: Description) -> set[tuple[int, bool]]:
    return {(each.pid, each.pid_is_here) for each in seen.processes if each.alive}
