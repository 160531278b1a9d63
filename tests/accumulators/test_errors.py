"""Errors derive from builtin ones, say what was given and what to do, and survive pickling."""

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.lock_holder import activity
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, IndexedSlices, SparseConditionalAccumulator, errors

pytestmark = pytest.mark.threads

ERRORS: Final[dict[type[BaseException], tuple[str, ...]]] = {
    errors.ShmaccError: ("CancelledError", "DataLossError", "WorkerDiedError", "ChiefDiedError"),
    ValueError: ("InvalidArgumentError",), TimeoutError: ("DeadlineExceededError",),
    FileNotFoundError: ("NotFoundError",), FileExistsError: ("AlreadyExistsError",),
    RuntimeError: ("FailedPreconditionError",), MemoryError: ("ResourceExhaustedError",),
    PermissionError: ("PermissionDeniedError",), OverflowError: ("OutOfRangeError",),
    AssertionError: ("InternalError",), errors.OutOfRangeError: ("FinishedError",),
}  # fmt: skip


def test_error_classes_derive_from_builtin_ones_and_pickle() -> None:
    for builtin, names in ERRORS.items():
        for name in names:
            kind = getattr(errors, name)
            assert issubclass(kind, errors.ShmaccError)
            assert issubclass(kind, builtin)
            again = pickle.loads(pickle.dumps(kind("what happened")))
            assert (type(again), str(again)) == (kind, "what happened")


def test_errors_that_were_raised_pickle() -> None:
    with ConditionalAccumulator(np.float32, [2]) as acc:
        acc.apply_grad([1, 2])
        for call in (lambda: acc.apply_grad([1]), lambda: shmacc.attach("nobody")):
            with pytest.raises(errors.ShmaccError) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))
            assert (type(again), str(again)) == (type(caught.value), str(caught.value))
            assert again.__dict__ == caught.value.__dict__


def test_a_masked_array_is_refused() -> None:
    """NumPy's own conversion would silently add the masked values."""
    masked: Any = np.ma.array([1.0, 2.0], mask=[False, True])
    with ConditionalAccumulator("f8") as acc:
        with pytest.raises(errors.InvalidArgumentError, match="mask would be ignored"):
            acc.apply_grad(masked)
        assert acc.apply_grad(masked.filled(0))
        assert acc.take_grad(1).tolist() == [1.0, 0.0]


def test_the_error_for_an_object_names_its_missing_attribute() -> None:
    with SparseConditionalAccumulator("f4") as acc:
        for grad in (np.ones(3), ([1], [1.0]), None):
            said = r"IndexedSlices was expected, but .* has no"
            with pytest.raises(errors.InvalidArgumentError, match=said):
                acc.apply_indexed_slices_grad(grad)


def test_apply_partial_refuses_the_result_of_a_take() -> None:
    with (
        SparseConditionalAccumulator("f4") as sparse,
        ConditionalAccumulator("f4", reduction_type="SUM") as dense,
    ):
        sparse.apply_indexed_slices_grad(IndexedSlices([[2.0]], [1]))
        dense.apply_grad([2.0])
        for acc in (sparse, dense):
            taken: Any = acc.take(1)
            with pytest.raises(errors.InvalidArgumentError, match="take_partial hands out sums"):
                acc.apply_partial(taken, local_step=1)


def test_a_timeout_error_counts_gradients_and_names_attached_processes() -> None:
    with ConditionalAccumulator("f4") as acc:
        acc.apply_grad([1.0])
        for wait, required, said in (
            (lambda: acc.take(17, timeout=0), 17, "1 of the 17 required gradients"),
            (lambda: acc.wait_step(5, timeout=0), None, "global step is still 0"),
        ):
            with pytest.raises(TimeoutError, match=f"{said}.*pid {os.getpid()}") as caught:
                wait()
            error = pickle.loads(pickle.dumps(caught.value))
            assert (error.accumulated, error.required, error.step) == (1, required, 0)
            assert (error.dropped, error.pids) == (0, (os.getpid(),))


def _sleeps_in_a_wait(thread: int) -> bool:
    """Return whether this thread sleeps while it waits for gradients or for a step."""
    stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8")
    waits = activity("acc", os.getpid()) in {"waits in the queue", "waits for the step"}
    return waits and stat.rpartition(")")[2].split()[0] == "S"


def error_of(wait: Callable[..., Any], dropped: Callable[[], bool]) -> Any:
    """Return the error of a wait in which a gradient is dropped; retry with longer timeouts."""
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result(LONG)
        for timeout in (0.05, 0.5, 5, LONG):
            waiting = pool.submit(wait, timeout=timeout)
            until(lambda waiting=waiting: waiting.done() or _sleeps_in_a_wait(thread))  # type: ignore[misc]
            assert not dropped()
            error: Any = waiting.exception(2 * LONG)
            if error.dropped:
                break
    assert isinstance(error, errors.DeadlineExceededError)
    assert "1 were dropped during this wait" in str(error)
    assert (error.accumulated, error.dropped, error.pids) == (1, 1, (os.getpid(),))
    return error


@pytest.mark.parametrize("wait", ["take", "wait_step"])
def test_a_timeout_error_counts_dropped_gradients(acc: ConditionalAccumulator, wait: str) -> None:
    acc.set_global_step(4)
    acc.apply_grad(1.0, 4)
    assert not acc.apply_grad(1.0, 3)  # before the wait: the error leaves this gradient out
    error = error_of(partial(getattr(acc, wait), 4), lambda: acc.apply_grad(1.0, 3))
    assert (error.step, error.required) == (4, 4 if wait == "take" else None)


def test_a_take_behind_an_open_round_reports_dropped_gradients(acc: ConditionalAccumulator) -> None:
    """Enough gradients arrived, but the open round holds them."""
    acc.apply_grad(1.0)
    with acc.round(1):
        error = error_of(partial(acc.take, 1), lambda: acc.apply_grad(1.0))
    assert (error.required, error.step) == (1, 0)
    assert f"had arrived, but pid {os.getpid()} has a round open;" in str(error)


def test_a_timeout_reports_gradients_dropped_since_a_take(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    acc.take(1)
    assert not acc.apply_grad(1.0)
    waits: tuple[Callable[[], Any], ...] = (
        lambda: acc.take(1, timeout=0),
        lambda: acc.round(1, timeout=0).__enter__(),
        lambda: acc.wait_step(1, timeout=0),
        lambda: [None for _ in acc.steps(timeout=0)],
    )
    for wait in waits:
        with pytest.raises(errors.DeadlineExceededError, match="and 1 since the last take"):
            wait()
