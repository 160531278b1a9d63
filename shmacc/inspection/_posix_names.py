"""Opens semaphores, and removes POSIX names, through posix_ipc.

Segments are not opened here: if this process has a segment attached, closing another descriptor of
the file would drop this process's record locks.
"""

import contextlib
import errno
import os
import stat

from shmacc._base import layout, names
from shmacc.errors import PermissionDeniedError


def unlink(file_name: str) -> bool:
    """Remove a segment's or a semaphore's name; return False if there is none.

    Args:
        file_name: The name in /dev/shm.

    Raises:
        PermissionDeniedError: This user may not remove it.
    """
    import posix_ipc  # only here: most commands do not need it

    try:
        if names.parse_semaphore_file(file_name) is None:
            posix_ipc.unlink_shared_memory(f"/{file_name}")
        else:
            posix_ipc.unlink_semaphore(f"/{file_name.removeprefix(names.SEMAPHORE_FILE_PREFIX)}")
    except posix_ipc.ExistentialError:
        return False
    except posix_ipc.PermissionsError as error:
        raise PermissionDeniedError(f"{file_name}: {error}") from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise PermissionDeniedError(f"{file_name}: {error.strerror}") from error
    return True


def semaphore_value(system_name: str, token: int) -> int | None:
    """Return the value of a segment's semaphore; with several lanes, of the first lane's.

    Return None if there is no semaphore, or this user may not write to it (the C library maps it
    for writing), or posix_ipc is not installed.
    """
    path = names.semaphore_path(system_name, token)
    try:
        found = os.stat(path, follow_symlinks=False)
        # The C library maps the file whatever its size: reading a file that is too short is a
        # SIGBUS. A link to a segment must not be opened: closing it would drop record locks.
        lanes, rest = divmod(found.st_size, layout.SEMAPHORE_BYTES)
        if not stat.S_ISREG(found.st_mode) or rest or not 1 <= lanes <= layout.MAX_LANES:
            return None
        import posix_ipc
    except (ImportError, OSError):
        return None
    try:
        semaphore = posix_ipc.Semaphore(names.semaphore_name(system_name, token))
    except (posix_ipc.Error, OSError):
        return None
    with contextlib.closing(semaphore):
        return int(semaphore.value)
