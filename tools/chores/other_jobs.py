"""Makes other jobs' segments in /dev/shm, until SIGTERM or the end of the process that started it.

Their names are those that tests use, in no namespace and in others: tests must neither meet nor
touch them. Some are open in this process; the others were open in a process that was killed. This
process also has a segment open whose name is removed.

    python -P tools/chores/other_jobs.py

It prints a line once they exist, and removes them at its end: the status is 1 if one was touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np

import shmacc
from shmacc import errors, testing

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it, no temporary file
_NAMES = ("embeddings", "model", "params")
_ALIVE, _KILLED = "elsewhere", "another"
_FILE = re.compile(rf"(sem\.)?shmacc\.(({_ALIVE}|{_KILLED}):)?({'|'.join(_NAMES)})(\.\w{{16}})?")
_SIGNAL_AT_THE_PARENTS_END = 1  # PR_SET_PDEATHSIG of prctl


def _open(namespace: str, *wanted: str) -> list[object]:
    os.environ["SHMACC_NAMESPACE"] = namespace
    opened = []
    for name in wanted:
        with contextlib.suppress(errors.AlreadyExistsError):  # a real job has this name
            opened.append(_open_one(name))
    return opened


def _open_one(name: str) -> object:
    if name == "embeddings":
        sparse = shmacc.SparseConditionalAccumulator("f4", (1000, 8), name, if_exists="error")
        sparse.apply_grad([1, 2], np.ones((2, 8), np.float32))
        return sparse
    if name == "model":
        members = {"w": shmacc.TensorSpec((3,), "f4")}
        return shmacc.AccumulatorGroup(members, name, if_exists="error")
    return shmacc.SharedArrays({"w": np.ones(3)}, name, if_exists="error")


def _open_and_be_killed() -> None:
    child = os.fork()
    if child == 0:
        _opened = _open(_KILLED, *_NAMES), _open("", "embeddings", "model")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def _open_without_a_name() -> object:
    removed = shmacc.ConditionalAccumulator("f4", (1000,), "removed")
    removed.unlink()
    return removed


def _found() -> dict[str, tuple[int, int]]:
    """Return each file's inode and time: these change when it is replaced or written to."""
    found = {}
    for name in filter(_FILE.fullmatch, testing.leaked_names()):
        status = (_SHARED_MEMORY / name).stat()
        found[name] = (status.st_ino, status.st_mtime_ns)
    return found


def main() -> int:
    """Make them, wait for the end, and remove them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    ctypes.CDLL(None).prctl(_SIGNAL_AT_THE_PARENTS_END, signal.SIGTERM)
    before = _found()
    _open_and_be_killed()
    _opened = _open("", "params"), _open(_ALIVE, *_NAMES), _open_without_a_name()
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
