"""Writes the record of a run, which other processes read (`run_records` describes it)."""

import multiprocessing
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shmacc import _core
from shmacc._base import names
from shmacc._segment import opening
from shmacc._segment.options import Options
from shmacc._segment.run_records import LOOP_ENDS, ROW, Facts, State
from shmacc._segment.spec import NOT_REDUCED, MemberSpec, Spec
from shmacc._values import dtypes
from shmacc.errors import FailedPreconditionError

__all__ = ["Called", "Record", "State", "kept"]


class Called(NamedTuple):
    """How a run was called; see `Facts`."""

    command: str
    folder: str

    @classmethod
    def here(cls) -> Self:
        """Return the command line and folder of this process."""
        return cls(_command(), _folder())


class Record:
    """A run's record, which its process writes."""

    def __init__(self, rows: npt.NDArray[np.int64], roles: int) -> None:
        self._rows: Any = rows.reshape(-1).view(np.uint8)
        self._written = [0] * roles
        self._states = [State.DUE] * roles
        self._ended = [deque([0] * LOOP_ENDS, LOOP_ENDS) for _ in range(roles)]
        self._starts = [0] * roles

    def note(
        self, role: int, state: State, *, pid: int = 0, ends: int = 0, due: float | None = None
    ) -> None:
        """Record the state of one of the run's processes.

        Args:
            role: The number of the process's role; 0 is the chief.
            state: The state of the process.
            pid: The pid, if the process runs.
            ends: How often it has ended within the last 60 seconds.
            due: Seconds until the role's next process starts; None: it starts at once, or never.
        """
        now = time.time_ns()
        if self._states[role] is State.RUNNING and state is not State.RUNNING:
            self._ended[role].append(now)
        self._starts[role] += state is State.RUNNING and self._states[role] is not State.RUNNING
        self._states[role] = state
        self._written[role] += 1
        # One call, so that no signal handler interrupts the write.
        ROW.pack_into(
            self._rows,
            role * ROW.size,
            self._written[role],
            state,
            pid,
            ends,
            now + int((due or 0) * 1e9),
            self._ended[role][-1],
            self._ended[role][0],
            max(0, self._starts[role] - 1),
            self._written[role],
        )


@contextmanager
def kept(
    namespace: str,
    roles: Sequence[str],
    called: Called | None = None,
    *,
    named: bool,
    restarts: int,
) -> Iterator[Record]:
    """Hold a run's record during the block. It stays afterwards: the run's cleaner removes it.

    Args:
        namespace: The namespace of the run's children.
        roles: The run's processes: "chief", "worker 0", ...
        called: How `run` was called; None: by this process's command line.
        named: Whether the run has a name.
        restarts: How often each process may be started again within 60 seconds.

    Raises:
        FailedPreconditionError: A living process holds the record (``pids``).
    """
    outer, called = names.current_namespace(), called or Called.here()
    facts = Facts(
        parent=os.getpid(),
        outer=outer,
        named=named,
        restarts=restarts,
        started=time.time(),
        command=called.command,
        folder=called.folder,
        roles=tuple(roles),
    )
    text = np.frombuffer(facts.text(), np.uint8)
    rows = len(roles), ROW.size // 8
    specs = (
        MemberSpec("facts", "dense", dtypes.resolve(np.uint8), text.shape),
        MemberSpec("roles", "dense", dtypes.resolve(np.int64), rows),
    )
    contents: list[list[tuple[int, npt.NDArray[np.uint8] | None]]] = [
        [(text.size, text)],
        [(len(roles) * ROW.size, None)],
    ]
    spec = Spec("arrays", specs, NOT_REDUCED, lanes=None, capacity=None, mode=None, private=False)
    # If a record exists and nobody holds it, its run was killed or has failed: replace it.
    options = Options(mode=None, owners="mine", if_exists="replace", unlink_on_close=False)
    try:
        handle = opening.open_or_create(names.of_run(namespace), spec, options, lambda: contents)
    except FailedPreconditionError as error:
        if not error.pids:  # nobody holds it
            raise
        run = namespace.removeprefix(f"{outer}.")
        raise FailedPreconditionError(
            f"The run {run!r} is under way, in process {', '.join(map(str, error.pids))}"
        ).with_fields(pids=error.pids) from None
    with closing(handle):
        mapped = _core.MappedArrays(handle, [each.dtype.numpy for each in specs], writable=True)
        yield Record(mapped.array(1, handle), len(roles))


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed
        return ""


def _command() -> str:
    """Return the command line that starts the program again; empty if there is none.

    In a prompt, a notebook or a child of multiprocessing, the command line would not call `run`.
    """
    program = vars(sys.modules["__main__"]).get("__file__") or sys.argv[:1] == ["-c"]
    if not program or multiprocessing.parent_process() is not None:
        return ""
    return shlex.join([sys.executable or sys.orig_argv[0], *sys.orig_argv[1:]])
