"""If a system call is always refused, operations raise a clear error or work without the call.

The refusal comes from seccomp or a filesystem. Nobody waits for ever, nothing is removed or lost
because the kernel did not answer a question, and no process aborts.
"""

import errno
import fcntl
import gc
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.denied_calls import deny, needs_denials
from helpers.support import SANITIZED, until

import shmacc
from shmacc import (
    ConditionalAccumulator,
    SharedArrays,
    SparseConditionalAccumulator,
    errors,
    inspection,
)
from shmacc._base import names

pytestmark = [
    needs_denials,
    pytest.mark.usefixtures("namespace"),
    pytest.mark.skipif(SANITIZED, reason="a sanitizer makes calls of its own"),
]

NAME: Final = "refused"
_PUNCH_HOLE, _FUTEX_WAIT = 3, 0

CALLS: Final[dict[str, Callable[[], None]]] = {
    "pread64": partial(deny, "pread64", errno.EIO),
    "statfs": partial(deny, "statfs"),
    "getrandom": partial(deny, "getrandom"),
    "locking": partial(deny, "fcntl", a1=fcntl.F_SETLK),
    "locking, without locks": partial(deny, "fcntl", errno.EINVAL, a1=fcntl.F_SETLK),
    "asking for locks": partial(deny, "fcntl", a1=fcntl.F_GETLK),
    "madvise": partial(deny, "madvise"),
    "punching": partial(deny, "fallocate", errno.EOPNOTSUPP, a1=_PUNCH_HOLE),
    "reserving": partial(deny, "fallocate", a1=0),
    "a handler": partial(deny, "rt_sigaction", a0=signal.SIGSEGV),
}


def _read() -> None:
    with SharedArrays.attach("arrays") as arrays:
        assert arrays["a"].sum() == 36


def _clean() -> None:
    for each in inspection.leftovers(namespace=names.current_namespace()):
        if each.removable:
            inspection.clean(each)


DEEDS: Final[dict[str, Callable[[], Any]]] = {
    "attaching": lambda: shmacc.attach(NAME).close(),
    "creating": lambda: SparseConditionalAccumulator("f4", None, NAME).close(),
    "creating another": lambda: SharedArrays(
        {"a": np.zeros(9)}, "other", if_exists="replace"
    ).close(),
    "reading arrays": _read,
    "describing": lambda: inspection.describe(NAME),
    "listing": inspection.list_segments,
    "checking": inspection.check_all,
    "cleaning": _clean,
}


