"""What a segment's name leads to, and how the name is removed.

No file of a segment is opened from Python: closing it would drop the record locks that this process
relies on.
"""

import contextlib
import errno
import os
import time

from shmacc import _core
from shmacc._gradients.handlers import pass_on
from shmacc._layout import layout
from shmacc._layout.names import NAMESPACE_VARIABLE, SegmentName, semaphore_path
from shmacc.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ShmaccError,
)

_PAUSE = 0.001  # between two looks for a name, in seconds
_PASSAGE = 2.0  # for this long a process may be on its way in or out (name_lock.hpp)

_READERS = {1: "shmacc 1.0"}  # of older layout versions


class UnfinishedError(DataLossError):
    """The file under the name is empty or unfinished; this version makes no such files.

    Attributes:
        held: Whether a living process holds a record lock on it.
    """

    held: bool = False


def view(name: SegmentName) -> _core.SegmentView:
    """Return a view of the segment, for which the right to read is enough.

    Raises:
        NotFoundError: There is none.
        UnfinishedError: The file is empty or unfinished.
        DataLossError: It is no segment, or of another version.
        PermissionDeniedError: This user may not read it.
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
        name: The name.
        token: The segment's.
        handle: A handle on it. If it is closed, the names are removed if they are this segment's.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process holds the name lock for too long.
    """
    if handle.closed:
        _unlink_closed(name, token)
        return
    may_remove(name)
    try:
        handle.unlink(name.path, semaphore_path(name.system_name, token))
    except ShmaccError as error:
        pass_on(error)
        raise error.about(name.system_name) from None


def _unlink_closed(name: SegmentName, token: int) -> None:
    try:
        viewed = view(name)
    except (NotFoundError, UnfinishedError):
        return
    except DataLossError as error:
        if error.version is not None:
            return
        raise
    with contextlib.closing(viewed):
        if viewed.config()["token"] == token:
            unlink_viewed(name, viewed, if_unused=False)


def unlink_viewed(
    name: SegmentName, viewed: _core.SegmentView, *, if_unused: bool
) -> tuple[str, ...] | None:
    """Remove the segment's name and semaphore; return the names of the files that it removed.

    None: nothing was removed, since the segment is in use or the name does not lead to it.

    Args:
        name: The name.
        viewed: A view of the segment.
        if_unused: Only if the name leads to it and no living process has it attached, this one
            included.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process holds the name lock for too long.
    """
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
    if os.getpid() in pids:  # in a notebook: a cell that is run again
        own = "; one is this process: close() what it has open under the name"
    return FailedPreconditionError(
        f"{name.shared_name!r} is in use by living processes: {by_whom}{own}"
    ).with_fields(segment=name.system_name, pids=pids)


def may_remove(name: SegmentName) -> None:
    """Check the right to remove a segment before it is marked: a mark is never taken back.

    Raises:
        PermissionDeniedError: The segment is another user's.
        ResourceExhaustedError: The system has no memory left to say.
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
    """Whether the name leads to anything; what a dead process has left half removed is removed."""
    try:
        with contextlib.closing(view(name)) as viewed:
            if viewed.unlinked:
                unlink_viewed(name, viewed, if_unused=False)
                return False
            return True
    except NotFoundError:
        return False
    except UnfinishedError:
        return not _core.remove_unfinished(name.path)
    except (DataLossError, PermissionDeniedError):
        if not os.path.lexists(name.path):
            raise
        return True


def remove_unused(name: SegmentName) -> None:
    """Remove what the name leads to, unless a living process has it attached.

    The extension looks for such processes under the name lock, so a process that attaches in this
    moment either has the segment or finds that the name does not lead there any more. A segment
    that is marked as removed has lost its name already, but for a remover that died.

    Raises:
        FailedPreconditionError: A living process has it attached.
        DataLossError: It is no segment of this version.
        PermissionDeniedError: It is another user's.
    """
    deadline = time.monotonic() + _PASSAGE
    while True:
        try:
            viewed = view(name)
        except NotFoundError:
            return
        except UnfinishedError:
            if _core.remove_unfinished(name.path):
                return
            raise
        with contextlib.closing(viewed):
            removed = unlink_viewed(name, viewed, if_unused=not viewed.unlinked)
            if removed is not None or viewed.unlinked:
                return
            pids = users(viewed)
        # Without pids, another process has removed it, or one is on its way in or out.
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
        reader = _READERS.get(version, "a newer shmacc" if version > layout.LAYOUT_VERSION else "")
        named = DataLossError(
            f"it was made by another version of shmacc, with layout version {version}"
            f"{f', which {reader} reads' if reader else ''}; this one reads version "
            f"{layout.LAYOUT_VERSION}"
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
