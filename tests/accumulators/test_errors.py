"""Errors are builtin ones that say what was given and what to do, also after a pickle."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.support import LONG, until

import shmacc
from shmacc import (
    ConditionalAccumulator,
    IndexedSlices,
    SparseConditionalAccumulator,
    errors,
    inspection,
    testing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.threads

ERRORS: Final[dict[str, tuple[type[BaseException], ...]]] = {
    "InvalidArgumentError": (ValueError,),
    "DeadlineExceededError": (TimeoutError,),
    "CancelledError": (),
    "NotFoundError": (FileNotFoundError,),
    "AlreadyExistsError": (FileExistsError,),
    "FailedPreconditionError": (RuntimeError,),
    "ResourceExhaustedError": (MemoryError,),
    "PermissionDeniedError": (PermissionError,),
    "OutOfRangeError": (OverflowError,),
    "FinishedError": (errors.OutOfRangeError,),
    "DataLossError": (),
    "WorkerDiedError": (),
    "ChiefDiedError": (),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_builtin_ones_and_pickle(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.ShmaccError)
    assert all(issubclass(kind, builtin) for builtin in ERRORS[name])
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"


def test_errors_that_were_raised_pickle() -> None:
    with ConditionalAccumulator(np.float32, [2]) as acc:
        acc.apply_grad([1, 2])
        for call in (
            lambda: acc.apply_grad([1]),
            lambda: acc.take_grad(2, timeout=0),
            lambda: shmacc.attach("nobody"),
        ):
            with pytest.raises(errors.ShmaccError) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))
            assert type(again) is type(caught.value)
            assert str(again) == str(caught.value)
            assert again.__dict__ == caught.value.__dict__


NO_NUMBERS: Final[dict[str, tuple[Any, str]]] = {
    "None": (None, "None was given"),
    "a dict": ({1: 2.0}, "a dict was given"),
    "a set": ({1.0}, "a set was given"),
    "objects": (np.array([object()]), "an array of Python objects was given"),
    "a list with None": ([1.0, None], "a list that holds more than numbers was given"),
}


@pytest.mark.parametrize(("value", "words"), NO_NUMBERS.values(), ids=list(NO_NUMBERS))
def test_what_is_no_array_of_numbers_is_named(value: Any, words: str) -> None:
    with ConditionalAccumulator("f4") as dense, SparseConditionalAccumulator("f4") as sparse:
        applies: dict[str, Callable[[], bool]] = {
            "grad": lambda: dense.apply_grad(value),
            "grad_values": lambda: sparse.apply_grad([1], value),
            "grad_indices": lambda: sparse.apply_grad(value, [1.0]),
        }
        for what, apply in applies.items():
            with pytest.raises(errors.InvalidArgumentError, match=words) as caught:
                apply()
            assert str(caught.value).startswith(f"{what} must be an array of numbers")
        assert dense.num_accumulated() == sparse.num_accumulated() == 0


def test_a_masked_array_is_refused() -> None:
    """NumPy's own conversion would add what is masked, without a word."""
    masked: Any = np.ma.array([1.0, 2.0], mask=[False, True])
    with ConditionalAccumulator("f8") as acc:
        with pytest.raises(errors.InvalidArgumentError, match="mask would be ignored"):
            acc.apply_grad(masked)
        assert acc.apply_grad(masked.filled(0))
        assert acc.take_grad(1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("grad", [np.ones(3), ([1], [1.0]), None])
def test_what_is_not_like_indexed_slices_says_what_it_lacks(grad: Any) -> None:
    with (
        SparseConditionalAccumulator("f4") as acc,
        pytest.raises(
            errors.InvalidArgumentError, match=r"IndexedSlices was expected, but .* has no"
        ),
    ):
        acc.apply_indexed_slices_grad(grad)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "CMEAN"])
def test_a_takes_result_is_no_partial(reduction: str) -> None:
    with (
        SparseConditionalAccumulator("f4", reduction_type=reduction) as sparse,
        ConditionalAccumulator("f4", reduction_type=reduction) as dense,
    ):
        sparse.apply_indexed_slices_grad(IndexedSlices([[2.0]], [1]))
        dense.apply_grad([2.0])
        for acc in (sparse, dense):
            taken: Any = acc.take(1)
            with pytest.raises(errors.InvalidArgumentError, match="take_partial hands out sums"):
                acc.apply_partial(taken, local_step=1)
            assert acc.num_accumulated() == 0


