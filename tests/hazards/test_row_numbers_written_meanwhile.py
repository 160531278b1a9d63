"""Another thread changes the row numbers while a call waits for the lock: the call uses a copy.

Row numbers are checked when the call begins, and used several times under the lock. Under the lock,
nothing is read that Python code can still change.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import apart
from helpers.lock_holder import activity, held
from helpers.support import until
from helpers.training import training

from shmacc import (
    AccumulatorGroup,
    IndexedSlices,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    optim,
)
from shmacc._accumulators.taken import GroupPartial, SparsePartial

pytestmark = pytest.mark.threads

ROWS: Final = [2, 3, 5, 7]
# Row numbers written meanwhile: out of range, all the same, in another order, other rows.
WRITTEN: Final = ([2**40, 2**50, -(2**40), -1], [3, 3, 3, 3], [7, 5, 3, 2], [1, 4, 6, 8])


@contextmanager
def waiting(name: str, call: Callable[[], Any]) -> Iterator[None]:
    """Make the call in a thread, which waits for the lock and goes on after the block."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            failures.append(error)

    thread = threading.Thread(target=run)
    with held(name):
        thread.start()
        until(lambda: activity(name, os.getpid()) == "waits for the lock")
        yield
    thread.join()
    if failures:
        raise failures[0]


def ones() -> np.ndarray[Any, Any]:
    return np.ones((len(ROWS), 2), np.float32)


def partial(rows: Any, counts: Any = None) -> SparsePartial:
    counts = np.ones(len(rows), np.int64) if counts is None else counts
    return SparsePartial(rows, ones(), np.array([10, 2]), counts, 1, 0)


class OnlyArray:
    """An object that NumPy can view as an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the array itself, not a copy."""
        return self.array


APPLIES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "apply_grad": lambda acc, rows: acc.apply_grad(rows, ones()),
    "a weight": lambda acc, rows: acc.apply_grad(rows, ones(), weight=2),
    "a given shape": lambda acc, rows: acc.apply_grad(rows, ones(), [10, 2]),
    "another's array": lambda acc, rows: acc.apply_grad(OnlyArray(rows), ones()),
    "slices": lambda acc, rows: acc.apply_indexed_slices_grad(IndexedSlices(ones(), rows)),
    "a partial": lambda acc, rows: acc.apply_partial(partial(rows)),
}
OF_A_GROUP: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "a group": lambda acc, rows: acc.apply({"t": (rows, ones())}, 0),
    "a group's partial": lambda acc, rows: acc.apply_partial(
        GroupPartial({"t": partial(rows)}, 1, 0), 0
    ),
}


@pytest.mark.parametrize("how", [*APPLIES, *OF_A_GROUP])
@apart()
def test_an_apply_does_not_see_changed_row_numbers(how: str) -> None:
    rows = np.array(ROWS)
    acc: Any
    if how in OF_A_GROUP:
        acc = AccumulatorGroup({"t": IndexedSlicesSpec((10, 2))}, "acc", reduction_type="SUM")
    else:
        acc = SparseConditionalAccumulator("f4", (10, 2), "acc", reduction_type="SUM")
    with acc:
        with waiting("acc", lambda: (APPLIES | OF_A_GROUP)[how](acc, rows)):
            rows[:] = WRITTEN[[*APPLIES, *OF_A_GROUP].index(how) % len(WRITTEN)]
        taken = acc.take(1)
        assert (taken["t"] if how in OF_A_GROUP else taken).indices.tolist() == ROWS
        acc.unlink()


@apart()
def test_an_apply_of_a_partial_does_not_see_changed_counts() -> None:
    rows, counts = np.array(ROWS), np.ones(len(ROWS), np.int64)
    with SparseConditionalAccumulator("f4", (10, 2), "acc", unlink_on_close=True) as acc:
        with waiting("acc", lambda: acc.apply_partial(partial(rows, counts))):
            counts[:] = [0, -1, 2**62, 5]
        assert acc.take(1).row_counts.tolist() == [1] * len(ROWS)


@pytest.mark.parametrize("number", range(len(WRITTEN)))
@apart()
def test_an_update_does_not_see_changed_row_numbers(number: int) -> None:
    """This holds for a round's own row numbers, too: an undo after a death needs the right rows."""
    zeros = np.zeros((10, 2), np.float32)
    with training({"t": zeros}, optim.SGD(1), ("params", None), sparse=["t"]) as (params, group):
        group.apply({"t": (ROWS, ones())}, 0)
        with group.round(1) as taken:
            by_values = number % 2 == 1
            rows = np.array(ROWS) if by_values else taken["t"].indices
            values = {"t": (rows, -ones())} if by_values else None
            with waiting("params", lambda: params.update(taken, values)):
                rows[:] = WRITTEN[number]
        assert np.flatnonzero(params["t"].any(axis=1)).tolist() == ROWS
