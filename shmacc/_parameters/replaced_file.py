"""Replaces a file atomically: it has all of its new content at once, or stays as it was."""

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shmacc import _core
from shmacc.errors import InvalidArgumentError

_LONGEST_NAME = 255  # bytes, on Linux's file systems


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces the file at `path` when the block ends; permissions stay.

    Until then the new file has no name, so the system frees it if the process dies. On a file
    system without nameless files (NFS), it has a name beside `path`, and a killed process leaves it
    behind. A symbolic link stays, and leads to the new file.

    Raises:
        InvalidArgumentError: `path` leads to something other than a file.
        OSError: The system refused.
    """
    replaced = _status(path)
    target = Path(os.path.realpath(path))
    with contextlib.ExitStack() as at_end:
        directory = _core.open_file(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        at_end.callback(directory.close)
        name, opened = None, _open_nameless(target.parent)
        if opened is None:
            name = _hidden(target)
            at_end.callback(name.unlink, missing_ok=True)
            # Register the clean-up before the file exists: a signal handler may raise in between.
            opened = _core.open_file(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        at_end.callback(opened.close)
        file = at_end.enter_context(os.fdopen(opened.fileno(), "wb", closefd=False))
        yield file
        file.flush()
        if replaced is not None:
            _give_rights(opened.fileno(), replaced)
        # Flush the contents before the name changes: after a power failure, the name leads to the
        # old file or to the complete new file.
        os.fsync(opened.fileno())
        if name is None:
            _link(opened.fileno(), target, directory.fileno())
        else:
            name.replace(target)
        # Flush the directory, too: it holds the new name, which flushing the file does not write.
        os.fsync(directory.fileno())


def _status(path: Path) -> os.stat_result | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgumentError(f"{path} must be a file, which is replaced, but is none")
    return status


def _open_nameless(directory: Path) -> _core.Descriptor | None:
    """Open a new file without a name; None if `_link` could not give it a name later."""
    with contextlib.suppress(OSError):
        opened = _core.open_file(directory, os.O_TMPFILE | os.O_WRONLY, 0o666)
        # `_link` needs this path, which does not exist without /proc.
        if Path(_of_descriptor(opened.fileno())).exists():
            return opened
    return None


def _hidden(target: Path) -> Path:
    """Return a hidden name in the target's folder, random so that nobody else uses it."""
    return _beside(target, secrets.token_hex(4))


def _beside(target: Path, ending: str) -> Path:
    """Return a hidden name in the target's folder; a long name is cut to fit."""
    kept = os.fsencode(target.name)[: _LONGEST_NAME - len(ending) - 2]
    return target.with_name(f".{os.fsdecode(kept)}.{ending}")


def _of_descriptor(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _give_rights(descriptor: int, replaced: os.stat_result) -> None:
    mode = stat.S_IMODE(replaced.st_mode)
    for owner in replaced.st_uid, -1:  # -1 keeps our uid: only root can give files away
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner, replaced.st_gid)
            break
    else:
        mode &= ~stat.S_IRWXG  # these permissions were for another group
    os.fchmod(descriptor, mode)


def _link(descriptor: int, target: Path, directory: int) -> None:
    """Give a nameless file the target's name; then flush it: btrfs flushes no nameless file.

    If the target's name is taken, the file first gets a second name, and is then renamed to the
    target's. The second name is always the same, and a lock on the directory keeps other processes
    from using it. So if a process dies between the two steps, the next call removes the file that
    was left. If another program holds the lock (perhaps for ever, to keep systemd-tmpfiles out of
    the directory), this call uses a random second name, and a death leaves that file.
    """
    source = _of_descriptor(descriptor)
    with contextlib.suppress(FileExistsError):
        os.link(source, target, src_dir_fd=directory)  # src_dir_fd makes it follow the link
        os.fsync(descriptor)
        return
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        name = _beside(target, "shmacc-save")
    except OSError:
        name = _hidden(target)
    try:
        name.unlink(missing_ok=True)
        os.link(source, name, src_dir_fd=directory)
        os.fsync(descriptor)
        name.replace(target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
