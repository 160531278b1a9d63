"""Finds leftovers, and removes segments.

A leftover is judged a second time, under the segment's name lock, at the moment of removal; so two
cleaners at once, or a cleaner and a process that opens the name, do no harm to each other.
"""

import contextlib
import errno
import os
import time

import posix_ipc

from shmacc import _core
from shmacc import _names as names
from shmacc import _segment as segment
from shmacc._names import SegmentName
from shmacc._segment import UnfinishedError
from shmacc.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ShmaccError,
)
from shmacc.inspection._records import Leftover, SegmentState
from shmacc.inspection._segments import is_meant, open_view, resolve, semaphore_file, summarise

_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def leftovers(
    pattern: str = "*", *, older_than: float = 0.0, namespace: str | None = None
) -> tuple[Leftover, ...]:
    """List segments, semaphores and unfinished files that no process seems to use.

    Those that could not be judged are among them, as not removable.

    Args:
        pattern: A glob that the shared_name or the file's name must match.
        older_than: Only those made longer ago, in seconds.
        namespace: Only those under it; None: all.
    """
    found = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        semaphore = names.parse_semaphore_file(file_name)
        name = names.parse_segment_file(semaphore[0] if semaphore else file_name)
        if name is None or not is_meant(name, file_name, pattern, namespace):
            continue
        with contextlib.suppress(FileNotFoundError):
            leftover = (
                _judge_segment(name)
                if semaphore is None
                else _judge_semaphore(name, file_name, semaphore[1])
            )
            if leftover is not None and leftover.age >= older_than:
                found.append(leftover)
    return tuple(sorted(found, key=lambda leftover: leftover.file_name))


def clean(leftover: Leftover) -> tuple[str, ...]:
    """Remove a leftover if it still is one; return the removed names, its semaphore's included.

    It is judged again. Two cleaners at once are harmless: the second does not find the name.

    Raises:
        PermissionDeniedError: It is another user's.
        DataLossError: It is damaged.
    """
    semaphore = names.parse_semaphore_file(leftover.file_name)
    name = names.parse_segment_file(semaphore[0] if semaphore else leftover.file_name)
    if name is None:
        return ()
    try:
        if semaphore is not None:
            if not _semaphore_is_orphaned(name, semaphore[1]):
                return ()
            posix_ipc.unlink_semaphore(names.semaphore_name(name.system_name, semaphore[1]))
            return (leftover.file_name,)
        try:
            return _clean_segment(name)
        except UnfinishedError:
            return (name.system_name,) if _core.remove_unfinished(name.path) else ()
    except (FileNotFoundError, posix_ipc.ExistentialError):  # also shmacc's NotFoundError
        return ()
    except posix_ipc.PermissionsError as error:
        raise PermissionDeniedError(f"{leftover.file_name}: {error}") from error
    except OSError as error:
        if error.errno not in _REFUSALS:  # shmacc's own errors have none
            raise
        raise PermissionDeniedError(f"{leftover.file_name}: {error.strerror}") from error


def remove(name: str, *, force: bool = False) -> tuple[str, ...]:
    """Remove a segment and its semaphore; return the removed names.

    Args:
        name: The segment.
        force: Also if living processes have it attached; they go on using it until they close.

    Raises:
        NotFoundError: There is none of that name.
        FailedPreconditionError: It is in use, and not `force`.
        PermissionDeniedError: It is another user's.
        DataLossError: It is damaged or of another version; with `force` it is removed all the same.
    """
    segment_name = resolve(name)
    before = _files_of(segment_name)
    if segment_name.system_name not in before:
        raise segment.not_found(segment_name)
    try:
        with open_view(segment_name) as view:
            removed = segment.unlink_viewed(segment_name, view, if_unused=not force)
            if not removed and not force:
                raise segment.in_use(segment_name, segment.users(view))
    except DataLossError:
        if not force:
            raise
        _unlink_files(before)
    after = _files_of(segment_name)
    return tuple(file_name for file_name in before if file_name not in after)


def cancel(name: str) -> int:
    """End every take that waits on the segment with CancelledError; return how many.

    Needs no lock, so it also works while the lock's owner is stopped.

    Raises:
        NotFoundError: There is none of that name.
        InvalidArgumentError: It is no accumulator, but shared arrays.
        DataLossError: It is damaged.
        PermissionDeniedError: It is not this user's.
    """
    from shmacc import _lookup as lookup  # late: see the package
    from shmacc._shared_arrays import SharedArrays

    with lookup.open_by_name(resolve(name), owners="any") as found:
        if isinstance(found, SharedArrays):
            raise InvalidArgumentError(f"{name!r} is the name of shared arrays, which nobody takes")
        waiting = found.stats().waiting
        found.cancel()
        return waiting


def _clean_segment(name: SegmentName) -> tuple[str, ...]:
    with open_view(name) as view:
        semaphore = semaphore_file(name, view.config()["token"])
        had_semaphore = os.path.lexists(f"{names.SHM_DIRECTORY}/{semaphore}")
        if not segment.unlink_viewed(name, view, if_unused=True):
            return ()
    return (name.system_name, semaphore) if had_semaphore else (name.system_name,)


def _unlink_files(file_names: tuple[str, ...]) -> None:
    for file_name in file_names:
        try:
            os.unlink(f"{names.SHM_DIRECTORY}/{file_name}")
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            raise DataLossError(
                f"{file_name} is a directory, which shmacc does not remove"
            ) from None
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            raise PermissionDeniedError(f"{file_name}: {error.strerror}") from error


def _files_of(name: SegmentName) -> tuple[str, ...]:
    files = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        semaphore = names.parse_semaphore_file(file_name)
        if file_name == name.system_name or (semaphore and semaphore[0] == name.system_name):
            files.append(file_name)
    return tuple(files)


def _judge_segment(name: SegmentName) -> Leftover | None:
    status = os.stat(name.path, follow_symlinks=False)
    summary = summarise(name)
    if summary.state is SegmentState.SOUND:
        return None
    return _leftover(
        name,
        name.system_name,
        status,
        removable=summary.state is SegmentState.ORPHANED,
        why=summary.detail,
        # The system's ctime is only when the segment last grew or shrank.
        created=summary.created,
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
) -> Leftover:
    if removable and os.geteuid() not in {0, status.st_uid}:
        removable, why = False, f"{why}; but it belongs to uid {status.st_uid}"
    return Leftover(
        name=name,
        file_name=file_name,
        removable=removable,
        why=why,
        age=time.time() - created,
        bytes_reserved=status.st_blocks * 512,
    )


def _semaphore_is_orphaned(name: SegmentName, token: int) -> bool:
    # In this order: once its creator has finished or died, no segment gets this token any more.
    if _core.semaphore_is_being_made(names.semaphore_path(name.system_name, token)):
        return False
    try:
        with open_view(name) as view:
            return int(view.config()["token"]) != token
    except NotFoundError:
        return True
