"""How a name comes to its segment, and how it leaves it.

**Making.** A segment is built complete in an anonymous file (``O_TMPFILE`` in ``/dev/shm``) and
then given its name by ``linkat``, which fails if the name is taken. So no name ever leads to a
half-made segment, and a maker that dies before the link leaves nothing at all.

**The semaphore** is only the queue in front of the lock (lock.hpp); whoever finds it missing makes
it, after the segment has its name. Its name carries the segment's token, so it belongs to one
incarnation of the name only.

**Attaching.** Open, check, take a presence byte (presence.hpp), and then look again, holding the
name lock: is the segment still not given up, and does the name still lead to it? If not, let go and
start over.

**Removing** (``unlink``, the cleaner, an attacher that finishes what a dead remover began) happens
under the name lock only: mark the segment as given up, remove the name if it leads to this very
segment, remove the semaphore. The cleaner looks for presences first, under the same lock. So
either the cleaner sees the attacher's presence, or the attacher sees the mark; a mark is never
taken back, and a name is never removed that leads elsewhere by now.

The name lock is the kernel's record lock on a byte of the segment's own file, held for a few system
calls; not the lock that applies take, which a stopped process may hold for long.

Each instant of death: before ``linkat`` nothing is there; between it and the semaphore the next one
makes the semaphore; between mark and removal of the name the next attacher finishes the removal;
between the removals of name and semaphore a semaphore is left that nobody can meet again, and that
the cleaner finds by its token.

Not done: ``shm_open(O_CREAT)`` with the magic written last (others must wait for, and judge, a
half-made segment); unlinking by name alone (it may have been made anew).
"""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import posix_ipc

from shmacc import _core, layout, unfinished
from shmacc.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ShmaccError,
)
from shmacc.names import SHM_DIRECTORY, SegmentName, semaphore_name

if TYPE_CHECKING:
    from shmacc.dtypes import DType

_NEW_SEGMENT_BYTES = layout.HEADER_BYTES + 3 * layout.PAGE_BYTES  # two tables, the semaphore
_NAME_LOCK_PATIENCE = 2.0  # seconds; it is held for a few system calls

# One thread at a time opens, removes or closes: while it does so it may have a second descriptor of
# a segment's file, and closing that drops the record locks of the whole process. Reentrant, because
# a collected accumulator may be closed in the middle of it.
_opening = threading.RLock()


class OtherVersionError(DataLossError):
    """The segment has another layout than this version of shmacc reads.

    Attributes:
        found: The layout's version.
    """

    found: int

    @classmethod
    def of(cls, name: SegmentName, found: int) -> "OtherVersionError":
        """The error for a segment of that layout version."""
        error = cls(
            f"{name.system_name}: it was made by another version of shmacc, with layout version "
            f"{found}; this one reads version {layout.VERSION}"
        )
        error.found = found
        return error


@dataclass(frozen=True, slots=True)
class Spec:
    """What a segment is to be.

    Attributes:
        kind: "sparse" or "dense".
        dtype: The accumulator's dtype.
        shape: The declared shape, None for unknown dimensions; None for an unknown rank.
        reduction: "MEAN", "SUM" or "CMEAN".
        mode: Permission bits of segment and semaphore.
        private: Whether it goes with its creator.
    """

    kind: str
    dtype: "DType"
    shape: tuple[int | None, ...] | None
    reduction: str
    mode: int
    private: bool


def open_or_create(name: SegmentName, spec: Spec) -> _core.Handle:
    """A handle on the segment of that name, which is made if there is none.

    Raises:
        DataLossError: Something else stands under the name.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Shared memory is full, or descriptors have run out.
    """
    with _opening:
        published = False
        while True:
            try:
                handle = _attach(name)
            except ShmaccError:
                if published:  # what cannot be attached, for want of space say, is not left behind
                    with contextlib.suppress(ShmaccError):
                        unlink_unused(name, view(name))
                raise
            if handle is not None:
                return handle
            published = _publish(name, spec)


def attach(name: SegmentName) -> _core.Handle:
    """A handle on the segment of that name.

    Raises:
        NotFoundError: There is none.
        DataLossError: Something else stands under the name.
        PermissionDeniedError: It is another user's.
        ResourceExhaustedError: Descriptors or places in the table of processes have run out.
    """
    with _opening:
        handle = _attach(name)
    if handle is None:
        raise NotFoundError(f"There is no accumulator named {name.shared_name!r}")
    return handle


