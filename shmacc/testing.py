"""For tests of programs that use shmacc: a namespace for each test, and a check for leaks."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

from shmacc._base import names

_SETTING = "shmacc_namespace"


class _Inherited:
    """Carries a namespace to children of multiprocessing, which set it when they unpickle this.

    A forkserver's child has the environment that the server was started with, possibly by an
    earlier test. But multiprocessing sends each child that is not forked from its parent a process
    object with the parent's settings (``_config``, which also carries the authentication key).
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __reduce__(self) -> tuple[Callable[[str], "_Inherited"], tuple[str]]:
        return _inherit, (self.namespace,)


def _inherit(namespace: str) -> _Inherited:
    os.environ[names.NAMESPACE_VARIABLE] = namespace
    return _Inherited(namespace)


@contextlib.contextmanager
def isolated_namespace() -> Iterator[str]:
    """Put all names of this process, and of children it starts, under a fresh namespace.

    This includes children of every start method of multiprocessing, even of a forkserver that runs
    already, and all other processes that inherit the environment.

    The end of the block removes all names that are left in the namespace, even names in use. In a
    child that was forked in the block, it removes none.

    Yields:
        The namespace, which is the value of ``SHMACC_NAMESPACE`` in the block.
    """
    namespace = f"test-{os.getpid()}-{os.urandom(6).hex()}"
    before = os.environ.get(names.NAMESPACE_VARIABLE)
    os.environ[names.NAMESPACE_VARIABLE] = namespace
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    outer = settings.get(_SETTING)
    settings[_SETTING] = _Inherited(namespace)
    pid = os.getpid()
    try:
        yield namespace
    finally:
        if outer is None:
            settings.pop(_SETTING, None)
        else:
            settings[_SETTING] = outer
        if before is None:
            os.environ.pop(names.NAMESPACE_VARIABLE, None)
        else:
            os.environ[names.NAMESPACE_VARIABLE] = before
        if os.getpid() == pid:
            for file_name in names.files_in(namespace):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{names.SHM_DIRECTORY}/{file_name}")


def leaked_names(namespace: str | None = None) -> tuple[str, ...]:
    """Return the names of segments and semaphores in ``/dev/shm``, sorted.

    Args:
        namespace: Only names of this namespace, and of runs that were started in it, are returned;
            None: all names of this library.
    """
    return names.files_in(namespace)