def test_a_timeout_says_what_came_and_who_is_there() -> None:
    with ConditionalAccumulator("f4") as acc:
        acc.apply_grad([1.0])
        with pytest.raises(TimeoutError, match="1 of the 17 required gradients") as caught:
            acc.take(17, timeout=0)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.accumulated, error.required, error.step) == (1, 17, 0)
        assert error.pids == (os.getpid(),)
        assert f"pid {os.getpid()}" in str(error)
        with pytest.raises(errors.DeadlineExceededError, match="global step is still 0") as caught:
            acc.wait_step(5, timeout=0)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.accumulated, error.required, error.step) == (1, None, 0)
        assert (error.dropped, error.pids) == (0, (os.getpid(),))
        assert f"pid {os.getpid()}" in str(error)


def _sleeps_in_a_wait(acc: Any, thread: int) -> bool:
    """Whether this process waits, and this thread of it sleeps: it has looked at what is there."""
    activity = inspection.describe(acc.shared_name).processes[0].activity
    stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8")
    waits = activity in {"waits in the queue", "waits for the step"}
    return waits and stat.rpartition(")")[2].split()[0] == "S"


WAITS: Final[dict[str, Callable[[Any], Any]]] = {
    "take": lambda acc: acc.take(3, timeout=0.5),
    "take_grad": lambda acc: acc.take_grad(3, timeout=0.5),
    "round": lambda acc: acc.round(3, timeout=0.5).__enter__(),
    "take_partial": lambda acc: acc.take_partial(3, timeout=0.5),
    "wait_step": lambda acc: acc.wait_step(4, timeout=0.5),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_a_timeout_says_what_was_dropped_during_the_wait(wait: Callable[[Any], Any]) -> None:
    with ConditionalAccumulator("f4") as acc, ThreadPoolExecutor(1) as pool:
        acc.set_global_step(4)
        assert not acc.apply_grad(1.0, 3)  # before the wait, so of no interest to it
        thread = pool.submit(threading.get_native_id).result(LONG)
        waiting = pool.submit(wait, acc)
        until(lambda: _sleeps_in_a_wait(acc, thread))
        assert acc.apply_grad(1.0, 4)
        for _ in range(2):
            assert not acc.apply_grad(1.0, 3)
        with pytest.raises(errors.DeadlineExceededError) as caught:
            waiting.result(LONG)
        error = caught.value
        assert (error.accumulated, error.dropped, error.step) == (1, 2, 4)
        assert error.pids == (os.getpid(),)
        assert "2 were dropped during this wait" in str(error)
        if error.required is not None:
            assert error.required == 3
            assert "1 of the 3 required gradients" in str(error)
            assert "global step is 4" in str(error)


def test_refusals_because_of_a_seal_count_as_dropped() -> None:
    with ConditionalAccumulator("f4") as acc, ThreadPoolExecutor(1) as pool:
        acc.take_partial(0, seal=True)
        waiting = pool.submit(acc.take, 1, timeout=0.5)
        until(lambda: acc.stats().waiting == 1)
        assert not acc.apply_grad(1.0)
        with pytest.raises(errors.DeadlineExceededError) as caught:
            waiting.result(LONG)
        assert (caught.value.accumulated, caught.value.dropped) == (0, 1)


def test_a_take_that_waits_for_the_end_of_a_round_says_the_same() -> None:
    """Its gradients had arrived, and the round keeps them."""
    with ConditionalAccumulator("f4") as acc, ThreadPoolExecutor(1) as pool:
        acc.apply_grad(1.0)
        with acc.round(1):
            waiting = pool.submit(acc.take, 1, timeout=0.2)
            until(lambda: acc.stats().waiting == 1)
            assert not acc.apply_grad(1.0)
            with pytest.raises(errors.DeadlineExceededError) as caught:
                waiting.result(LONG)
        error = caught.value
        assert (error.accumulated, error.required, error.dropped, error.step) == (1, 1, 1, 0)
        assert f"had arrived, but pid {os.getpid()} has a round open;" in str(error)


def test_a_take_that_was_not_first_in_line_says_so() -> None:
    """It would read as nonsense without: 1 of 1 had arrived, and yet nothing was taken."""
    with ConditionalAccumulator("f4") as acc, ThreadPoolExecutor(1) as pool:
        first = pool.submit(acc.take, 2)
        until(lambda: acc.stats().waiting == 1)
        acc.apply_grad(1.0)
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(1, timeout=0)
        acc.apply_grad(1.0)
        assert first.result(LONG).count == 2
        assert "1 of the 1 required gradients had arrived, but other takes" in str(caught.value)


def test_in_use_names_who_uses_it() -> None:
    with ConditionalAccumulator("f4", None, "used") as acc:
        with pytest.raises(errors.FailedPreconditionError, match=f"pid {os.getpid()}") as caught:
            shmacc.inspection.remove("used")
        assert pickle.loads(pickle.dumps(caught.value)).pids == (os.getpid(),)
        acc.unlink()
    assert testing.leaked_names(os.environ["SHMACC_NAMESPACE"]) == ()
