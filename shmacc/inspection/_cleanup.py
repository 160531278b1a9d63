"""Removes leftovers and segments, and cancels takes.

A leftover is judged again when it is removed, under the segment's name lock. So two cleaners at
once, or a cleaner and a process that opens the name, do each other no harm.
"""

import contextlib
import errno
import os
from collections.abc import Collection

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.names import SegmentName
from shmacc._base.reports import Config
from shmacc._segment import opening, removal, run_records
from shmacc._segment.removal import UnfinishedError
from shmacc.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from shmacc.inspection import _posix_names as posix_names
from shmacc.inspection._findings import Leftover
from shmacc.inspection._leftovers import judge_run, owners_only, semaphore_is_orphaned
from shmacc.inspection._listing import is_misnamed, open_view
from shmacc.inspection._processes import Look
from shmacc.inspection._runs import Run, Runs, inside
from shmacc.inspection._scopes import resolve

_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def clean(leftover: Leftover, *, rehearse: bool = False) -> tuple[str, ...]:
    """Remove a leftover; return the removed names, including its semaphore's.

    The leftover is judged again, and stays if it is in use by now. Two cleaners at once do no harm:
    the second does not find the name. A run's record is cleaned with the whole run.

    Args:
        leftover: The leftover.
        rehearse: Remove nothing, but raise the errors that a removal would raise.

    Raises:
        PermissionDeniedError: The file is another user's.
        DataLossError: The segment is damaged.
    """
    semaphore = names.parse_semaphore_file(leftover.file_name)
    name = semaphore[0] if semaphore else names.parse_segment_file(leftover.file_name)
    if name is None:
        return ()
    if rehearse:
        _check_removable(f"{names.SHM_DIRECTORY}/{leftover.file_name}")
        return (leftover.file_name,)
    try:
        if semaphore is None:
            return _clean_run(name) if name.is_of_run else _clean_segment(name)
        return _clean_semaphore(name, semaphore[1])
    # NotFoundError is a FileNotFoundError, too. Since 1.0, unfinished files are other programs'.
    except (FileNotFoundError, UnfinishedError):
        return ()
    except OSError as error:
        if error.errno not in _REFUSALS:  # shmacc's own errors have no errno
            raise
        raise PermissionDeniedError(f"{leftover.file_name}: {error.strerror}") from error


def remove(
    name: str, *, force: bool = False, rehearse: bool = False, beside: Collection[str] = ()
) -> tuple[str, ...]:
    """Remove a segment and its semaphore; return the removed names.

    If the segment is the last one of a dead run, the run's record is removed, too.

    Args:
        name: The segment.
        force: Remove it even if living processes have it attached (they go on using it until they
            close), or if its run lives or would keep only some of its segments.
        rehearse: Remove nothing: return what would be removed, or raise what would be raised.
        beside: System names of other segments that the caller removes, too.

    Raises:
        NotFoundError: There is no segment of that name.
        FailedPreconditionError: `force` is false, and the segment is in use, or belongs to a run
            that lives, or to a named run that would go on with the other segments only.
        PermissionDeniedError: The file is another user's.
        DataLossError: The segment is damaged or of another version; `force` removes it all the
            same.
    """
    segment_name = resolve(name)
    before = _files_of(segment_name)
    if segment_name.system_name not in before:
        raise removal.not_found(segment_name)
    if rehearse:
        _check_removable(segment_name.path)
    run = Runs().outermost(segment_name.namespace)
    rest = {each.system_name for each in inside(run)} - {segment_name.system_name} if run else set()
    if run is not None and not force:
        _check_run(run, segment_name, rest.difference(beside))
    try:
        with open_view(segment_name) as view:
            _remove_viewed(segment_name, view, force=force, rehearse=rehearse)
    except DataLossError:
        if not force:
            raise
        _remove_damaged(before, rehearse=rehearse)
    if rehearse:
        return before
    if run is not None and not run.alive and not rest:
        run_records.remove_namespace(run.namespace)
    after = _files_of(segment_name)
    return tuple(file_name for file_name in before if file_name not in after)


def _remove_damaged(files: Collection[str], *, rehearse: bool) -> None:
    for file_name in files:
        path = f"{names.SHM_DIRECTORY}/{file_name}"
        if os.path.isdir(path) and not os.path.islink(path):
            raise DataLossError("it is a directory, which shmacc does not remove").about(file_name)
    for file_name in () if rehearse else files:
        posix_names.unlink(file_name)


