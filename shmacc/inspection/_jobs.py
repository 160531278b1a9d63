"""The segments of one job, and one plan for it.

A group, its parameters, and other groups of these parameters are one job: whoever starts it again
uses all of them. So what must be mended first in one of them comes first in the remedies of all.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from shmacc._base import layout
from shmacc._base.names import SegmentName
from shmacc._base.signals import pass_on
from shmacc.errors import NotFoundError, ShmaccError
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import LOAD_AGAIN, NOTHING, START_AGAIN, Finding, Severity, note
from shmacc.inspection._index_check import INCONSISTENT, damage
from shmacc.inspection._listing import list_names, open_view
from shmacc.inspection._processes import Look

_BOTH_ANEW = 'load a checkpoint into both, or begin both anew (if_exists="replace")'
_OBSTACLES = {"damaged", "other_version", "load_interrupted", INCONSISTENT}
_MOST_ROWS = 1_000_000  # of the tables of parameters that were not asked for


class Jobs(NamedTuple):
    """What is known of the jobs that segments belong to.

    Attributes:
        notes: Of accumulators whose rounds cannot update any parameters.
        members: By a segment's system name: those of its job.
        obstacles: By system name: what must be done before its job can go on.
    """

    notes: list[Finding]
    members: dict[str, set[str]]
    obstacles: dict[str, list[str]]


class _Segment(NamedTuple):
    name: SegmentName
    kind: int
    token: int
    belongs_to: int  # the token of its parameters; 0: not known


def jobs_of(segments: Iterable[SegmentName]) -> Jobs:
    """Find the jobs of these segments.

    An accumulator knows its parameters once a round has updated them. Until then, parameters that
    one of its processes has attached are taken for its own. That is a guess, so what follows is
    only a note.
    """
    look, found = Look(), Jobs([], {}, {})
    asked = {name.system_name for name in segments}
    everything, unread = _everything()
    parameters: list[Description] = []
    # To look at all parameters takes long, and without segments it is for nothing.
    for each in everything if asked else ():
        if each.kind == layout.KINDS["parameters"]:
            with contextlib.suppress(ShmaccError):  # gone, or unreadable
                parameters.append(describe(each.name.system_name, look))
    tokens = {each.token for each in parameters if each.summary.name.system_name in asked}
    for each in everything:
        system_name = each.name.system_name
        of_asked = each.belongs_to and each.belongs_to in tokens
        if each.kind not in layout.ARRAYS and (system_name in asked or of_asked):
            with contextlib.suppress(ShmaccError):
                group = describe(system_name, look)
                _add(found, group, each.belongs_to, parameters, unread.get(each.name.namespace, []))
    return found._replace(notes=[each for each in found.notes if each.subject in asked])


def _everything() -> tuple[list[_Segment], dict[str | None, list[str]]]:
    """Return all segments, and by namespaces the names of those that could not be read."""
    found: list[_Segment] = []
    unread: dict[str | None, list[str]] = {}
    for name in list_names():
        try:
            with open_view(name) as view:
                config = view.config()
                belongs_to = view.state()["belongs_to"]
                found.append(_Segment(name, config["kind"], config["token"], belongs_to))
        except NotFoundError:
            pass
        except ShmaccError as error:
            pass_on(error)
            unread.setdefault(name.namespace, []).append(name.system_name)
    return found, unread


def _add(
    jobs: Jobs,
    group: Description,
    belongs_to: int,
    parameters: list[Description],
    unread: list[str],
) -> None:
    """Add a group, its parameters, and what is in their way."""
    name, users = group.summary.name, _users(group)
    beside = [
        each
        for each in parameters
        if each.summary.name.namespace == name.namespace and users & _users(each)
    ]
    own = [each for each in parameters if each.token == belongs_to]
    notes = []
    if belongs_to and not own and not unread and (beside or not users):
        notes.append(_of_other_parameters(group))
    missing = unread if belongs_to and not own else []
    own = own or ([] if belongs_to else beside)
    notes += _steps_apart(group, own)
    job = {name.system_name, *(each.summary.name.system_name for each in own)}
    for member in list(job):
        job |= jobs.members.get(member, set())
    obstacles = [_BOTH_ANEW] if notes else []
    if missing:
        which = ", ".join(missing)
        obstacles.append(f"see to {which}, which cannot be read: its parameters may be among them")
    if any(each.stats.sealed and each.round_holder is None for each in own):
        obstacles.append(LOAD_AGAIN)
    for member in job:
        obstacles += jobs.obstacles.get(member, [])
    for member in job:
        jobs.members[member], jobs.obstacles[member] = job, obstacles
    jobs.notes.extend(notes)


def _of_other_parameters(group: Description) -> Finding:
    return note(
        group.summary.name.system_name,
        "of_other_parameters",
        f"its rounds, of step {group.summary.global_step or 0}, belong to parameters that were "
        "removed or replaced: others refuse them",
        _BOTH_ANEW,
    )


def _steps_apart(group: Description, own: list[Description]) -> Iterator[Finding]:
    step = group.summary.global_step or 0
    past = [each for each in own if (each.summary.global_step or 0) - 1 > step]
    if group.stats.finished or len(past) < len(own):
        return
    for each in past:
        yield note(
            group.summary.name.system_name,
            "steps_apart",
            f"its round is of step {step}, and its parameters, {each.summary.name.shared_name!r}, "
            f"are of step {each.summary.global_step}, past it: they refuse each update by them",
            f"if its rounds are to update them, {_BOTH_ANEW}",
        )


def _users(seen: Description) -> set[tuple[int, bool]]:
    return {(each.pid, each.pid_is_here) for each in seen.processes if each.alive}


def composed(findings: Iterable[Finding], jobs: Jobs) -> tuple[Finding, ...]:
    """Return the findings; a remedy that starts a process first says what its job needs before.

    Args:
        findings: The findings of all segments that were asked for.
        jobs: The jobs of these segments.
    """
    all_of_them = list(findings)
    ways: dict[str, list[str]] = {}
    for each in all_of_them:
        if each.severity is Severity.WRONG and each.kind in _OBSTACLES:
            ways.setdefault(each.subject, []).append(each.remedy)
    checked = {each.subject for each in all_of_them}
    return tuple(_composed(each, jobs, ways, checked) for each in all_of_them)


def _composed(
    finding: Finding, jobs: Jobs, ways: dict[str, list[str]], checked: Collection[str]
) -> Finding:
    remedy = finding.remedy.removeprefix(NOTHING)
    job = jobs.members.get(finding.subject)
    if job is None or "start " not in remedy or finding.kind in _OBSTACLES:
        return finding
    first = list(jobs.obstacles[finding.subject])
    for member in sorted(job):
        if member not in checked and member not in ways:
            ways[member] = [each.remedy for each in _damage(member)]
        first += ways.get(member, [])
    if not first:
        return finding
    before = "; ".join(dict.fromkeys(first))
    if START_AGAIN in remedy:
        return replace(
            finding, remedy=remedy.replace(START_AGAIN, f"{before}; only then start its job again")
        )
    return replace(finding, remedy=f"first {before}; then {remedy}")


def _damage(name: str) -> list[Finding]:
    with contextlib.suppress(ShmaccError):
        found = damage(name, most_rows=_MOST_ROWS)
        return [each for each in found if each.severity is Severity.WRONG]
    return []
