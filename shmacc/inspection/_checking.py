"""Checks segments and shared memory: every invariant that can be verified from outside.

It changes nothing and takes no lock. So a process may just be making or removing a segment, or be
in an operation. What seems wrong is therefore looked at again, after pauses that are long enough on
a busy machine. Only what is still wrong, in the same way and in the same file, is a finding.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from shmacc._gradients.handlers import pass_on
from shmacc._layout import layout, names
from shmacc._layout.names import SegmentName
from shmacc._opening import removal
from shmacc.errors import NotFoundError, ShmaccError
from shmacc.inspection import _memory
from shmacc.inspection import _processes as processes
from shmacc.inspection import _soundness as soundness
from shmacc.inspection import _unlinked as unlinked
from shmacc.inspection._cleanup import leftover_semaphores
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import NOTHING, Finding, Severity, memory, note, pids, wrong
from shmacc.inspection._listing import is_meant, list_names, open_view, resolve
from shmacc.inspection._processes import Look

_PAUSES = (0.02, 0.1)  # seconds
_BOTH_ANEW = 'load a checkpoint into both, or begin both anew (if_exists="replace")'


def check(name: str) -> tuple[Finding, ...]:
    """Verify every invariant of a segment that can be verified, and the files of its name.

    Args:
        name: As for `resolve`.

    Raises:
        NotFoundError: No segment has that name, and no process uses one that `rm` or RemoveIPC
            removed.
    """
    segment_name = resolve(name)
    system_name = segment_name.system_name
    removed = tuple(_unlinked(lambda found: found.system_name == system_name))
    if not os.path.lexists(segment_name.path):
        if any(finding.severity is Severity.WRONG for finding in removed):
            return removed
        raise removal.not_found(segment_name)
    return (
        *_settled([segment_name], lambda owner: owner.system_name == system_name),
        *_steps_apart([segment_name]),
        *removed,
        *_memory.findings(),
        *_hidden(),
    )


def check_all(pattern: str = "*", *, namespace: str | None = None) -> tuple[Finding, ...]:
    """Check all segments, what is left of removed ones, and shared memory itself.

    Args:
        pattern: A glob, as in `list_segments`.
        namespace: Only segments in this namespace; None: in all.
    """

    def meant(name: SegmentName) -> bool:
        return is_meant(name, name.system_name, pattern, namespace)

    segments = list_names(pattern, namespace=namespace)
    return (
        *_settled(segments, meant),
        *_steps_apart(segments),
        *_unlinked(meant),
        *_memory.findings(),
        *_hidden(),
    )


def _settled(
    segments: Iterable[SegmentName], meant: Callable[[SegmentName], bool]
) -> list[Finding]:
    """Return the lasting findings about segments, and about leftover semaphores of `meant` ones."""
    findings = _look(segments, meant)
    confirmed = set(_wrong(findings))
    for pause in _PAUSES:
        if not confirmed:
            break
        time.sleep(pause)
        again = {owner for owner, _, _, _ in confirmed}
        fresh = _look(_named(again), lambda owner: owner.system_name in again)  # noqa: B023  called at once
        findings |= {owner: fresh.get(owner, []) for owner in again}
        confirmed.intersection_update(_wrong(findings))
    return [
        finding
        for owner in sorted(findings)
        for finding in findings[owner]
        if finding.severity is Severity.NOTE or _identity(owner, finding) in confirmed
    ]


def _named(system_names: Collection[str]) -> Iterator[SegmentName]:
    for system_name in system_names:
        name = names.parse_segment_file(system_name)
        if name is not None and os.path.lexists(name.path):
            yield name


def _look(
    segments: Iterable[SegmentName], meant: Callable[[SegmentName], bool]
) -> dict[str, list[Finding]]:
    """Return findings by the file name of their segment."""
    findings: dict[str, list[Finding]] = {}
    look = Look()
    for name in segments:
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            findings[name.system_name] = list(soundness.findings(name, look))
    for leftover in leftover_semaphores(lambda name, _: meant(name)):
        if leftover.removable:
            findings.setdefault(leftover.name.system_name, []).append(
                wrong(
                    leftover.file_name,
                    "orphaned_semaphore",
                    leftover.why,
                    f"no process needs it: `shmacc-inspect clean -A --yes {leftover.file_name}`",
                )
            )
    return findings


_Identity = tuple[str, str, str, int]


def _wrong(findings: dict[str, list[Finding]]) -> Iterator[_Identity]:
    for owner, of_segment in findings.items():
        for finding in of_segment:
            if finding.severity is Severity.WRONG:
                yield _identity(owner, finding)


def _identity(owner: str, finding: Finding) -> _Identity:
    """Return a key of a finding that changes when another file gets the name (by its inode)."""
    try:
        inode = os.stat(f"{names.SHM_DIRECTORY}/{finding.subject}", follow_symlinks=False).st_ino
    except OSError:
        inode = 0
    return owner, finding.subject, finding.kind, inode


def _steps_apart(segments: Iterable[SegmentName]) -> Iterator[Finding]:
    """Yield a note for each accumulator whose rounds cannot update any parameters.

    The parameters that an accumulator belongs to are gone, or they are past the step of its round.
    An accumulator knows its parameters once a round has updated them. Until then, parameters that
    one of its processes has attached are taken for its own. That is a guess, so this is only a
    note.
    """
    look, parameters = Look(), None
    unread: set[str | None] = set()
    for name in segments:
        kind, belongs_to = _kind(name)
        if kind in {None, *layout.ARRAYS}:
            continue
        if parameters is None:
            parameters, unread = _parameters(look)
        with contextlib.suppress(ShmaccError):  # gone, or unreadable
            seen = describe(name.system_name, look)
            all_read = name.namespace not in unread
            yield from _apart_from(seen, belongs_to, parameters, all_read=all_read)


def _parameters(look: Look) -> tuple[list[Description], set[str | None]]:
    """Return all parameters, and the namespaces of segments that could not be read."""
    found, unread = [], set()
    for name in list_names():
        try:
            with open_view(name) as view:
                kind = view.config()["kind"]
            if kind == layout.KINDS["parameters"]:
                found.append(describe(name.system_name, look))
        except NotFoundError:
            pass
        except ShmaccError as error:
            pass_on(error)
            unread.add(name.namespace)
    return found, unread


def _kind(name: SegmentName) -> tuple[int | None, int]:
    """Return the kind, and the token of the parameters that it belongs to; 0: not known."""
    with contextlib.suppress(ShmaccError), open_view(name) as view:
        return view.config()["kind"], view.state()["belongs_to"]
    return None, 0


def _apart_from(
    accumulator: Description, belongs_to: int, parameters: list[Description], *, all_read: bool
) -> Iterator[Finding]:
    name, users = accumulator.summary.name, _users(accumulator)
    step = accumulator.summary.global_step or 0
    beside = [
        each
        for each in parameters
        if each.summary.name.namespace == name.namespace and users & _users(each)
    ]
    own = [each for each in parameters if each.token == belongs_to]
    if belongs_to and not own and all_read and (beside or not users):
        yield note(
            name.system_name,
            "of_other_parameters",
            f"its rounds, of step {step}, belong to parameters that were removed or replaced: "
            "others refuse them",
            _BOTH_ANEW,
        )
    own = own or ([] if belongs_to else beside)
    past = [each for each in own if (each.summary.global_step or 0) - 1 > step]
    if accumulator.stats.finished or len(past) < len(own):
        return
    for each in past:
        yield note(
            name.system_name,
            "steps_apart",
            f"its round is of step {step}, and its parameters, {each.summary.name.shared_name!r}, "
            f"are of step {each.summary.global_step}, past it: they refuse each update by them",
            f"if its rounds are to update them, {_BOTH_ANEW}",
        )


def _users(seen: Description) -> set[tuple[int, bool]]:
    return {(each.pid, each.pid_is_here) for each in seen.processes if each.alive}


def _unlinked(meant: Callable[[SegmentName], bool]) -> Iterator[Finding]:
    uses = filter(lambda use: meant(use.name), unlinked.unlinked_uses())
    for (system_name, under_users), users in itertools.groupby(
        uses, key=lambda use: (use.name.system_name, use.under_users)
    ):
        found = list(users)
        users_pids = sorted({use.pid for use in found})
        use = f"{pids(map(str, users_pids))} still {'uses' if len(users_pids) == 1 else 'use'}"
        removed = (
            f"{use} a segment of this name that was removed, of "
            f"{memory(unlinked.unlinked_memory(found))}; "
        )
        later = "processes that open the name now get another segment"
        if under_users:
            yield wrong(
                system_name,
                "removed_in_use",
                f"{removed}it was removed under them (`rm`, RemoveIPC), so the job is split: "
                f"{later}",
                "end these processes, and start the job again",
            )
        else:
            yield note(
                system_name,
                "removed_in_use",
                f"{removed}{later}",
                NOTHING + "it was removed on purpose (`unlink()`, a replacement, `remove --force`)",
            )


def _hidden() -> Iterator[Finding]:
    if not processes.others_are_visible():
        yield note(
            "/proc",
            "processes_hidden",
            "it hides other users' processes from this one (hidepid): which of them are stopped, "
            "and which use removed segments, was not checked",
            "look as root",
        )
