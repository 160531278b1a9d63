"""Finds leftovers, and removes segments.

A leftover is judged a second time, under the segment's name lock, at the moment of removal; so two
cleaners at once, or a cleaner and a process that opens the name, do no harm to each other.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.names import SegmentName
from shmacc._base.reports import Config
from shmacc._segment import opening, removal
from shmacc._segment.removal import UnfinishedError
from shmacc.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ShmaccError,
)
from shmacc.inspection import _posix_names as posix_names
from shmacc.inspection._findings import Leftover
from shmacc.inspection._listing import (
    is_meant,
    is_misnamed,
    list_names,
    open_view,
    resolve,
    summarise,
)
from shmacc.inspection._processes import Look
from shmacc.inspection._records import SegmentState

_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
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
        pattern: A glob, as in `list_segments`; if it begins with ``sem.shmacc.``, it is for the
            names of semaphores' files.
        older_than: Only files that have been unused for at least this many seconds.
        namespace: Only segments in this namespace; None: in all.
        private: Only private accumulators' segments.
    """
    # Semaphores first: else, if another cleaner removes a segment in between, both might be listed.
    semaphores = leftover_semaphores(
        lambda name, file_name: not private and is_meant(name, file_name, pattern, namespace)
    )
    found, look = [], Look()
    for name in list_names(pattern, namespace=namespace):
        with contextlib.suppress(FileNotFoundError):
            leftover = _judge_segment(name, look)
            if leftover is not None and (leftover.private or not private):
                found.append(leftover)
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
    """List semaphores whose segment is gone, or could not be judged.

    `meant` is called with a segment's name and the semaphore's file name.
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


def clean(leftover: Leftover, *, rehearse: bool = False) -> tuple[str, ...]:
    """Remove a leftover if it still is one; return the removed names, its semaphore's included.

    It is judged again. Two cleaners at once are harmless: the second does not find the name.

    Args:
        leftover: The leftover.
        rehearse: Remove nothing; raise what would be raised.

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
            with open_view(name) as view:
                return removal.unlink_viewed(name, view, if_unused=True) or ()
        return _clean_semaphore(name, semaphore[1])
    # shmacc's NotFoundError is a FileNotFoundError. No version since 1.0 makes unfinished files.
    except (FileNotFoundError, UnfinishedError):
        return ()
    except OSError as error:
        if error.errno not in _REFUSALS:  # shmacc's own errors have no errno
            raise
        raise PermissionDeniedError(f"{leftover.file_name}: {error.strerror}") from error


def remove(name: str, *, force: bool = False, rehearse: bool = False) -> tuple[str, ...]:
    """Remove a segment and its semaphore; return the removed names.

    Args:
        name: The segment.
        force: Also if living processes have it attached; they go on using it until they close.
        rehearse: Remove nothing: return what would be removed, or raise what would be raised.

    Raises:
        NotFoundError: There is no segment of that name.
        FailedPreconditionError: The segment is in use, and `force` is false.
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
    try:
        with open_view(segment_name) as view:
            _remove_viewed(segment_name, view, force=force, rehearse=rehearse)
    except DataLossError:
        if not force:
            raise
        for file_name in before:
            path = f"{names.SHM_DIRECTORY}/{file_name}"
            if os.path.isdir(path) and not os.path.islink(path):
                raise DataLossError("it is a directory, which shmacc does not remove").about(
                    file_name
                ) from None
        if not rehearse:
            for file_name in before:
                posix_names.unlink(file_name)
    if rehearse:
        return before
    after = _files_of(segment_name)
    return tuple(file_name for file_name in before if file_name not in after)


def cancel(name: str, *, rehearse: bool = False) -> int:
    """End every take that waits on the segment with CancelledError; return how many.

    Needs no lock, so it also works while the lock's owner is stopped.

    Args:
        name: The segment.
        rehearse: Cancel nothing: return how many would end, or raise what would be raised.

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
        # Marking the segment as removed would also remove the name that it was made with.
        raise DataLossError("it is a link to another segment").about(name.system_name)
    used = view.used
    if not rehearse:
        used = removal.unlink_viewed(name, view, if_unused=not force) is None
    if used and not force:
        raise removal.in_use(name, removal.users(view))


def _clean_semaphore(name: SegmentName, token: int) -> tuple[str, ...]:
    if not _semaphore_is_orphaned(name, token):
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


def _judge_segment(name: SegmentName, look: Look) -> Leftover | None:
    status = os.stat(name.path, follow_symlinks=False)
    summary = summarise(name, look)
    if summary.state in {SegmentState.SOUND, SegmentState.FINISHED}:
        return None
    return _leftover(
        name,
        name.system_name,
        status,
        removable=summary.state is SegmentState.ORPHANED,
        why=summary.detail,
        # The file's ctime only says when the segment last grew or shrank.
        created=summary.created,
        used=summary.last_used,
        private=bool(summary.private),
    )


def _judge_semaphore(name: SegmentName, file_name: str, token: int) -> Leftover | None:
    status = os.stat(f"{names.SHM_DIRECTORY}/{file_name}", follow_symlinks=False)
    try:
        if not _semaphore_is_orphaned(name, token):
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


def _check_removable(path: str) -> None:
    """Verify, as far as the system tells, that this process may remove a file.

    Raises:
        PermissionDeniedError: It may not.
    """
    try:
        obstacle = owners_only(os.stat(path, follow_symlinks=False).st_uid)
    except FileNotFoundError:
        return
    if os.statvfs(names.SHM_DIRECTORY).f_flag & os.ST_RDONLY:
        obstacle = f"{names.SHM_DIRECTORY} is mounted read-only"
    if obstacle:
        raise PermissionDeniedError(f"{os.path.basename(path)}: {obstacle}")


def owners_only(owner: int) -> str:
    """Return what keeps this process from removing a file of this owner; empty: nothing.

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


def _semaphore_is_orphaned(name: SegmentName, token: int) -> bool:
    # First the creator: once it has finished or died, no new segment gets the semaphore's token.
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