def _try(call: str) -> dict[str, str]:
    CALLS[call]()
    said = {}
    for name, deed in DEEDS.items():
        try:
            deed()
        except (errors.ShmaccError, OSError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("call", CALLS)
def test_refused_system_calls_are_an_error_or_do_no_harm(call: str) -> None:
    with (
        SparseConditionalAccumulator("f4", None, NAME, reduction_type="SUM") as acc,
        SharedArrays({"a": np.arange(9.0)}, "arrays", unlink_on_close=True) as arrays,
    ):
        acc.apply_grad([1, 2], [[1.0], [2.0]])
        there = set(shmacc.testing.leaked_names(names.current_namespace()))
        said = run_apart(_try, call)
        for what in said.values():
            # The error must not blame another process.
            assert not what.startswith(("DataLoss", "DeadlineExceeded", "NotFound")), what
        if call in {"pread64", "getrandom", "locking"}:
            assert "attaching" in said
        assert there <= set(shmacc.testing.leaked_names(names.current_namespace()))
        assert acc.apply_grad([2], [[1.0]])
        assert acc.take(2, timeout=0).values.ravel().tolist() == [1, 3]
        assert arrays["a"].sum() == 36
        acc.unlink()
    for each in inspection.leftovers(namespace=names.current_namespace()):
        inspection.clean(each)


def _grow(acc: Any) -> None:
    CALLS["punching"]()
    for step in range(2):
        for first in range(0, 9000, 300):
            acc.apply_grad(range(first, first + 300), np.ones((300, 1)), local_step=step)
        acc.apply_grad(range(9000), np.ones((9000, 1)), local_step=step)
        taken = acc.take(1, timeout=0)
        assert np.array_equal(taken.indices, range(9000))
        assert (taken.values == 2).all()


def test_without_holes_in_files_results_are_the_same() -> None:
    """In gVisor files have no holes: old entries of an index must not count later."""
    with SparseConditionalAccumulator("f4", None, NAME, reduction_type="SUM") as acc:
        run_apart(_grow, acc)
        acc.unlink()


def _wait(*, pipe: Pipe) -> None:
    deny("futex", a1=_FUTEX_WAIT)
    with shmacc.attach(NAME) as acc:
        used, began = time.process_time(), time.monotonic()
        with pytest.raises(errors.DeadlineExceededError):
            acc.take(1, timeout=0.3)
        assert time.process_time() - used < (time.monotonic() - began) / 2, "it spins"
        pipe.say()
        assert acc.take(1, timeout=30).count == 1


def test_waits_without_futexes_sleep_and_miss_nothing() -> None:
    with SparseConditionalAccumulator("f4", None, NAME) as acc, Apart(_wait).ready() as taker:
        acc.apply_grad([1], [[1.0]])
        taker.result()
        acc.unlink()


def test_without_a_handler_read_only_arrays_raise_and_name_the_remedy() -> None:
    def read() -> str:
        CALLS["a handler"]()
        with SharedArrays.attach("arrays") as arrays:
            with pytest.raises(errors.FailedPreconditionError) as caught:
                arrays["a"]
            return str(caught.value)

    with SharedArrays({"a": np.arange(9.0)}, "arrays", unlink_on_close=True):
        assert "SHMACC_GUARD=0" in run_apart(read)


def _wait_in_takes(count: int, *, pipe: Pipe) -> None:
    with shmacc.attach(NAME) as acc:

        def wait() -> None:
            with pytest.raises(errors.CancelledError):
                acc.take(1000, timeout=60)

        threads = [threading.Thread(target=wait) for _ in range(count)]
        for thread in threads:
            thread.start()
        until(lambda: acc.stats().waiting == count)
        pipe.say()
        for thread in threads:
            thread.join()


CHANGES: Final[dict[str, tuple[Callable[[Any, list[Any]], Any], int, int]]] = {
    "the end of a round": (lambda _, block: block[0].__exit__(None, None, None), 1, 0),
    "a failed round": (lambda _, block: block[0].__exit__(ValueError, ValueError(), None), 0, 1),
    "a dropped round": (lambda _, block: block.clear(), 0, 1),
    "a collected round": (lambda _, block: block.append(block), 0, 1),
    "a close": (lambda acc, _: acc.close(), 0, 1),
    "a step": (lambda acc, _: acc.advance_step(5), 5, 0),
    "a cancel": (lambda acc, _: acc.cancel(), 0, 1),
}


def _change(change: str, *, pipe: Pipe) -> None:
    other = shmacc.attach(NAME)  # keeps the process attached
    acc = shmacc.attach(NAME)
    block = [acc.round(1, timeout=0)]
    block[0].__enter__()
    pipe.say()
    pipe.hear()
    deny("fallocate", a1=0)
    CHANGES[change][0](acc, block)
    del block
    gc.collect()
    pipe.say()
    pipe.hear()
    other.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_cannot_read_the_queue_to_wake_a_take_is_made_in_full(change: str) -> None:
    """The queue has more than one page of takes, and this process cannot reserve the second."""
    _, step, pending = CHANGES[change]
    with ConditionalAccumulator("f4", (), NAME) as acc:
        acc.apply_grad(1.0)
        with Apart(_change, change).ready() as changer, Apart(_wait_in_takes, 70).ready() as takes:
            changer.say()
            changer.hear()
            stats = acc.stats()
            assert (acc.global_step, stats.num_accumulated) == (step, pending)
            assert stats.round_pid is None
            changer.say()
            changer.result()
            acc.cancel()
            takes.result()
        acc.unlink()
