"""Disturbs each process of a program that runs with this folder in PYTHONPATH.

Python imports a module of this name at its start. thrice.py starts such programs. All processes of
the program count their calls of the library in common files, one byte a call.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(os.environ["DISTURBED_FOLDER"])
# The process that makes the chief's call with this number (from 1) is killed. 0: no kill.
_KILLED_AT: Final = int(os.environ.get("DISTURBED_KILLED_AT", "0"))
# Whether the chief's later calls succeed. If not, each of them kills its process, too.
_ONCE: Final = os.environ.get("DISTURBED_ONCE") == "True"
_KILLS_ALL: Final = os.environ.get("DISTURBED_KILLS_ALL") == "True"
# The first worker to reach its apply of this number raises instead of applying. With _ALL_RAISE,
# every worker does. 0: nobody raises.
_RAISES_AT: Final = int(os.environ.get("DISTURBED_RAISES_AT", "0"))
_ALL_RAISE: Final = os.environ.get("DISTURBED_ALL_RAISE") == "True"

_applied = 0


def _is_main() -> bool:
    return multiprocessing.parent_process() is None


def _count(what: str) -> int:
    """Count a call, and return how many there have been."""
    with (_FOLDER / what).open("ab", buffering=0) as counter:
        counter.write(b".")
        return os.fstat(counter.fileno()).st_size


def _chief_calls() -> None:
    count = _count("calls")
    if count == _KILLED_AT or (count > _KILLED_AT > 0 and not _ONCE):
        os.kill(0 if _KILLS_ALL else os.getpid(), signal.SIGKILL)


def _worker_applies() -> None:
    global _applied  # noqa: PLW0603 - counts this process's applies
    if _is_main():
        _chief_calls()  # the program has no other process
        return
    _applied += 1
    _count(f"applied-{min(_applied, 2)}")
    if _applied == _RAISES_AT:
        with contextlib.suppress(FileExistsError):
            (_FOLDER / "raised").touch(exist_ok=_ALL_RAISE)
            raise ValueError("a typo")


def _wrap(owner: type[Any], name: str, before: Callable[[], None]) -> None:
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        before()
        return method(*args, **keywords)

    setattr(owner, name, wrapped)


def _disturb() -> None:
    import shmacc  # slow, so only in processes to disturb

    for cls in (
        shmacc.AccumulatorGroup,
        shmacc.ConditionalAccumulator,
        shmacc.SparseConditionalAccumulator,
    ):
        # A group's `apply` calls `_apply` once. A torch replica calls `_apply` itself.
        for name in ("_apply",) if hasattr(cls, "_apply") else ("apply", "apply_grad"):
            _wrap(cls, name, _worker_applies)
        for name in ("round", "round_async", "take", "take_async", "take_grad", "take_partial"):
            _wrap(cls, name, _chief_calls)
    _wrap(shmacc.Parameters, "update", _chief_calls)


if any("multiprocessing.resource_tracker" in argument for argument in sys.orig_argv):
    os.setpgid(0, 0)  # the tracker must survive the kills: it removes the semaphores of pools
else:
    _disturb()
