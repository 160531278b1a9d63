"""Opens or makes the segment under a name, and returns a handle on it.

The extension does each step atomically (opening.hpp has the protocol). This module decides on the
next step if there is nothing under the name, another kind of file, or a segment that is being
removed at this moment; and it words the errors. removal.py removes names.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmacc import _core
from shmacc._base import layout
from shmacc._base.names import SegmentName, semaphore_path
from shmacc._base.signals import pass_on
from shmacc._segment import removal
from shmacc.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    ShmaccError,
)

if TYPE_CHECKING:
    from shmacc._segment.options import Options, Owners  # as for Spec
    from shmacc._segment.spec import Spec  # needs NumPy, which inspection does not

Contents = Callable[[], list[list[tuple[int, Any]]]]
"""Returns new shared arrays in the extension's form. For each array: its size in bytes and its
contents (None: zeros; fewer bytes are repeated), then the same for each slot."""

_NOUNS = {
    "sparse": "an accumulator (shmacc.SparseConditionalAccumulator)",
    "dense": "an accumulator (shmacc.ConditionalAccumulator)",
    "group": "an accumulator (shmacc.AccumulatorGroup)",
    "arrays": "shared arrays (shmacc.SharedArrays)",
    "parameters": "parameters (shmacc.Parameters), which only updates change",
}
_SHORTEST_PAUSE = 0.001  # seconds between two lookups of a name
_LONGEST_PAUSE = 0.010


def open_or_create(
    name: SegmentName, spec: "Spec[Any]", options: "Options", contents: Contents = list
) -> _core.Handle:
    """Return a handle on the segment of that name; make the segment if there is none.

    With ``if_exists="attach"`` an existing segment is attached. With "error" and "replace", the
    handle is always on a new segment. One atomic step gives the segment its name (opening.hpp): if
    two processes ask for the name at once, one gets it, and the other finds it taken.

    Args:
        name: The name.
        spec: The spec of a new segment.
        options: Whose segments may be attached, what to do with an existing segment, and whether a
            new segment's name is removed with its handle.
        contents: Returns the contents of new shared arrays.

    Raises:
        AlreadyExistsError: The segment exists, and `if_exists` is "error".
        FailedPreconditionError: The segment is in use, and `if_exists` is "replace".
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: The segment is another user's.
        ResourceExhaustedError: Shared memory is full, or descriptors have run out.
    """
    while True:
        handle = None
        if options.if_exists == "attach":
            handle = _attach(name, options.owners)
        elif options.if_exists == "replace":
            removal.remove_unused(name)  # a death after this leaves nothing under the name
        elif removal.is_taken(name):
            raise AlreadyExistsError(
                f'There is something {removal.named(name)} already, and if_exists is "error"'
            ).with_fields(**removal.fields(name))
        handle = handle or _create(name, spec, contents(), unlink_on_close=options.unlink_on_close)
        if handle is not None:
            return handle


def attach(name: SegmentName, owners: "Owners", timeout: float | None = None) -> _core.Handle:
    """Return a handle on the segment of that name.

    Args:
        name: The name.
        owners: Whose segments may be attached.
        timeout: How many seconds to wait until there is a segment; None: do not wait.

    Raises:
        NotFoundError: There is no segment, and no timeout.
        DeadlineExceededError: The timeout passed, and there was still no segment.
        DataLossError: The file under the name is no segment of this version.
        PermissionDeniedError: The segment is another user's.
        ResourceExhaustedError: Descriptors or entries of the list of processes have run out.
    """
    handle = _attach(name, owners)
    if handle is not None:
        return handle
    if timeout is None:
        raise removal.not_found(name)
    deadline = time.monotonic() + timeout
    pause = _SHORTEST_PAUSE
    while handle is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(
                f"There is still nothing {removal.named(name)}, after {timeout:g} seconds"
            ).with_fields(**removal.fields(name))
        time.sleep(min(pause, left))  # signal handlers run here
        pause = min(pause * 1.5, _LONGEST_PAUSE)
        handle = _attach(name, owners)
    return handle


def differs(
    name: SegmentName, exists: str, what: str, existing: str, asked: str
) -> InvalidArgumentError:
    """Return the error for a segment that differs from what was asked for.

    Args:
        name: The segment.
        exists: The beginning of the message, such as "'x' exists".
        what: The property that differs.
        existing: The existing value.
        asked: The value that was asked for.
    """
    return InvalidArgumentError(
        f"{exists} with {what} {existing}, but {asked} was asked for. If the existing one is left "
        f"from an earlier run, `shmacc-inspect remove {name.system_name} --yes` removes it, and so "
        'does if_exists="replace"; or use another shared_name'
    ).with_fields(segment=name.system_name, what=what, existing=existing, asked=asked)


def wrong_kind(
    name: SegmentName, existing: str, asked: str, *, constructed: bool
) -> InvalidArgumentError:
    """Return the error for a segment whose kind is not that of the class that opens it.

    Args:
        name: The segment.
        existing: The segment's kind.
        asked: The kind that the class opens.
        constructed: Whether a constructor, which could replace it, opens the segment.
    """
    what = f"{name.shared_name!r} is the name of {_NOUNS[existing]}"
    if constructed:
        return differs(name, what, "kind", existing, asked)
    return InvalidArgumentError(
        f"{what}, not of {_NOUNS[asked]}; shmacc.attach returns whatever has a name"
    ).with_fields(segment=name.system_name, what="kind", existing=existing, asked=asked)


def _uids(owners: "Owners") -> list[int] | None:
    if owners == "any":
        return None
    return [os.geteuid(), 0] if owners == "mine" else [int(uid) for uid in owners]


def _attach(name: SegmentName, owners: "Owners") -> _core.Handle | None:
    while True:
        try:
            found, version, handle = _core.open(name.path, _uids(owners))
        except ShmaccError as error:
            pass_on(error)
            raise error.about(name.system_name) from None
        if found == "nothing":
            return None
        if handle is None:
            # The maker died before the file was complete, so any process may remove the file.
            if found == "unfinished" and _core.remove_unfinished(name.path):
                continue  # another process may have removed it, and made a segment
            raise removal.refusal(name, found, version)
        if _enter(name, handle):
            return handle


def _enter(name: SegmentName, handle: _core.Handle) -> bool:
    try:
        entered = handle.enter(
            name.path, semaphore_path(name.system_name, handle.config()["token"])
        )
    except ShmaccError as error:
        pass_on(error)
        handle.close()
        raise error.about(name.system_name) from None
    except BaseException:
        handle.close()
        raise
    if not entered:
        handle.close()
    return entered


def _create(
    name: SegmentName,
    spec: "Spec[Any]",
    arrays: list[list[tuple[int, Any]]],
    *,
    unlink_on_close: bool,
) -> _core.Handle | None:
    """Return a handle on a new segment; None if another process has made one by now."""
    # The token is odd, so it is never 0: that would mean "no token".
    token = int.from_bytes(os.urandom(8)) | 1
    return _core.create(
        name.path,
        semaphore_path(name.system_name, token),
        name=name.written_name,
        kind=layout.KINDS[spec.kind],
        members=[member.config() for member in spec.members],
        reduction=layout.REDUCTIONS[spec.reduction],
        lanes=spec.lanes or 1,
        capacity=spec.capacity,
        is_private=spec.private,
        unlink_on_close=unlink_on_close,
        token=token,
        # A random key, so that nobody can choose row numbers of the same bucket (row_index.hpp).
        hash_key=os.urandom(32),
        mode=0o600 if spec.mode is None else spec.mode,
        arrays=arrays,
    )
