"""Finds leftovers: segments, semaphores and runs that no living process uses."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from shmacc import _core
from shmacc._base import names
from shmacc._base.names import SegmentName
from shmacc._segment import run_records
from shmacc.errors import NotFoundError, ShmaccError
from shmacc.inspection._findings import Leftover
from shmacc.inspection._listing import list_names, open_view, summarise
from shmacc.inspection._processes import Look
from shmacc.inspection._records import SegmentState
from shmacc.inspection._runs import Runs, inside
from shmacc.inspection._scopes import meant

_CAP_FOWNER = 3  # linux/capability.h; root in a container may lack it


def leftovers(
    pattern: str = "*",
    *,
    older_than: float = 0.0,
    namespace: str | None = None,
    private: bool = False,
) -> tuple[Leftover, ...]:
    """List segments and semaphores that no process seems to use.

    Segments that could not be judged are listed as not removable; their semaphores are not listed.

    Args:
        pattern: A glob, as in `list_segments`; if it begins with ``sem.shmacc.``, it is compared
            with the names of semaphores' files.
        older_than: List only files that have been unused for at least this many seconds.
        namespace: As in `list_segments`.
        private: List only private accumulators' segments.
    """
    # Semaphores first: else a segment that is removed in between is listed, and its semaphore too.
    is_meant = meant(pattern, namespace)
    semaphores = leftover_semaphores(
        lambda name, file_name: not private and is_meant(name, file_name)
    )
    found, look = [], Look()
    of_runs: dict[str, set[SegmentName]] = {}  # by the namespaces of their outermost runs
    for name in list_names(pattern, namespace=namespace):
        run = Runs.of(look).outermost(name.namespace)
        if run is not None and not run.alive and not private:
            of_runs.setdefault(run.namespace, set()).add(name)
            continue
        with contextlib.suppress(FileNotFoundError):
            leftover = _judge_segment(name, look)
            if leftover is not None and (leftover.private or not private):
                found.append(leftover)
    for record in () if private else run_records.records():
        if is_meant(record, record.system_name):
            of_runs.setdefault(record.namespace or "", set())
    for of_run, named in of_runs.items():
        with contextlib.suppress(FileNotFoundError):
            found += judge_run(of_run, named, look)
    not_judged = {leftover.file_name for leftover in found if not leftover.removable}
    found += [
        leftover
        for leftover in semaphores
        if leftover.removable or leftover.name.system_name not in not_judged
    ]
    return tuple(
        sorted(
            (leftover for leftover in found if leftover.idle >= older_than),
            key=lambda leftover: leftover.file_name,
        )
    )


def leftover_semaphores(meant: Callable[[SegmentName, str], bool]) -> list[Leftover]:
    """List semaphores whose segment is gone, and semaphores that could not be judged.

    `meant` gets a segment's name and the semaphore's file name, and says whether to judge it.
    """
    found = []
    for file_name in os.listdir(names.SHM_DIRECTORY):
        semaphore = names.parse_semaphore_file(file_name)
        if semaphore is None or not meant(semaphore[0], file_name):
            continue
        with contextlib.suppress(FileNotFoundError):
            leftover = _judge_semaphore(semaphore[0], file_name, semaphore[1])
            if leftover is not None:
                found.append(leftover)
    return found


def _judge_segment(name: SegmentName, look: Look) -> Leftover | None:
    status = os.stat(name.path, follow_symlinks=False)
    summary = summarise(name, look)
    if summary.state in {SegmentState.SOUND, SegmentState.FINISHED}:
        return None
    run = Runs.of(look).living(name.namespace)
    why = f"{summary.detail}; but {run.told()} lives" if run else summary.detail
    return _leftover(
        name,
        name.system_name,
        status,
        removable=summary.state is SegmentState.ORPHANED and run is None,
        why=why,
        # The file's ctime is only the time at which the segment last grew or shrank.
        created=summary.created,
        used=summary.last_used,
        private=bool(summary.private),
    )


def judge_run(
    namespace: str, asked: Collection[SegmentName] | None, look: Look
) -> Iterator[Leftover]:
    """Yield a dead run as one leftover, under its record's name.

    It is removable if all its segments are; if the run is named, `asked` must be None or have all.
    """
    run = Runs.of(look).at(namespace)
    if run is None or run.alive or Runs.of(look).outermost(namespace) is not run:
        return
    there = list(inside(run))
    judged = {name: _judge_segment(name, look) for name in there}
    idle = min((each.idle for each in judged.values() if each), default=None)
    why = f"{run.told()} is gone, with {len(there)} segment{'' if len(there) == 1 else 's'}"
    if run.named and there:
        why += "; until they are removed, the same call goes on with them"
    obstacle = next(
        (
            f"{each.file_name}: {each.why}"
            for each in judged.values()
            if each and not each.removable
        ),
        "",
    )
    used = [name.system_name for name, leftover in judged.items() if leftover is None]
    living = [each.told() for each in Runs.of(look).started_in(run) if each.alive]
    if used:
        obstacle = f"{', '.join(used)}: in use"
    elif living:
        obstacle = f"{', '.join(living)} lives"
    elif asked is not None and len(asked) < len(there) and run.named:
        obstacle = f"only a part of it was named: `{run.clean()}` removes all"
    record = _leftover(
        run.name,
        run.name.system_name,
        os.stat(run.name.path, follow_symlinks=False),
        removable=not obstacle,
        why=f"{why}; but all of it goes, or nothing: {obstacle}" if obstacle else why,
        created=run.facts.started if run.facts else 0.0,
    )
    size = sum(each.bytes_reserved for each in judged.values() if each)
    yield replace(
        record,
        idle=record.idle if idle is None else idle,
        bytes_reserved=record.bytes_reserved + size,
    )


def _judge_semaphore(name: SegmentName, file_name: str, token: int) -> Leftover | None:
    status = os.stat(f"{names.SHM_DIRECTORY}/{file_name}", follow_symlinks=False)
    try:
        if not semaphore_is_orphaned(name, token):
            return None
        removable, why = True, "a semaphore whose segment is gone"
    except ShmaccError as error:
        removable, why = False, f"a semaphore whose segment could not be judged: {error}"
    return _leftover(name, file_name, status, removable=removable, why=why, created=status.st_ctime)


def _leftover(
    name: SegmentName,
    file_name: str,
    status: os.stat_result,
    *,
    removable: bool,
    why: str,
    created: float,
    used: float | None = None,
    private: bool = False,
) -> Leftover:
    obstacle = owners_only(status.st_uid) if removable else ""
    now = time.time()
    return Leftover(
        name=name,
        file_name=file_name,
        removable=removable and not obstacle,
        why=f"{why}; but {obstacle}" if obstacle else why,
        age=max(0.0, now - created),  # a file's time is of the wall clock, which may be set back
        idle=max(0.0, now - (created if used is None else used)),
        private=private,
        bytes_reserved=status.st_blocks * 512,
    )


def owners_only(owner: int) -> str:
    """Return why this process may not remove a file of this owner; empty: it may.

    Anybody may make files in /dev/shm, and only their owners remove them (the sticky bit).
    """
    allowed = os.geteuid() == owner or _may_act_as_owner()
    return "" if allowed else f"it belongs to uid {owner}"


def _may_act_as_owner() -> bool:
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_FOWNER & 1)
    return True


def semaphore_is_orphaned(name: SegmentName, token: int) -> bool:
    # Check the creator first: when it has finished or died, no new segment can get this token.
    if _core.semaphore_is_being_made(names.semaphore_path(name.system_name, token)):
        return False
    try:
        with open_view(name) as view:
            return int(view.config()["token"]) != token
    except NotFoundError:
        return not _is_used_under_another_name(token)


def _is_used_under_another_name(token: int) -> bool:
    """Whether a segment with this token was renamed, and living processes have it attached."""
    for name in list_names():
        with contextlib.suppress(ShmaccError), open_view(name) as view:
            if view.config()["token"] == token and view.used:
                return True
    return False
