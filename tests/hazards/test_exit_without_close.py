"""Processes that end without a close, in every way that Python has, and with threads that wait."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.interpreter import run
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, testing
from shmacc.inspection import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.threads


def left_behind() -> tuple[str, ...]:
    return testing.leaked_names(os.environ["SHMACC_NAMESPACE"])


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator("f8", (), "exits", reduction_type="SUM") as made:
        yield made
        made.unlink()


ENDS: Final = {
    "": 0,
    "sys.exit(3)": 3,
    "raise RuntimeError('on purpose')": 1,
    "os._exit(4)": 4,
    "os.kill(os.getpid(), 9)": -9,
}


@pytest.mark.parametrize("statement", ENDS)
def test_a_named_one_stays_whole_and_a_private_one_goes_with_its_process(
    acc: ConditionalAccumulator, statement: str
) -> None:
    status, _, complaints = run(
        f"""
        private = shmacc.SparseConditionalAccumulator("f4")
        private.apply_grad([1], [1.0])
        acc = shmacc.attach("exits")
        also = shmacc.attach("exits")
        acc.apply_grad(1.0)
        also.apply_grad(2.0)
        {statement}
        """
    )
    assert status == ENDS[statement]
    assert complaints == "" or "on purpose" in complaints
    until(lambda: acc.stats().attached == 1)
    assert acc.take(2, timeout=0).value == 3.0
    assert all(finding.severity is Severity.NOTE for finding in inspection.check("exits"))
    if statement.startswith("os."):
        # Nothing in such a process could still run; the cleaner finds what it left.
        assert len(left_behind()) == 4
        for leftover in inspection.leftovers(namespace=os.environ["SHMACC_NAMESPACE"]):
            assert inspection.clean(leftover)
    assert len(left_behind()) == 2


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise RuntimeError('on purpose')"])
def test_daemon_threads_that_wait(acc: ConditionalAccumulator, ending: str) -> None:
    """The interpreter shuts down with its own exit status, without a crash and without a hang."""
    status, _, complaints = run(
        f"""
        acc = shmacc.attach("exits")
        for _ in range(2):
            daemon(lambda: acc.take(5))
            daemon(lambda: acc.take(5, timeout=3600))
            daemon(lambda: acc.take_partial(5))
        until(lambda: acc.stats().waiting == 6)
        daemon(lambda: acc.wait_step(5))
        def activities():
            return shmacc.inspection.describe("exits").processes[-1].activity
        until(lambda: activities() == "waits for the step")
        {ending}
        """
    )
    assert status == ENDS[ending], complaints
    # The handle is closed at the end, as any open file: their takes may still hear of that.
    assert all(word not in complaints for word in ("Fatal", "terminate", "Segmentation"))
    # Those who wait are gone, and hold nobody up.
    until(lambda: acc.stats().waiting == 0 and acc.stats().attached == 1)
    assert acc.apply_grad(1.0)
    assert acc.take_grad(1, timeout=0) == 1.0


def test_a_thread_that_is_joined_at_the_end_must_be_let_go(acc: ConditionalAccumulator) -> None:
    """Python waits for threads that are no daemons; a close from the main thread ends theirs."""
    status, output, complaints = run(
        """
        acc = shmacc.attach("exits")
        def wait():
            try:
                acc.take(5)
            except shmacc.errors.CancelledError as error:
                print("cancelled")
        threading.Thread(target=wait).start()
        until(lambda: acc.stats().waiting == 1)
        acc.close()
        """
    )
    assert (status, output, complaints) == (0, "cancelled", "")
    assert acc.stats().attached == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("acc")
def test_dropped_without_a_close() -> None:
    """A handle that is garbage is as good as closed, also in a cycle; a private one is removed."""

    def drop() -> None:
        handles: list[Any] = [shmacc.attach("exits") for _ in range(10)]
        handles.append(ConditionalAccumulator("f4"))
        handles.append(handles)

    def attached_after_drops() -> int:
        first = shmacc.attach("exits")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  descriptors
        drop()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        return first.stats().attached

    assert run_apart(attached_after_drops) == 2
    assert all("exits" in name for name in left_behind())


def test_nothing_that_was_handed_out_is_shared_memory() -> None:
    """Arrays outlive the accumulator, its segment and its mapping."""
    with shmacc.SparseConditionalAccumulator("f4", None, "arrays", reduction_type="SUM") as sparse:
        sparse.apply_grad(range(1000), np.ones((1000, 64)))
        taken = sparse.take(1, timeout=0)
        sparse.unlink()
    for array in (taken.indices, taken.values, taken.row_counts, taken.shape):
        assert array.flags.writeable
        np.add(array, 1, out=array)
    assert taken.values.sum() == 2 * 64_000
    with pytest.raises(errors.FailedPreconditionError):
        sparse.num_accumulated()
