"""Opening, making and removing segments by name.

The extension does each step atomically (opening.hpp has the protocol); this module decides on the
next one: when there is nothing under a name, another kind of file, or a segment that is being
removed at this moment; and it words the errors. No file of a segment is opened from Python: closing
it would drop the record locks that this process relies on.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from shmacc import _core
from shmacc import _layout as layout
from shmacc._names import SegmentName, semaphore_path
from shmacc.errors import (
    AlreadyExistsError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ShmaccError,
)

if TYPE_CHECKING:
    from shmacc._arguments import IfExists
    from shmacc._spec import Spec  # needs NumPy, which inspection does not

Owners = Literal["mine", "any"] | Iterable[int]
"""Whose segments may be attached: this user's and root's, all users', or those of these uids."""

Contents = Callable[[], list[tuple[int, Any]]]
"""Returns new shared arrays as the extension takes them: bytes, and contents (None: zeros)."""

_LARGEST_UID = 2**32 - 2
_SHORTEST_PAUSE = 0.001  # between two looks for a name, in seconds
_LONGEST_PAUSE = 0.010
_PASSAGE = 2.0  # for this long a process may be on its way in or out (name_lock.hpp)


class UnfinishedError(DataLossError):
    """The file under the name is empty or unfinished; this version makes no such files.

    Attributes:
        held: Whether a living process holds a record lock on it.
    """

    held: bool = False


def check_owners(owners: object) -> Owners:
    """Return the argument as it is kept and pickled.

    Raises:
        InvalidArgumentError: Neither "mine" nor "any" nor uids.
    """
    if isinstance(owners, str):
        if owners == "mine":
            return "mine"
        if owners == "any":
            return "any"
    elif isinstance(owners, Iterable) and not isinstance(owners, bytes):
        uids = tuple(owners)
        if all(type(uid) is int and 0 <= uid <= _LARGEST_UID for uid in uids):
            return uids
    raise InvalidArgumentError(
        f'owners must be "mine", "any" or an iterable of uids, but was {owners!r}'
    )


def open_or_create(
    name: SegmentName,
    spec: "Spec",
    owners: Owners,
    if_exists: "IfExists" = "attach",
    *,
    unlink_on_close: bool = False,
    contents: Contents = list,
) -> _core.Handle:
    """Return a handle on the segment of that name, which is made if there is none.

    Args:
        name: The name.
        spec: Of a new segment.
        owners: Whose segments may be attached.
        if_exists: "attach": an existing segment is attached. "error" and "replace" return a handle
            on a new segment only: its name is taken by one atomic step (opening.hpp), so of two
            processes that ask for it at once, one gets it, and the other one finds it taken.
        unlink_on_close: Whether a new segment's name is removed with its handle.
        contents: Of new shared arrays.

    Raises:
        AlreadyExistsError: It exists, and `if_exists` is "error".
        FailedPreconditionError: It is in use, and `if_exists` is "replace".
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Shared memory is full, or descriptors have run out.
    """
    while True:
        handle = None
        if if_exists == "attach":
            handle = _attach(name, owners)
        elif if_exists == "replace":
            _remove_unused(name)  # a process that dies after this leaves nothing under the name
        elif _is_taken(name):
            raise _already_exists(name)
        handle = handle or _create(name, spec, contents(), unlink_on_close=unlink_on_close)
        if handle is not None:
            return handle


def attach(name: SegmentName, owners: Owners, timeout: float | None = None) -> _core.Handle:
    """Return a handle on the segment of that name.

    Args:
        name: The name.
        owners: Whose segments may be attached.
        timeout: For how many seconds to wait until there is one; None: not at all.

    Raises:
        NotFoundError: There is none, and no timeout.
        DeadlineExceededError: There was none until the end of the timeout.
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Descriptors or places in the table of processes have run out.
    """
    handle = _attach(name, owners)
    if handle is not None:
        return handle
    if timeout is None:
        raise not_found(name)
    deadline = time.monotonic() + timeout
    pause = _SHORTEST_PAUSE
    while handle is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _still_not_found(name, timeout)
        time.sleep(min(pause, left))  # signal handlers run here
        pause = min(pause * 1.5, _LONGEST_PAUSE)
        handle = _attach(name, owners)
    return handle


def disagreement(
    name: SegmentName, exists: str, what: str, existing: str, asked: str
) -> InvalidArgumentError:
    """Return the error for a segment that is not as it was asked for.

    Args:
        name: The segment.
        exists: What there is, as the beginning of a sentence: "The accumulator 'x' exists".
        what: In what it differs.
        existing: What it has.
        asked: What was asked for.
    """
    return InvalidArgumentError(
        f"{exists} with {what} {existing}, but {asked} was asked for. If the existing one is left "
        f"from an earlier run, `shmacc-inspect remove {name.system_name}` removes it, and so does "
        'if_exists="replace"; or use another shared_name'
    ).with_fields(segment=name.system_name, what=what, existing=existing, asked=asked)


def finish(handle: _core.Handle) -> None:
    """Close a handle, when its object is closed, collected, or outlived by the interpreter."""
    if _daemons_outlive_the_interpreter():
        handle.unlink_own_names()
    else:
        handle.close()


