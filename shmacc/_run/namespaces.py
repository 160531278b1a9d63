"""The namespace of a run's children, whose names are removed at the end, also if all is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shmacc._base import names
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment import removal
from shmacc._values.specs import TensorSpec
from shmacc.errors import FailedPreconditionError


@contextmanager
def of_children(name: str | None) -> Iterator[str]:
    """Yield the children's namespace; then remove its names, unless a named run has failed."""
    outer = names.current_namespace()
    if name is None:
        # A long outer namespace is cut: the random number still tells runs apart.
        own = f"run-{os.getpid()}-{os.urandom(6).hex()}"
        namespace = f"{outer[: names.LONGEST_NAMESPACE - len(own) - 1]}.{own}" if outer else own
        with _cleaner(namespace):
            try:
                yield namespace
            finally:
                removal.remove_namespace(namespace)
        return
    namespace = names.checked_namespace(name, "name")
    if outer:
        namespace = names.checked_namespace(f"{outer}.{name}", "name")
    with _only_run(name):
        yield namespace
        removal.remove_namespace(namespace)


# The program of a process that outlives the run's process. If its standard input ends without a
# byte, the run was killed: it removes the names, for 2 s, until the children are killed, too.
_CLEANER = """
import os, sys, time
folder, *prefixes = sys.argv[1:]
if not sys.stdin.buffer.read():
    for _ in range(20):
        for name in os.listdir(folder):
            if name.startswith(tuple(prefixes)):
                try:
                    os.unlink(folder + "/" + name)
                except FileNotFoundError:
                    pass
        time.sleep(0.1)
"""


@contextmanager
def _cleaner(namespace: str) -> Iterator[None]:
    """Have the names in a namespace removed if this process is killed in the block."""
    prefix = f"{names.PREFIX}{namespace}:"
    command = [sys.executable, "-I", "-S", "-c", _CLEANER, names.SHM_DIRECTORY]
    # In a session of its own, since a terminal's Ctrl-C is not for it.
    with subprocess.Popen(  # noqa: S603  this Python, and names
        [*command, prefix, names.SEMAPHORE_FILE_PREFIX + prefix],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as cleaner:
        try:
            yield
        finally:
            with suppress(BrokenPipeError):  # it was killed
                cleaner.communicate(b"not killed")


@contextmanager
def _only_run(name: str) -> Iterator[None]:
    # The kernel proves whether the process that holds this segment still lives.
    try:
        held = SharedArrays(
            {"run": TensorSpec((), "uint8")},
            f"run.{name}",
            if_exists="replace",
            unlink_on_close=True,
        )
    except FailedPreconditionError as error:
        raise FailedPreconditionError(
            f"The run {name!r} is under way, in process {error.pids}"
        ).with_fields(pids=error.pids) from None
    with held:
        yield
