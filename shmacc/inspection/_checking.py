"""Checks segments and shared memory: every invariant that can be verified from outside.

It changes nothing and takes no lock. So a process may be making or removing a segment during the
check, or be in an operation. What seems wrong is therefore checked again, after pauses that are
long enough on a busy machine. It is a finding only if the same file still has the same problem.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from shmacc._base import names
from shmacc._base.names import SegmentName
from shmacc._segment import removal, run_records
from shmacc.errors import NotFoundError
from shmacc.inspection import _memory
from shmacc.inspection import _processes as processes
from shmacc.inspection import _soundness as soundness
from shmacc.inspection import _unlinked as unlinked
from shmacc.inspection._findings import NOTHING, Finding, Severity, memory, note, pids, wrong
from shmacc.inspection._jobs import Jobs
from shmacc.inspection._leftovers import leftover_semaphores
from shmacc.inspection._listing import list_names
from shmacc.inspection._processes import Look
from shmacc.inspection._runs import Runs, inside
from shmacc.inspection._scopes import meant, resolve

_PAUSES = (0.02, 0.1)  # seconds


def check(name: str) -> tuple[Finding, ...]:
    """Check a segment, and the files of its name: every invariant that can be verified.

    Args:
        name: The segment's name; see `resolve`.

    Raises:
        NotFoundError: No segment has that name, and no process uses a segment of that name that
            `rm` or RemoveIPC removed.
    """
    segment_name = resolve(name)
    system_name = segment_name.system_name
    removed = tuple(_unlinked(lambda found: found.system_name == system_name))
    if not os.path.lexists(segment_name.path):
        if any(finding.severity is Severity.WRONG for finding in removed):
            return removed
        raise removal.not_found(segment_name)
    runs = _records_of([segment_name])
    jobs = Jobs([segment_name], _all_of(runs))
    found = _settled([segment_name, *runs], lambda owner: owner.system_name == system_name)
    return jobs.composed((*found, *jobs.notes, *removed, *_memory.findings(), *_hidden()))


def check_all(pattern: str = "*", *, namespace: str | None = None) -> tuple[Finding, ...]:
    """Check all segments, what is left of removed segments, and shared memory itself.

    Args:
        pattern: A glob, as in `list_segments`.
        namespace: As in `list_segments`.
    """
    matches = meant(pattern, namespace)

    def is_meant(name: SegmentName) -> bool:
        return matches(name, name.system_name)

    segments = list_names(pattern, namespace=namespace)
    runs = _records_of(segments).union(filter(is_meant, run_records.records()))
    jobs = Jobs(segments, _all_of(runs))
    found = _settled([*segments, *runs], is_meant)
    return jobs.composed(
        (*found, *jobs.notes, *_unlinked(is_meant), *_memory.findings(), *_hidden())
    )


def _records_of(segments: Iterable[SegmentName]) -> set[SegmentName]:
    """Return the names of the run records that these segments belong to."""
    runs = Runs()
    return {run.name for name in segments for run in runs.around(name.namespace)}


def _all_of(records: Iterable[SegmentName]) -> Iterator[SegmentName]:
    """Yield all segments of the dead runs in `records`: a repeated call goes on with them all."""
    runs = Runs()
    for record in records:
        run = runs.at(record.namespace)
        if run is not None and not run.alive:
            yield from inside(run)


def _settled(
    segments: Iterable[SegmentName], meant: Callable[[SegmentName], bool]
) -> list[Finding]:
    """Return lasting findings about the segments, and about the semaphores of `meant` segments."""
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
            runs = list(Runs.of(look).around(name.namespace)) if name.is_of_run else []
            found = runs[0].findings(runs[1:]) if runs else soundness.findings(name, look)
            findings[name.system_name] = list(found)
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
    """Return a finding's key; it has the inode, so it changes when another file gets the name."""
    try:
        inode = os.stat(f"{names.SHM_DIRECTORY}/{finding.subject}", follow_symlinks=False).st_ino
    except OSError:
        inode = 0
    return owner, finding.subject, finding.kind, inode


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
