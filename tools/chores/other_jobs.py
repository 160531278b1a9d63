"""Makes segments like those of other jobs, and keeps them until SIGTERM or the end of its parent.

They have the names that tests use, without a namespace and in other namespaces: tests must neither
find nor touch them. Some are open in this process; a killed process has left the others. This
process also has a segment open whose name is removed.

    python -P tools/chores/other_jobs.py

It prints a line when they exist, and removes them at its end. If any was touched, its status is 1.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import shmacc
from shmacc import errors, testing

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it, no temporary file
_MAKE: dict[str, Any] = {
    "embeddings": partial(shmacc.SparseConditionalAccumulator, "f4", (1000, 8)),
    "model": partial(shmacc.AccumulatorGroup, {"w": shmacc.TensorSpec((3,), "f4")}),
    "params": partial(shmacc.SharedArrays, {"w": np.ones(3)}),
}
_ALIVE, _KILLED = "elsewhere", "another"
_FILE = re.compile(rf"(sem\.)?shmacc\.(({_ALIVE}|{_KILLED}):)?({'|'.join(_MAKE)})(\.\w{{16}})?")
_SIGNAL_AT_THE_PARENTS_END = 1  # PR_SET_PDEATHSIG of prctl


def _open(namespace: str, *wanted: str) -> list[object]:
    os.environ["SHMACC_NAMESPACE"] = namespace
    opened = []
    for name in wanted:
        with contextlib.suppress(errors.AlreadyExistsError):  # a real job has this name
            opened.append(_MAKE[name](name, if_exists="error"))
    return opened


def _open_and_be_killed() -> None:
    child = os.fork()
    if child == 0:
        _opened = _open(_KILLED, *_MAKE), _open("", "embeddings", "model")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def _found() -> dict[str, tuple[int, int]]:
    """Return each file's inode and time, which change if the file is replaced or written to."""
    names = filter(_FILE.fullmatch, testing.leaked_names())
    files = {name: (_SHARED_MEMORY / name).stat() for name in names}
    return {name: (file.st_ino, file.st_mtime_ns) for name, file in files.items()}


def main() -> int:
    """Make the other jobs' segments, wait for the end, and remove them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    ctypes.CDLL(None).prctl(_SIGNAL_AT_THE_PARENTS_END, signal.SIGTERM)
    before = _found()
    _open_and_be_killed()
    _opened = _open("", "params"), _open(_ALIVE, *_MAKE)
    without_a_name = shmacc.ConditionalAccumulator("f4", (1000,), "removed")
    without_a_name.unlink()
    made = {name: was for name, was in _found().items() if name not in before}
    print(f"other jobs have {len(made)} names in /dev/shm", flush=True)
    signal.sigwait([signal.SIGTERM])
    after = _found()
    touched = [name for name, was in made.items() if after.get(name) != was]
    for name in made:
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
    if touched:
        print(f"other jobs' names were touched: {', '.join(touched)}", file=sys.stderr)
    return bool(touched)


if __name__ == "__main__":
    sys.exit(main())
