"""For tests of programs that use shmacc: separate names, and a check that none is left."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

from shmacc._layout import names

_SETTING = "shmacc_namespace"


class _Inherited:
    """A namespace that a child of multiprocessing takes over when it is unpickled there.

    A child of a forkserver has the environment that the server was started with, which may be that
    of an earlier test. But every child that is not forked from its parent is sent its process
    object, with the settings that its parent had (the ``_config`` that also carries the
    authentication key).
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __reduce__(self) -> tuple[Callable[[str], "_Inherited"], tuple[str]]:
        return _inherit, (self.namespace,)


def _inherit(namespace: str) -> _Inherited:
    os.environ[names.NAMESPACE_VARIABLE] = namespace
    return _Inherited(namespace)


def _settings_of_children() -> dict[str, Any]:
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return settings


@contextlib.contextmanager
def isolated_namespace() -> Iterator[str]:
    """Put all names of this process, and of children it starts, under a fresh namespace.

    This includes children of every start method of multiprocessing, even of a forkserver that runs
    already, and all other processes that inherit the environment.

    On leaving, all names that are left under it are removed, in use or not.

    Yields:
        The namespace, which is the value of ``SHMACC_NAMESPACE`` meanwhile.
    """
    namespace = f"test-{os.getpid()}-{os.urandom(6).hex()}"
    before = os.environ.get(names.NAMESPACE_VARIABLE)
    os.environ[names.NAMESPACE_VARIABLE] = namespace
    settings = _settings_of_children()
    outer = settings.get(_SETTING)
    settings[_SETTING] = _Inherited(namespace)
    try:
        yield namespace
    finally:
        if outer is None:
            del settings[_SETTING]
        else:
            settings[_SETTING] = outer
        if before is None:
            del os.environ[names.NAMESPACE_VARIABLE]
        else:
            os.environ[names.NAMESPACE_VARIABLE] = before
        for name in leaked_names(namespace):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{names.SHM_DIRECTORY}/{name}")


def leaked_names(namespace: str | None = None) -> tuple[str, ...]:
    """Return the names of segments and semaphores in ``/dev/shm``, sorted.

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
