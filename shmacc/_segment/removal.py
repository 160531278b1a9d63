"""Looks up segments by name, and removes their names.

Python code never opens a segment's file: closing the file would drop the record locks that this
process has on it.
"""

import contextlib
import errno
import os
import time

from shmacc import _core
from shmacc._base import layout
from shmacc._base.names import NAMESPACE_VARIABLE, SegmentName, semaphore_path
from shmacc._base.signals import pass_on
from shmacc.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ShmaccError,
)

_PAUSE = 0.001  # seconds between two lookups of a name
_PASSAGE = 2.0  # seconds that a process may take to attach or detach (name_lock.hpp)


class UnfinishedError(DataLossError):
    """The file under the name is empty or unfinished; this version makes no such files.

    Attributes:
        held: Whether a living process holds a record lock on the file.
    """

    held: bool = False


def view(name: SegmentName) -> _core.SegmentView:
    """Return a view of the segment. The user needs only the right to read.

    Raises:
        NotFoundError: There is no file under the name.
        UnfinishedError: The file is empty or unfinished.
        DataLossError: The file is no segment, or a segment of another version.
        PermissionDeniedError: This user may not read the file.
    """
    try:
        found, version, made = _core.view(name.path)
    except ShmaccError as error:
        pass_on(error)
        raise error.about(name.system_name) from None
    if made is None:
        raise refusal(name, found, version)
    return made


def unlink(name: SegmentName, token: int, handle: _core.Handle) -> None:
    """Remove the segment's name and semaphore; processes that have it open go on using it.

    Args:
        name: The segment's name.
        token: The segment's token.
        handle: A handle on the segment. If it is closed, the name is removed only if it still
            leads to the segment with this token.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process holds the name lock for too long.
    """
    if not handle.closed:
        may_remove(name)
        try:
            handle.unlink(name.path, semaphore_path(name.system_name, token))
        except ShmaccError as error:
            pass_on(error)
            if not handle.closed or not isinstance(error, FailedPreconditionError):
                raise error.about(name.system_name) from None
        else:
            return
    _unlink_closed(name, token)  # another thread may have closed it just now


def _unlink_closed(name: SegmentName, token: int) -> None:
    try:
        viewed = view(name)
    except (NotFoundError, UnfinishedError):
        return
    except DataLossError as error:
        # A segment of another version has this name, so our segment has lost it.
        if error.version is not None:
            return
        raise
    with contextlib.closing(viewed):
        # By now the name may lead to a newer segment.
        if viewed.config()["token"] == token:
            unlink_viewed(name, viewed, if_unused=False)


def unlink_viewed(
    name: SegmentName, viewed: _core.SegmentView, *, if_unused: bool
) -> tuple[str, ...] | None:
    """Remove the segment's name and semaphore; return the names of the removed files.

    Returns None if nothing was removed, because the segment is in use or the name does not lead to
    it.

    Args:
        name: The segment's name.
        viewed: A view of the segment.
        if_unused: Whether to remove the segment only if the name leads to it and no living process
            has it attached, not even this process.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process holds the name lock for too long.
    """
    # Check this first: a user who may not remove the name must not mark it as removed.
    may_remove(name)
    semaphore = semaphore_path(name.system_name, viewed.config()["token"])
    try:
        removed = viewed.unlink(name.path, semaphore, if_unused)
    except ShmaccError as error:
        pass_on(error)
        raise error.about(name.system_name) from None
    return None if removed is None else tuple(os.path.basename(path) for path in removed)


def users(viewed: _core.SegmentView) -> tuple[int, ...]:
    """Return the pids of the living processes that have the segment attached."""
    return tuple(entry["pid"] for entry in viewed.participants() if entry["alive"])


def in_use(name: SegmentName, pids: tuple[int, ...]) -> FailedPreconditionError:
    """Return the error for a segment that these processes have attached."""
    by_whom = ", ".join(f"pid {pid}" for pid in pids)
    own = ""
    if os.getpid() in pids:  # such as a notebook that runs a cell again
        own = "; one is this process: close() what it has open under the name"
    return FailedPreconditionError(
        f"{name.shared_name!r} is in use by living processes: {by_whom}{own}"
    ).with_fields(segment=name.system_name, pids=pids)