def view(name: SegmentName) -> _core.Handle:
    """A handle to look through, which does not attach; errors as `attach`."""
    with _opening:
        handle = _open(name, remove_unfinished=False)
    if handle is None:
        raise NotFoundError(f"There is no accumulator named {name.shared_name!r}")
    return handle


def close(handle: _core.Handle) -> None:
    """Closes a handle; harmless if it is closed."""
    with _opening:
        handle.close()


def unlink(name: SegmentName, handle: _core.Handle) -> None:
    """Removes the segment's name and semaphore; those who have it open go on using it.

    Raises:
        PermissionDeniedError: The segment is another user's.
        DeadlineExceededError: Another process does not let go of the name.
    """
    _may_remove(name)
    with _opening, _name_lock(name, handle):
        _remove(name, handle)


def unlink_unused(name: SegmentName, handle: _core.Handle) -> bool:
    """`unlink`, but only if no living process is attached; whether it was done, and here."""
    _may_remove(name)
    with _opening, _name_lock(name, handle):
        if handle.others_attached or handle.is_attached or _inode(name) != handle.inode:
            return False
        _remove(name, handle)
        return True


def _may_remove(name: SegmentName) -> None:
    # Asked before the segment is marked as given up: a mark is never taken back.
    try:
        owner = os.stat(name.path, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return
    if os.geteuid() not in {0, owner}:
        raise PermissionDeniedError(
            f"{name.system_name} belongs to uid {owner}; only that user and root can remove it"
        )


def _remove(name: SegmentName, handle: _core.Handle) -> None:
    handle.mark_unlinked()
    if _inode(name) == handle.inode:
        posix_ipc.unlink_shared_memory("/" + name.system_name)
    remove_semaphore(semaphore_name(name.system_name, handle.config()["token"]))


def remove_semaphore(semaphore: str) -> None:
    """Removes a semaphore's name, if it is there and this user may.

    A stranger who found it missing may have made it; then it stays behind, for root to clean.
    """
    with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        posix_ipc.unlink_semaphore(semaphore)


def _inode(name: SegmentName) -> int | None:
    try:
        return os.stat(name.path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _name_lock(name: SegmentName, handle: _core.Handle) -> Iterator[None]:
    deadline = time.monotonic() + _NAME_LOCK_PATIENCE
    while not handle.lock_name():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"Another process has been opening or removing {name.shared_name!r} for "
                f"{_NAME_LOCK_PATIENCE} s (is it stopped?)"
            )
        time.sleep(0.001)
    try:
        yield
    finally:
        handle.unlock_name()


def _open(name: SegmentName, *, remove_unfinished: bool) -> _core.Handle | None:
    try:
        found = _core.open(name.path)
    except ShmaccError as error:
        raise type(error)(f"{name.system_name}: {error}") from None
    if isinstance(found, _core.Handle):
        return found
    if isinstance(found, int):
        raise OtherVersionError.of(name, found)
    if found == "unfinished":
        _judge_unfinished(name, remove=remove_unfinished)
    return None


def _attach(name: SegmentName) -> _core.Handle | None:
    while True:
        handle = _open(name, remove_unfinished=True)
        if handle is None:
            return None
        try:
            attached = _enter(name, handle)
        except BaseException:
            handle.close()
            raise
        if attached:
            return handle
        handle.close()


def _enter(name: SegmentName, handle: _core.Handle) -> bool:
    """Queue, presence, second look; False: the segment was given up meanwhile."""
    semaphore = _make_semaphore(name, handle)
    handle.attach()
    with _name_lock(name, handle):
        if handle.unlinked:
            _remove(name, handle)
            return False
        if _inode(name) != handle.inode:
            remove_semaphore(semaphore)
            return False
    handle.sweep()
    return True


def _make_semaphore(name: SegmentName, handle: _core.Handle) -> str:
    config = handle.config()
    semaphore = semaphore_name(name.system_name, config["token"])
    file = f"{SHM_DIRECTORY}/sem.{semaphore[1:]}"
    _discard_what_is_no_semaphore(file)
    if not os.path.exists(file):
        try:
            posix_ipc.Semaphore(semaphore, posix_ipc.O_CREX, config["mode"], 1).close()
        except posix_ipc.ExistentialError:
            pass  # somebody else makes it
        except OSError as error:
            raise _shm_failure(error) from error
    # The umask has cut the mode, the contract says it is exact, and its maker may have died here:
    # whoever comes and may, mends it.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if os.stat(file).st_mode & 0o777 != config["mode"]:
            os.chmod(file, config["mode"])
    missing = False
    while True:
        try:
            handle.use_queue(semaphore)
            break
        except NotFoundError:
            # The segment was removed at this moment, semaphore and all: a queue of our own,
            # nameless at once, will do until the second look.
            missing = True
            posix_ipc.Semaphore(semaphore, posix_ipc.O_CREAT, config["mode"], 1).close()
    if missing:
        remove_semaphore(semaphore)
    return semaphore


def _discard_what_is_no_semaphore(file: str) -> None:
    # Mapping a file shorter than a semaphore is a SIGBUS at its first use.
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size < layout.SEMAPHORE_BYTES:
            os.unlink(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataLossError(f"{file} is no semaphore, and cannot be removed: {error}") from error


def _publish(name: SegmentName, spec: Spec) -> bool:
    """Makes the segment; False: somebody else has by then."""
    try:
        directory = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _shm_failure(error) from error
    try:
        fd = os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _core.initialise(
                fd,
                name=name.shared_name,
                kind=layout.KINDS[spec.kind],
                dtype=spec.dtype.number,
                sum=spec.dtype.sum_code,
                components=spec.dtype.components,
                reduction=layout.REDUCTIONS[spec.reduction],
                declared=None
                if spec.shape is None
                else [-1 if dim is None else dim for dim in spec.shape],
                is_private=spec.private,
                token=_token(),
                hash_key=os.urandom(32),
                mode=spec.mode,
            )
            os.fchmod(fd, spec.mode)
            # src_dir_fd makes CPython call linkat, which can follow the link to the open file.
            os.link(
                f"/proc/self/fd/{fd}",
                name.system_name,
                src_dir_fd=directory,
                dst_dir_fd=directory,
                follow_symlinks=True,
            )
        finally:
            os.close(fd)
    except FileExistsError:
        return False
    except OSError as error:
        if isinstance(error, ShmaccError):
            raise
        raise _shm_failure(error) from error
    finally:
        os.close(directory)
    return True


def _shm_failure(error: OSError) -> ShmaccError:
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return PermissionDeniedError(f"{SHM_DIRECTORY} does not let this user in: {error}")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return ResourceExhaustedError(
            f"Too many open files: each attached accumulator has one (`ulimit -n`): {error}"
        )
    if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT}:
        space = os.statvfs(SHM_DIRECTORY)
        return ResourceExhaustedError(
            f"Shared memory is full: {_NEW_SEGMENT_BYTES} bytes are needed for a new segment, "
            f"{space.f_bavail * space.f_frsize} of {space.f_blocks * space.f_frsize} are free in "
            f"{SHM_DIRECTORY} ({error}). To get more: `docker run --shm-size=...`, a larger "
            "emptyDir with medium Memory, or `mount -o remount,size=... /dev/shm`"
        )
    return FailedPreconditionError(f"{SHM_DIRECTORY} cannot be used: {error}")


def _judge_unfinished(name: SegmentName, *, remove: bool) -> None:
    if remove and unfinished.remove(name):
        return
    error = unfinished.UnfinishedError.of(name)
    if error.held:
        raise error


def _token() -> int:
    return int.from_bytes(os.urandom(8)) | 1


def _identify_process() -> None:
    with open("/proc/self/stat", "rb") as line:
        start_ticks = int(line.read().rpartition(b")")[2].split()[19])
    namespace = os.stat("/proc/self/ns/pid").st_ino
    _core.set_identity(namespace, start_ticks, _token())


def _before_fork() -> None:
    _opening.acquire()
    _core.before_fork()


def _after_fork_in_parent() -> None:
    _core.after_fork_in_parent()
    _opening.release()


def _after_fork_in_child() -> None:
    # Record locks are not inherited: the child takes presences of its own.
    _identify_process()
    _core.after_fork_in_child()
    _opening.release()


_identify_process()
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
