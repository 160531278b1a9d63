"""Opening, making and removing segments by name.

The extension does each step atomically (opening.hpp has the protocol); this module decides on the
next one: when there is nothing under a name, another kind of file, or a segment that is being
removed at this moment; and it words the errors. No file of a segment is opened from Python: closing
it would drop the record locks that this process relies on.
"""

import errno
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from shmacc import _core
from shmacc import _layout as layout
from shmacc._names import SegmentName, semaphore_path
from shmacc.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ShmaccError,
)

if TYPE_CHECKING:
    from shmacc._spec import Spec  # needs NumPy, which inspection does not

Owners = Literal["mine", "any"] | Iterable[int]
"""Whose segments may be attached: this user's and root's, all users', or those of these uids."""

_LARGEST_UID = 2**32 - 2


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


def open_or_create(name: SegmentName, spec: "Spec", owners: Owners) -> _core.Handle:
    """Return a handle on the segment of that name, which is made if there is none.

    Raises:
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Shared memory is full, or descriptors have run out.
    """
    while True:
        handle = _attach(name, owners) or _create(name, spec)
        if handle is not None:
            return handle


def attach(name: SegmentName, owners: Owners) -> _core.Handle:
    """Return a handle on the segment of that name.

    Raises:
        NotFoundError: There is none.
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Descriptors or places in the table of processes have run out.
    """
    handle = _attach(name, owners)
    if handle is None:
        raise not_found(name)
    return handle


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
    where = f"in the namespace {name.namespace!r}" if name.namespace else "outside of namespaces"
    return NotFoundError(f"There is no accumulator named {name.shared_name!r} {where}").with_fields(
        segment=name.system_name, shared_name=name.shared_name, namespace=name.namespace
    )


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


def _create(name: SegmentName, spec: "Spec") -> _core.Handle | None:
    """Return a handle on a new segment; None: another process has made one by now."""
    token = int.from_bytes(os.urandom(8)) | 1
    shape = spec.shape
    return _core.create(
        name.path,
        semaphore_path(name.system_name, token),
        name=name.shared_name,
        kind=layout.KINDS[spec.kind],
        dtype=spec.dtype.number,
        sum=spec.dtype.sum_code,
        components=spec.dtype.components,
        reduction=layout.REDUCTIONS[spec.reduction],
        declared=None if shape is None else [-1 if dim is None else dim for dim in shape],
        is_private=spec.private,
        token=token,
        hash_key=os.urandom(32),
        mode=0o600 if spec.mode is None else spec.mode,
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