def may_remove(name: SegmentName) -> None:
    """Check the right to remove a segment before it is marked as removed: the mark stays for ever.

    Raises:
        PermissionDeniedError: The segment is another user's.
        ResourceExhaustedError: The system has no memory for the check.
    """
    try:
        found = os.stat(name.path, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise ResourceExhaustedError(f"Looking at its name failed: {error.strerror}").about(
            name.system_name
        ) from None
    if os.geteuid() not in {0, found.st_uid}:
        raise (
            PermissionDeniedError(
                f"It belongs to uid {found.st_uid}, mode {found.st_mode & 0o7777:04o}; "
                "only that user and root can remove it"
            )
            .with_fields(uid=found.st_uid, mode=found.st_mode & 0o7777)
            .about(name.system_name)
        )


def is_taken(name: SegmentName) -> bool:
    """Return whether the name is taken. First finish a removal that a dead process began."""
    try:
        with contextlib.closing(view(name)) as viewed:
            # The segment is marked as removed, but still has a name: the remover died in between.
            if viewed.unlinked:
                unlink_viewed(name, viewed, if_unused=False)
                return False
            return True
    except NotFoundError:
        return False
    except UnfinishedError:
        # If the name was removed, another process may have made a segment by now.
        return not _core.remove_unfinished(name.path) or is_taken(name)
    except (DataLossError, PermissionDeniedError):
        if not os.path.lexists(name.path):
            raise
        return True


def remove_unused(name: SegmentName) -> None:
    """Remove the segment under a name, unless a living process has it attached.

    The extension looks for such processes under the name lock. So a process that attaches at this
    moment either counts as attached, or finds that the name does not lead to the segment any more.
    A segment that is marked as removed still has its name only if the remover died, so its name is
    removed in any case.

    Raises:
        FailedPreconditionError: A living process has it attached.
        DataLossError: The file is no segment of this version.
        PermissionDeniedError: The segment is another user's.
    """
    deadline = time.monotonic() + _PASSAGE
    while True:
        try:
            viewed = view(name)
        except NotFoundError:
            return
        except UnfinishedError:
            if _core.remove_unfinished(name.path):
                continue
            raise
        with contextlib.closing(viewed):
            removed = unlink_viewed(name, viewed, if_unused=not viewed.unlinked)
            if removed is not None or viewed.unlinked:
                return
            pids = users(viewed)
        # If no pids are known, another process has removed it, or is attaching or detaching.
        if pids or time.monotonic() > deadline:
            raise in_use(name, pids)
        time.sleep(_PAUSE)


def not_found(name: SegmentName) -> NotFoundError:
    """Return the error for a name that leads to nothing."""
    return NotFoundError(f"There is nothing {named(name)}").with_fields(**fields(name))


def named(name: SegmentName) -> str:
    where = f"in the namespace {name.namespace!r}" if name.namespace else "outside of namespaces"
    return f"named {name.shared_name!r} {where}"


def fields(name: SegmentName) -> dict[str, str | None]:
    return {
        "segment": name.system_name,
        "shared_name": name.shared_name,
        "namespace": name.namespace,
    }


def refusal(name: SegmentName, found: str, version: int) -> ShmaccError:
    if found == "nothing":
        return not_found(name)
    if found == "other version":
        which = "a newer" if version > layout.LAYOUT_VERSION else "an older"
        named = DataLossError(
            f"it was made by {which} version of shmacc, with layout version {version}; this one "
            f"reads version {layout.LAYOUT_VERSION}"
        ).about(name.system_name)
        return DataLossError(
            f"{named}. Use that version; or another name or namespace "
            f"({NAMESPACE_VARIABLE}); or end its users and remove it: "
            f"shmacc-inspect remove {name.system_name} --force --yes"
        ).with_fields(**named.__dict__, version=version)
    held = found == "held unfinished"
    by_whom = "a process holds" if held else "no process holds"
    unfinished = UnfinishedError(f"an unfinished file that {by_whom}")
    return unfinished.with_fields(held=held).about(name.system_name)
