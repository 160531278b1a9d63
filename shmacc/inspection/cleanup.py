"""What may go, and its removal."""

import contextlib
import os
import time
from fnmatch import fnmatchcase

from shmacc import lookup, names, segment
from shmacc.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    ShmaccError,
)
from shmacc.inspection.records import Leftover, SegmentState
from shmacc.inspection.segments import open_view, resolve, summarise
from shmacc.names import SegmentName


def leftovers(pattern: str = "*", *, older_than: float = 0.0) -> tuple[Leftover, ...]:
    """Segments, semaphores and unfinished files that seem to be used by nobody.

    Args:
        pattern: A glob that the shared_name or the file's name must match.
        older_than: Only those made longer ago, in seconds.
    """
    # Semaphores first: a segment has its name before its semaphore is made, so a semaphore seen now
    # whose segment is not there afterwards belongs to one that was removed.
    files = sorted(os.listdir(names.SHM_DIRECTORY), key=lambda file: not file.startswith("sem."))
    found = []
    for file_name in files:
        with contextlib.suppress(FileNotFoundError):
            leftover = _judge(file_name, pattern)
            if leftover is not None and leftover.age >= older_than:
                found.append(leftover)
    return tuple(sorted(found, key=lambda leftover: leftover.file_name))


def clean(leftover: Leftover) -> bool:
    """Removes a leftover if it still is one, judged anew; whether it was removed here.

    Two cleaners at once are harmless: what one removes, the other does not find.

    Raises:
        PermissionDeniedError: It is another user's.
    """
    with contextlib.suppress(FileNotFoundError, NotFoundError):
        semaphore = names.parse_semaphore_file(leftover.file_name)
        if semaphore is not None:
            if not _semaphore_is_orphaned(*semaphore):
                return False
            os.unlink(f"{names.SHM_DIRECTORY}/{leftover.file_name}")
            return True
        name = names.parse_segment_file(leftover.file_name)
        if name is None:
            return False
        before = os.stat(name.path).st_ino
        try:
            with open_view(name) as handle:
                return segment.unlink_unused(name, handle)
        except NotFoundError:
            # An unfinished file: opening it removed it, if it was to be removed.
            return not os.path.lexists(name.path) or os.stat(name.path).st_ino != before
    return False


def remove(name: str, *, force: bool = False) -> tuple[str, ...]:
    """Removes a segment and its semaphore; the names that went.

    Args:
        name: The segment.
        force: Also if living processes have it attached; they go on using it until they close.

    Raises:
        NotFoundError: There is none of that name.
        FailedPreconditionError: It is in use, and not `force`.
        PermissionDeniedError: It is another user's.
        DataLossError: It is damaged; with `force` it is removed all the same.
    """
    segment_name = resolve(name)
    before = _files_of(segment_name)
    try:
        with open_view(segment_name) as handle:
            if force:
                segment.unlink(segment_name, handle)
            elif not segment.unlink_unused(segment_name, handle):
                raise FailedPreconditionError(
                    f"{segment_name.shared_name!r} is in use by living processes"
                )
    except DataLossError:
        if not force:
            raise
        for file_name in before:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{names.SHM_DIRECTORY}/{file_name}")
    after = _files_of(segment_name)
    return tuple(file_name for file_name in before if file_name not in after)


def cancel(name: str) -> int:
    """Ends every take that waits on the segment with CancelledError; how many there were.

    Raises:
        NotFoundError: There is none of that name.
        DataLossError: It is damaged.
        PermissionDeniedError: It is not this user's.
    """
    with lookup.open_by_name(resolve(name)) as found:
        waiting = found.stats().waiting
        found.cancel()
        return waiting


def _files_of(name: SegmentName) -> tuple[str, ...]:
    files = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        semaphore = names.parse_semaphore_file(file_name)
        if file_name == name.system_name or (semaphore and semaphore[0] == name.system_name):
            files.append(file_name)
    return tuple(files)


def _judge(file_name: str, pattern: str) -> Leftover | None:
    semaphore = names.parse_semaphore_file(file_name)
    name = names.parse_segment_file(semaphore[0] if semaphore else file_name)
    if name is None or not (
        fnmatchcase(name.shared_name, pattern) or fnmatchcase(file_name, pattern)
    ):
        return None
    age = time.time() - os.stat(f"{names.SHM_DIRECTORY}/{file_name}").st_ctime
    try:
        if semaphore is not None:
            if not _semaphore_is_orphaned(*semaphore):
                return None
            return Leftover(file_name, True, "semaphore of a segment that is gone", age)  # noqa: FBT003
        summary = summarise(name)
    except ShmaccError as error:
        return Leftover(file_name, False, f"not judged: {error}", age)  # noqa: FBT003
    if summary.state is SegmentState.SOUND:
        return None
    removable = summary.state is SegmentState.ORPHANED
    why = "no living process has it attached" if removable else summary.detail
    return Leftover(file_name, removable, why, age)


def _semaphore_is_orphaned(system_name: str, token: int) -> bool:
    name = names.parse_segment_file(system_name)
    if name is None or not os.path.lexists(name.path):
        return True
    try:
        with open_view(name) as handle:
            return int(handle.config()["token"]) != token
    except NotFoundError:
        return True
