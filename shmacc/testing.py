"""For tests of programs that use shmacc: names of their own, and a check that none is left."""

import contextlib
import os
from collections.abc import Iterator

from shmacc import names


@contextlib.contextmanager
def isolated_namespace() -> Iterator[str]:
    """Puts all names of this process, and of children it starts, under a fresh namespace.

    On leaving, whatever still stands under it is removed, in use or not.

    Yields:
        The namespace, which is the value of ``SHMACC_NAMESPACE`` meanwhile.
    """
    namespace = f"test-{os.getpid()}-{os.urandom(6).hex()}"
    before = os.environ.get(names.NAMESPACE_VARIABLE)
    os.environ[names.NAMESPACE_VARIABLE] = namespace
    try:
        yield namespace
    finally:
        if before is None:
            del os.environ[names.NAMESPACE_VARIABLE]
        else:
            os.environ[names.NAMESPACE_VARIABLE] = before
        for name in leaked_names(namespace):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{names.SHM_DIRECTORY}/{name}")


def leaked_names(namespace: str | None = None) -> tuple[str, ...]:
    """Names of segments and semaphores in ``/dev/shm``, sorted.

    Args:
        namespace: Only those under it; None: all of this library's.
    """
    found = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        semaphore = names.parse_semaphore_file(file_name)
        segment = names.parse_segment_file(semaphore[0] if semaphore else file_name)
        if segment is not None and namespace in {None, segment.namespace}:
            found.append(file_name)
    return tuple(found)