def _check_run(run: Run, name: SegmentName, rest: Collection[str]) -> None:
    """Raise FailedPreconditionError if the segment cannot be taken out of its run.

    `rest` names the run's other segments, which would stay.
    """
    if run.alive:
        raise FailedPreconditionError(f"{name.system_name} is not removed: {run.told()} lives")
    if run.named and rest:
        raise FailedPreconditionError(
            f"{name.system_name} is not removed: {run.told()} is gone, and its same call goes on "
            f"with all of it, or with nothing: `{run.clean()}` removes all"
        )


def cancel(name: str, *, rehearse: bool = False) -> int:
    """End every take that waits on the segment with CancelledError; return how many.

    Needs no lock, so it also works while the lock's owner is stopped.

    Args:
        name: The segment.
        rehearse: Cancel nothing: return how many takes would end, or raise what would be raised.

    Raises:
        NotFoundError: There is no segment of that name.
        InvalidArgumentError: The name is that of shared arrays, not of an accumulator.
        DataLossError: The segment is damaged.
        PermissionDeniedError: This user may not write to the segment.
    """
    segment_name = resolve(name)
    if rehearse:
        with open_view(segment_name) as view:
            _check_is_taken_from(name, view.config())
            waiting = len([waiter for waiter in view.waiters() if waiter["alive"]])
        # Check permissions without opening: opening the segment for writing would attach to it.
        if not os.access(segment_name.path, os.R_OK | os.W_OK, effective_ids=True):
            raise PermissionDeniedError(
                f"{segment_name.system_name}: to cancel is to write, which this user may not"
            )
        return waiting
    # Attach a bare handle: an accumulator would import NumPy, which is slow (__init__.py).
    with contextlib.closing(opening.attach(segment_name, owners="any")) as handle:
        _check_is_taken_from(name, handle.config())
        waiting = int(handle.state()["waiting"])
        handle.cancel()
        return waiting


def _check_is_taken_from(name: str, config: Config) -> None:
    if config["kind"] in layout.ARRAYS:
        raise InvalidArgumentError(f"{name!r} is the name of shared arrays, which nobody takes")


def _remove_viewed(
    name: SegmentName, view: _core.SegmentView, *, force: bool, rehearse: bool
) -> None:
    if view.links > 1 and is_misnamed(name, view.config()["name"]):
        # A removal marks the whole segment as removed: its original name would be gone, too.
        raise DataLossError("it is a link to another segment").about(name.system_name)
    used = view.used
    if not rehearse:
        used = removal.unlink_viewed(name, view, if_unused=not force) is None
    if used and not force:
        raise removal.in_use(name, removal.users(view))


def _clean_segment(name: SegmentName) -> tuple[str, ...]:
    if Runs().living(name.namespace) is not None:
        return ()
    with open_view(name) as view:
        return removal.unlink_viewed(name, view, if_unused=True) or ()


def _clean_semaphore(name: SegmentName, token: int) -> tuple[str, ...]:
    if not semaphore_is_orphaned(name, token):
        return ()
    file_name = names.semaphore_file(name.system_name, token)
    return (file_name,) if posix_names.unlink(file_name) else ()


def _files_of(name: SegmentName) -> tuple[str, ...]:
    found = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        semaphore = names.parse_semaphore_file(file_name)
        if (semaphore[0].system_name if semaphore else file_name) == name.system_name:
            found.append(file_name)
    return tuple(found)


def _clean_run(name: SegmentName) -> tuple[str, ...]:
    """Remove all segments and the record of a dead run; return the removed names."""
    before = names.files_in(name.namespace)
    # While this process has the record attached, no run of this name can start.
    with contextlib.closing(opening.attach(name, owners="any")):
        look = Look()
        Runs.of(look).held = name.namespace
        for leftover in judge_run(name.namespace or "", None, look):
            if leftover.removable:
                for segment in inside(Run(name, look)):
                    with open_view(segment) as view:
                        removal.unlink_viewed(segment, view, if_unused=True)
                run_records.remove_namespace(name.namespace or "")
    after = names.files_in(name.namespace)
    return tuple(file_name for file_name in before if file_name not in after)


def _check_removable(path: str) -> None:
    """Verify, as far as the system tells, that this process may remove a file.

    Raises:
        PermissionDeniedError: This process may not.
    """
    try:
        obstacle = owners_only(os.stat(path, follow_symlinks=False).st_uid)
    except FileNotFoundError:
        return
    if os.statvfs(names.SHM_DIRECTORY).f_flag & os.ST_RDONLY:
        obstacle = f"{names.SHM_DIRECTORY} is mounted read-only"
    if obstacle:
        raise PermissionDeniedError(f"{os.path.basename(path)}: {obstacle}")