def _daemons_outlive_the_interpreter() -> bool:
    # At exit, with daemon threads still at work: closing would wake them with an error, and CPython
    # may crash on its traceback by then. The kernel is about to release everything anyway.
    main = threading.main_thread()
    return not main.is_alive() and any(thread is not main for thread in threading.enumerate())


def view(name: SegmentName) -> _core.View:
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
        raise error.about(name.system_name) from None
    if made is None:
        raise _refusal(name, found, version)
    return made


def unlink(name: SegmentName, handle: _core.Handle) -> None:
    """Remove the segment's name and semaphore; processes that have it open go on using it.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process holds the name lock for too long.
    """
    may_remove(name)
    try:
        handle.unlink(name.path, semaphore_path(name.system_name, handle.config()["token"]))
    except ShmaccError as error:
        raise error.about(name.system_name) from None


def unlink_viewed(name: SegmentName, viewed: _core.View, *, if_unused: bool) -> bool:
    """Remove the segment's name and semaphore; return whether they were removed.

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
        return viewed.unlink(name.path, semaphore, if_unused)
    except ShmaccError as error:
        raise error.about(name.system_name) from None


def users(viewed: _core.View) -> tuple[int, ...]:
    """Return the pids of the living processes that have the segment attached."""
    return tuple(entry["pid"] for entry in viewed.participants() if entry["alive"])


def in_use(name: SegmentName, pids: tuple[int, ...]) -> FailedPreconditionError:
    """Return the error for a segment that these processes have attached."""
    by_whom = ", ".join(f"pid {pid}" for pid in pids)
    return FailedPreconditionError(
        f"{name.shared_name!r} is in use by living processes: {by_whom}"
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


def not_found(name: SegmentName) -> NotFoundError:
    """Return the error for a name that leads to nothing."""
    return NotFoundError(f"There is nothing {_named(name)}").with_fields(**_fields(name))


def _still_not_found(name: SegmentName, timeout: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"There is still nothing {_named(name)}, after {timeout:g} seconds"
    ).with_fields(**_fields(name))


def _named(name: SegmentName) -> str:
    where = f"in the namespace {name.namespace!r}" if name.namespace else "outside of namespaces"
    return f"named {name.shared_name!r} {where}"


def _fields(name: SegmentName) -> dict[str, str | None]:
    return {
        "segment": name.system_name,
        "shared_name": name.shared_name,
        "namespace": name.namespace,
    }


def _uids(owners: Owners) -> list[int] | None:
    if owners == "any":
        return None
    return [os.geteuid(), 0] if owners == "mine" else [int(uid) for uid in owners]


def _attach(name: SegmentName, owners: Owners) -> _core.Handle | None:
    while True:
        try:
            found, version, handle = _core.open(name.path, _uids(owners))
        except ShmaccError as error:
            raise error.about(name.system_name) from None
        if found == "nothing":
            return None
        if handle is None:
            # Its creator is proved dead, if it ever had one, so any process may remove it.
            if found == "unfinished" and _core.remove_unfinished(name.path):
                return None
            raise _refusal(name, found, version)
        if _enter(name, handle):
            return handle


def _enter(name: SegmentName, handle: _core.Handle) -> bool:
    try:
        entered = handle.enter(
            name.path, semaphore_path(name.system_name, handle.config()["token"])
        )
    except ShmaccError as error:
        handle.close()
        raise error.about(name.system_name) from None
    except BaseException:
        handle.close()
        raise
    if not entered:
        handle.close()
    return entered


def _is_taken(name: SegmentName) -> bool:
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


def _remove_unused(name: SegmentName) -> None:
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
            if removed or viewed.unlinked:
                return
            pids = users(viewed)
        # Without pids, another process has removed it, or one is on its way in or out.
        if pids or time.monotonic() > deadline:
            raise in_use(name, pids)
        time.sleep(_SHORTEST_PAUSE)


def _already_exists(name: SegmentName) -> AlreadyExistsError:
    return AlreadyExistsError(
        f'There is something {_named(name)} already, and if_exists is "error"'
    ).with_fields(**_fields(name))


def _create(
    name: SegmentName, spec: "Spec", arrays: list[tuple[int, Any]], *, unlink_on_close: bool
) -> _core.Handle | None:
    """Return a handle on a new segment; None: another process has made one by now."""
    token = int.from_bytes(os.urandom(8)) | 1
    return _core.create(
        name.path,
        semaphore_path(name.system_name, token),
        name=name.shared_name,
        kind=layout.KINDS[spec.kind],
        members=[member.config() for member in spec.members],
        reduction=layout.REDUCTIONS[spec.reduction],
        lanes=spec.lanes or 1,
        capacity=spec.capacity,
        is_private=spec.private,
        unlink_on_close=unlink_on_close,
        token=token,
        hash_key=os.urandom(32),
        mode=0o600 if spec.mode is None else spec.mode,
        arrays=arrays,
    )


def _refusal(name: SegmentName, found: str, version: int) -> ShmaccError:
    if found == "nothing":
        return not_found(name)
    if found == "other version":
        return (
            DataLossError(
                "it was made by another version of shmacc, with layout version "
                f"{version}; this one reads version {layout.VERSION}"
            )
            .with_fields(version=version)
            .about(name.system_name)
        )
    held = found == "held unfinished"
    by_whom = "a process holds" if held else "no process holds"
    unfinished = UnfinishedError(f"an unfinished file that {by_whom}")
    return unfinished.with_fields(held=held).about(name.system_name)
